"""The reranker: which of the experts found by a search a prompt belongs to, in closed form.

Kernel ridge regression, one expert against the rest (Saunders, Gammerman and Vovk, 1998), on the
rerank rows of the candidates' own texts. It is fitted for each prompt on the rows closest to it, so
there is nothing to train: an expert counts as soon as its rows exist. A few candidates are compared
first, and more if the result is unclear. Experts whose texts are as close to each other as to their
own form one group; the reranker does not choose within a group.

Calibration maps the reranker's evidence to a score, of which 0.5 is enough. The examples of the
installed experts are replayed as prompts. With the example's own row excluded, they show the
evidence of a prompt that belongs to an expert; with its whole expert left out, the evidence of one
that belongs to none. No other text is needed. The threshold rejects three in a hundred of the
correctly answered examples (split conformal prediction: Vovk, Gammerman and Shafer, 2005), or fewer
if that still rejects nine in ten of those without an expert. The score is the posterior of two
normal distributions with equal variance, at the odds that put 0.5 at that threshold.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from expertctl.files import write_atomic
from expertctl.routing.vector_table import Mask, Rows, SearchHits, Vectors, VectorTable

KERNEL_WIDTH = 2.0
"""The kernel of two unit rows is ``exp(WIDTH * (cosine - 1))``: a Gaussian of their distance."""
RIDGE = 0.03
MIN_CLEAR_LEAD = 0.2
"""Below this lead, more candidates and more of their rows are compared."""
MIN_ALIKE_KERNEL = 0.99
MIN_RELATED_KERNEL = 0.19
"""The least mean kernel of texts that may be alike; texts without a common word have 0.14."""
SIMILARITY_ROWS = 3
"""The similarity is the mean cosine of this many rows of an expert."""
_MISSING_COSINE = -2
"""The cosine of a missing row."""


@dataclass(frozen=True, slots=True)
class RerankSize:
    """How many candidates to compare, and how many rows of each."""

    candidates: int
    rows: int


SMALL_RERANK, LARGE_RERANK = RerankSize(4, 6), RerankSize(8, 11)
MIN_COMPETING = 6
"""With at least this many competing groups, probabilities need no prior correction."""


@dataclass(frozen=True, slots=True, eq=False)
class RerankScores:
    """The scores of the compared candidates, in their order.

    ``probabilities`` are the regression's answers: about 1 for the expert that a prompt belongs to
    and 0 for the others; all experts of a group have that of the group. ``similarities`` measure
    how close the prompt is to an expert's closest texts. ``groups`` numbers the groups of alike
    experts. ``prior_correction`` is the part of every probability that is due to having few experts
    to compare.
    """

    probabilities: Vectors
    similarities: Vectors
    groups: Rows
    prior_correction: float = 0.0

    @property
    def evidence(self) -> Vectors:
        """What decides whether an expert is used: see `Calibration`."""
        evidence: Vectors = self.probabilities + self.similarities - self.prior_correction
        return evidence

    def __len__(self) -> int:
        """Return the number of candidates compared."""
        return len(self.probabilities)


NO_SCORES = RerankScores(np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


def rerank(
    table: VectorTable, candidates: Rows, query: Vectors, *, excluded_row: int | None = None
) -> RerankScores:
    """Compare candidates, ordered by likelihood, by their rows in a table of rerank rows.

    ``query`` is a rerank row of unit length; ``excluded_row`` is a row of the table to ignore.
    """
    if len(candidates) == 0:
        return NO_SCORES
    few = _rerank_with(table, candidates, query, SMALL_RERANK, excluded_row)
    if _measure_lead(few, len(candidates)) > MIN_CLEAR_LEAD:
        return few
    return _rerank_with(table, candidates, query, LARGE_RERANK, excluded_row)


def rerank_all(table: VectorTable, candidates: Rows, query: Vectors) -> RerankScores:
    """Compare all candidates, with as many rows of each as `rerank` uses for unclear results."""
    breadth = RerankSize(len(candidates), LARGE_RERANK.rows)
    return _rerank_with(table, candidates, query, breadth, None) if len(candidates) else NO_SCORES


def _rerank_with(
    table: VectorTable,
    candidates: Rows,
    query: Vectors,
    breadth: RerankSize,
    excluded_row: int | None,
) -> RerankScores:
    positions = candidates[: breadth.candidates]
    near = _gather_rows(table, positions, query, breadth.rows, excluded_row)
    kernel = _to_kernel(near.rows @ near.rows.T)
    split = _build_group_layout(near.sizes)
    groups = _group_alike(kernel, split)
    if groups is None:
        shares = _solve_ridge(kernel, split.members, near.cosines)
        return RerankScores(
            shares,
            near.similarities,
            np.arange(len(shares)),
            _compute_prior_correction(len(shares)),
        )
    answers = _solve_ridge(kernel, _merge_members(split.members, groups), near.cosines)
    return RerankScores(
        answers[groups], near.similarities, groups, _compute_prior_correction(len(answers))
    )


def _compute_prior_correction(groups: int) -> float:
    """Return how much the probability on a prompt for no expert exceeds that with six groups.

    Without this correction, a threshold that suits many experts would let the only expert of a base
    answer nearly everything.
    """
    return max(1 / (groups + 1) - 1 / (MIN_COMPETING + 1), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _ContenderRows:
    rows: Vectors  # [rows, rerank dimensions]
    cosines: Vectors
    sizes: tuple[int, ...]  # the number of these rows for each candidate
    similarities: Vectors  # [candidates]


def _gather_rows(
    table: VectorTable, positions: Rows, query: Vectors, count: int, excluded_row: int | None
) -> _ContenderRows:
    starts, counts = table.starts[positions], table.counts[positions].tolist()
    cosines = _compute_cosines(table, starts.tolist(), counts, query)
    if excluded_row is not None:
        cosines[starts[:, None] + np.arange(max(counts)) == excluded_row] = _MISSING_COSINE
    below = -cosines
    ranked = below.argsort(axis=1)[:, :count]
    below.sort(axis=1)
    best: Vectors = -below[:, :count]
    ranked += starts[:, None]
    if excluded_row is None and min(counts) >= best.shape[1]:
        sizes = (best.shape[1],) * len(counts)
        return _ContenderRows(
            table.rows[ranked.reshape(-1)], best.reshape(-1), sizes, _mean_similarity(best)
        )
    there = best > _MISSING_COSINE
    sizes = tuple(there.sum(axis=1).tolist())
    return _ContenderRows(
        table.rows[ranked[there]], best[there], sizes, _mean_similarity_of_some(best)
    )


def _compute_cosines(
    table: VectorTable, starts: list[int], counts: list[int], query: Vectors
) -> Vectors:
    """Return the cosines of all rows, one line per candidate, padded with `_MISSING_COSINE`."""
    cosines = np.full((len(counts), max(counts)), _MISSING_COSINE, np.float32)
    for own, start, count in zip(cosines, starts, counts, strict=True):
        table.rows[start : start + count].dot(query, out=own[:count])
    return cosines


def _mean_similarity(best: Vectors) -> Vectors:
    first = best[:, :SIMILARITY_ROWS]
    support: Vectors = first.sum(axis=1) / first.shape[1]
    return support


def _mean_similarity_of_some(best: Vectors) -> Vectors:
    """Return that mean where some cosines are missing; 0 if all are."""
    first = best[:, :SIMILARITY_ROWS]
    there = first > _MISSING_COSINE
    total = np.where(there, first, np.float32(0)).sum(axis=1)
    support: Vectors = total / np.maximum(there.sum(axis=1), 1).astype(np.float32)
    return support


def _to_kernel(cosines: Vectors) -> Vectors:
    """Turn cosines into kernel values, in place."""
    cosines -= 1
    cosines *= KERNEL_WIDTH
    return np.exp(cosines, out=cosines)


@dataclass(frozen=True, slots=True, eq=False)
class _GroupLayout:
    """What depends only on the number of rows of each candidate; read-only."""

    members: Vectors  # [rows, candidates], 1 where a row belongs to a candidate
    means: Vectors  # the same, scaled so that a product with it gives means
    own: Vectors  # the share of the diagonal in the mean kernel of a candidate's rows
    pairs: Vectors  # (mean - own) * pairs is the mean without the diagonal
    lone: Vectors  # 1 for candidates with only one row


@lru_cache(maxsize=256)
def _build_group_layout(sizes: tuple[int, ...]) -> _GroupLayout:
    members = np.repeat(np.eye(len(sizes), dtype=np.float32), sizes, axis=0)
    counts = np.maximum(np.array(sizes, np.float32), np.float32(1))
    lone = (counts == 1).astype(np.float32)
    own = np.reciprocal(counts)
    return _GroupLayout(members, members * own, own, counts / (counts - 1 + lone), lone)


def _solve_ridge(kernel: Vectors, members: Vectors, cosines: Vectors) -> Vectors:
    """Return the answer for each group: ``k (K + RIDGE I)^-1 (Y - e) + e``.

    Far from all rows the answer is e, for which "no expert" counts as one more group. ``kernel``
    and ``cosines`` are overwritten.
    """
    even = 1 / (members.shape[1] + 1)
    kernel.reshape(-1)[:: len(kernel) + 1] += RIDGE
    weights = np.linalg.solve(kernel, _to_kernel(cosines))  # the kernel is symmetric
    answers: Vectors = weights.dot(members) + even * (1 - weights.sum())
    return answers


def _group_alike(kernel: Vectors, split: _GroupLayout) -> Rows | None:
    """Number the candidates so that alike ones share a number; ``None`` when none are alike.

    Two are alike if the mean kernel between their rows is about that within each of them, without
    the diagonal, and at least about `MIN_RELATED_KERNEL`: a few mixed texts are like no others.
    """
    between: Vectors = split.means.T.dot(kernel).dot(split.means)  # `@` takes twice as long here
    within = (between.diagonal() - split.own) * split.pairs + split.lone
    bound = np.maximum(within, MIN_RELATED_KERNEL) * MIN_ALIKE_KERNEL
    alike: Mask = between >= np.maximum(bound, bound[:, None])
    alike.reshape(-1)[:: len(alike) + 1] = True
    if np.count_nonzero(alike) == len(alike):
        return None
    return np.unique(alike.argmax(axis=1), return_inverse=True)[1].reshape(-1)


def _merge_members(members: Vectors, groups: Rows) -> Vectors:
    """Return the membership of rows in groups."""
    merged = np.zeros((len(members), int(groups.max()) + 1), np.float32)
    np.add.at(merged.T, groups, members.T)
    return merged


def _measure_lead(scores: RerankScores, candidates: int) -> float:
    """Return the lead of the best group; 0 if it is the only one among some of the candidates."""
    groups: list[int] = scores.groups.tolist()
    answers: list[float] = scores.probabilities.tolist()
    shares = sorted(dict(zip(groups, answers, strict=True)).values())
    if len(shares) > 1:
        return shares[-1] - shares[-2]
    return 0.0 if len(scores) < candidates else float("inf")


CALIBRATION_FILE = "calibration.json"
MAX_REJECTED_SHARE = 0.03
"""The largest share of examples to reject although their expert is present."""
MIN_STRANGER_REJECTION = 0.9
"""The share of examples without their expert that is enough to reject: they are closer to other
experts than most prompts without an expert are."""
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


NO_EVIDENCE = CalibrationEvidence((), ())


@dataclass(frozen=True, slots=True)
class _CalibrationExample:
    """An example: the positions of its expert and its rows, in the index and for reranking."""

    expert: int
    rerank_expert: int
    row: int
    rerank_row: int


def collect_evidence(
    table: VectorTable, deep: VectorTable, search: SearchFunction
) -> CalibrationEvidence:
    """Replay some of the examples of all experts as prompts."""
    deep_at = _match_rerank_rows(table, deep)
    inside, outside = [], []
    for example in _sample_examples(table, deep, deep_at):
        query = np.asarray(deep.rows[example.rerank_row])
        found = _search_without(table, search(np.asarray(table.rows[example.row])), example)
        candidates = deep_at[found][deep_at[found] >= 0]
        others = _other_candidates(deep, candidates, query, example)
        mine = candidates[np.isin(candidates, others) | (candidates == example.rerank_expert)]
        verdict = rerank(deep, mine, query, excluded_row=example.rerank_row)
        best = int(verdict.evidence.argmax())
        if mine[best] == example.rerank_expert:
            inside.append(float(verdict.evidence[best]))
        if len(others):
            outside.append(float(rerank(deep, others, query).evidence.max()))
    return CalibrationEvidence(tuple(inside), tuple(outside))


def _other_candidates(
    deep: VectorTable, candidates: Rows, query: Vectors, example: _CalibrationExample
) -> Rows:
    """Return the candidates without the example's expert and without those like it.

    Otherwise other versions of a package would make prompts without an expert look close.
    """
    verdict = rerank(deep, candidates, query)
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
    threshold = _fit_threshold(inside, outside)
    slope = _fit_slope(inside, outside) if min(len(inside), len(outside)) > 1 else prior.slope
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


def _fit_threshold(inside: Vectors, outside: Vectors) -> float:
    most = float(np.quantile(inside, MAX_REJECTED_SHARE))
    return min(most, float(np.quantile(outside, MIN_STRANGER_REJECTION))) if len(outside) else most


def _fit_slope(inside: Vectors, outside: Vectors) -> float:
    """Return how fast the log-odds rise with the evidence."""
    squares = ((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()
    variance = squares / (len(inside) + len(outside) - 2)
    apart = float(inside.mean() - outside.mean())
    return min(max(apart / max(float(variance), 1e-6), _MIN_SLOPE), _MAX_SLOPE)
