"""Calibration: the score that the reranker's evidence stands for, of which 0.5 is enough.

The examples of the installed experts are replayed as prompts. With the example's own row excluded,
they show the evidence of a prompt that belongs to an expert; with its whole expert left out, the
evidence of one that belongs to none. Texts of the background, each without its own row, show that
of everyday prompts.

The threshold rejects three in a hundred of the correctly answered examples (split conformal
prediction: Vovk, Gammerman and Shafer, 2005), or fewer if that still rejects nine in ten of those
without an expert and ninety-seven in a hundred of the background. The score is the posterior of two
normal distributions with equal variance, at the odds that put 0.5 at that threshold.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from expertctl.files import write_atomic
from expertctl.routing.reranker import NO_BACKGROUND, rerank
from expertctl.routing.vector_table import EncodedTexts, Rows, SearchHits, Vectors, VectorTable

CALIBRATION_FILE = "calibration.json"
MAX_REJECTED_SHARE = 0.03
"""The largest share of examples to reject although their expert is present."""
MIN_STRANGER_REJECTION = 0.9
"""The share of examples without their expert that is enough to reject: they are closer to other
experts than most prompts without an expert are."""
MIN_BACKGROUND_REJECTION = 0.97
"""The share of the texts of the background that is enough to reject."""
MAX_REPLAYED_EXAMPLES = 400
"""The largest number of examples to replay."""
MAX_EXAMPLES_PER_EXPERT = 5
"""The largest number of examples to replay per expert, unless most experts have more."""
RECALIBRATION_GROWTH = 0.1
"""Examples are replayed again when the number of experts changed by more than this share."""

_SEED = 7
_PRIOR_WEIGHT = 20
_MIN_SLOPE, _MAX_SLOPE = 4.0, 40.0

SearchFunction = Callable[[Vectors], SearchHits]
"""Searches an index for a vector."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The evidence at which the score is 0.5, and the slope of the log-odds."""

    threshold: float
    slope: float
    experts: int = 0
    """The number of experts at calibration."""

    def score(self, evidence: float) -> float:
        """Return a score between 0 and 1."""
        log_odds = self.slope * (evidence - self.threshold)
        return 1 / (1 + math.exp(-max(-30.0, min(log_odds, 30.0))))

    def is_fresh(self, experts: int) -> bool:
        """Tell whether the calibration still holds for this number of experts."""
        return abs(experts - self.experts) <= RECALIBRATION_GROWTH * self.experts


PRIORS = {
    "minilm": Calibration(0.70, 9.0),
    "static": Calibration(0.93, 9.0),
    "lexical": Calibration(0.38, 9.0),
}
"""Encoder → the calibration assumed while there are few examples, measured with one to ten experts
of one to five examples each (ADR 12)."""


@dataclass(frozen=True, slots=True)
class CalibrationEvidence:
    """The evidence of the replayed examples."""

    inside: tuple[float, ...]  # of those that reached their expert
    outside: tuple[float, ...]  # of all, with their expert left out
    background: tuple[float, ...] = ()  # of the texts of the background


NO_EVIDENCE = CalibrationEvidence((), ())


@dataclass(frozen=True, slots=True)
class _CalibrationExample:
    """An example: the positions of its expert and its rows, in the index and for reranking."""

    expert: int
    rerank_expert: int
    row: int
    rerank_row: int


def collect_evidence(
    table: VectorTable,
    deep: VectorTable,
    search: SearchFunction,
    *,
    background: EncodedTexts | None = None,
) -> CalibrationEvidence:
    """Replay some of the examples of all experts, and the texts of the background, as prompts."""
    deep_at = _match_rerank_rows(table, deep)
    others_rows = NO_BACKGROUND if background is None else background.rerank_rows
    inside, outside = [], []
    for example in _sample_examples(table, deep, deep_at):
        query = np.asarray(deep.rows[example.rerank_row])
        found = _search_without(table, search(np.asarray(table.rows[example.row])), example)
        candidates = deep_at[found][deep_at[found] >= 0]
        others = _other_candidates(deep, candidates, query, example, others_rows)
        mine = candidates[np.isin(candidates, others) | (candidates == example.rerank_expert)]
        verdict = rerank(deep, mine, query, background=others_rows, excluded_row=example.rerank_row)
        best = int(verdict.evidence.argmax())
        if mine[best] == example.rerank_expert:
            inside.append(float(verdict.evidence[best]))
        if len(others):
            without = rerank(deep, others, query, background=others_rows)
            outside.append(float(without.evidence.max()))
    replayed = [] if background is None else _replay_background(deep, deep_at, search, background)
    return CalibrationEvidence(tuple(inside), tuple(outside), tuple(replayed))


def _replay_background(
    deep: VectorTable, deep_at: Rows, search: SearchFunction, background: EncodedTexts
) -> Iterator[float]:
    """Yield the evidence of each text of the background, with its own row left out."""
    for number, (row, query) in enumerate(
        zip(background.rows, background.rerank_rows, strict=True)
    ):
        found = search(row).experts
        candidates = deep_at[found][deep_at[found] >= 0]
        if len(candidates):
            rest = np.delete(background.rerank_rows, number, axis=0)
            yield float(rerank(deep, candidates, query, background=rest).evidence.max())


def _other_candidates(
    deep: VectorTable,
    candidates: Rows,
    query: Vectors,
    example: _CalibrationExample,
    background: Vectors,
) -> Rows:
    """Return the candidates without the example's expert and without those like it.

    Otherwise other versions of a package would make prompts without an expert look close.
    """
    verdict = rerank(deep, candidates, query, background=background)
    own = int(np.flatnonzero(candidates == example.rerank_expert)[0])
    alike = verdict.groups == verdict.groups[own] if own < len(verdict) else []
    return np.delete(candidates, [own, *np.flatnonzero(alike)])


def fit_calibration(
    evidence: CalibrationEvidence, prior: Calibration, *, experts: int
) -> Calibration:
    """Fit a calibration to the evidence; the fewer examples, the more the prior counts."""
    inside, outside = np.array(evidence.inside), np.array(evidence.outside)
    trust = len(inside) / (len(inside) + _PRIOR_WEIGHT)
    if len(inside) == 0:
        return Calibration(prior.threshold, prior.slope, experts)
    background = np.array(evidence.background)
    threshold = _fit_threshold(inside, outside, background)
    strangers = np.concatenate([outside, background])
    slope = _fit_slope(inside, strangers) if min(len(inside), len(strangers)) > 1 else prior.slope
    return Calibration(
        threshold=trust * threshold + (1 - trust) * prior.threshold,
        slope=trust * slope + (1 - trust) * prior.slope,
        experts=experts,
    )


def read_calibration(path: Path, *, encoder: str) -> Calibration | None:
    """Read the calibration stored for this encoder; ``None`` when there is none."""
    with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
        document = json.loads(path.read_bytes())
        read = Calibration(
            threshold=float(document["threshold"]),
            slope=float(document["slope"]),
            experts=int(document["experts"]),
        )
        if document["encoder"] == encoder and math.isfinite(read.threshold * read.slope):
            return read
    return None


def write_calibration(path: Path, calibration: Calibration, *, encoder: str) -> None:
    """Store the calibration; if it cannot be written, it is computed again next time."""
    with suppress(OSError):
        document = {"encoder": encoder, **asdict(calibration)}
        write_atomic(path, json.dumps(document).encode(), mode=0o600)


def _match_rerank_rows(table: VectorTable, deep: VectorTable) -> Rows:
    """Return the rerank position of every index position, -1 where there is none."""
    at = np.full(len(table), -1, np.int64)
    alive = np.flatnonzero(table.alive)
    at[alive] = deep.find_positions(table.digests)
    return at


def _sample_examples(
    table: VectorTable, deep: VectorTable, deep_at: Rows
) -> Iterator[_CalibrationExample]:
    """Sample examples, from no expert more than most have, without descriptions.

    So no package can set the threshold for all by having many examples.
    """
    experts = np.flatnonzero(deep_at >= 0)
    experts = experts[deep.counts[deep_at[experts]] > 1]
    counts = deep.counts[deep_at[experts]] - 1
    sampled = (
        np.minimum(counts, max(MAX_EXAMPLES_PER_EXPERT, int(np.median(counts))))
        if len(counts)
        else counts
    )
    ends = np.cumsum(sampled)
    total = int(sampled.sum())
    generator = random.Random(_SEED)  # noqa: S311  # a reproducible sample
    for number in sorted(generator.sample(range(total), min(total, MAX_REPLAYED_EXAMPLES))):
        which = int(np.searchsorted(ends, number, side="right"))
        expert = int(experts[which])
        text = 1 + number - int(ends[which] - sampled[which])
        at = int(deep_at[expert])
        yield _CalibrationExample(
            expert, at, int(table.starts[expert]) + text, int(deep.starts[at]) + text
        )


def _search_without(table: VectorTable, found: SearchHits, example: _CalibrationExample) -> Rows:
    """Return the hits without the example's own row: its expert may then rank lower."""
    rows = table.select_rows(np.array([example.expert]))
    own = (table.rows[rows[rows != example.row]] @ table.rows[example.row]).max()
    others = found.experts != example.expert
    closer = int((found.cosines[others] > own).sum())
    return np.insert(found.experts[others], closer, example.expert)


def _fit_threshold(inside: Vectors, outside: Vectors, background: Vectors) -> float:
    most = float(np.quantile(inside, MAX_REJECTED_SHARE))
    shares = ((outside, MIN_STRANGER_REJECTION), (background, MIN_BACKGROUND_REJECTION))
    enough = [float(np.quantile(found, share)) for found, share in shares if len(found)]
    return min(most, max(enough)) if enough else most


def _fit_slope(inside: Vectors, outside: Vectors) -> float:
    """Return how fast the log-odds rise with the evidence."""
    squares = ((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()
    variance = squares / (len(inside) + len(outside) - 2)
    apart = float(inside.mean() - outside.mean())
    return min(max(apart / max(float(variance), 1e-6), _MIN_SLOPE), _MAX_SLOPE)
