"""Calibration: from the head's evidence to a score; 0.5 or more is enough.

The examples of installed experts are asked again as if they were prompts. With the example's own
row hidden, they show the evidence of a prompt that belongs to an expert; with its whole expert left
out, the evidence of a prompt that belongs to none. No other text is needed.

The threshold turns away three in a hundred of the examples that are rightly answered (split
conformal prediction: Vovk, Gammerman and Shafer, 2005), or fewer where it turns away nine in ten of
those without an expert all the same. The score is the posterior of two normal distributions with
one variance, at the odds that put 0.5 at that threshold.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from expertctl.durable import write_atomic
from expertctl.routing.found import Found
from expertctl.routing.head import judge
from expertctl.routing.vector_table import Rows, Vectors, VectorTable

CALIBRATION_FILE = "calibration.json"
TURNED_AWAY = 0.03
"""The share of examples with their expert present that may be turned away."""
STRANGERS = 0.9
"""The share of examples without their expert that it is enough to turn away: they are closer to
other experts than most prompts without an expert are."""
MOST_ASKED = 400
"""How many examples are asked again at most."""
OF_EACH = 5
"""How many examples of an expert are asked again at most where most experts have fewer."""
GROWTH = 0.1
"""Examples are asked again when this share of experts came or went."""

_SEED = 7
_PRIOR = 20
_FLAT, _STEEP = 4.0, 40.0

Search = Callable[[Vectors], Found]
"""What an index does with a vector."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The evidence that has the score 0.5, and how fast the score rises around it."""

    threshold: float
    slope: float
    experts: int = 0
    """How many experts there were."""

    def score(self, evidence: float) -> float:
        """Return a score between 0 and 1."""
        log_odds = self.slope * (evidence - self.threshold)
        return 1 / (1 + math.exp(-max(-30.0, min(log_odds, 30.0))))

    def is_fresh(self, experts: int) -> bool:
        """Tell whether the calibration still holds for this number of experts."""
        return abs(experts - self.experts) <= GROWTH * self.experts


PRIORS = {
    "minilm": Calibration(0.70, 9.0),
    "static": Calibration(0.93, 9.0),
    "lexical": Calibration(0.38, 9.0),
}
"""By encoder, measured with one to ten experts of one to five examples each (ADR 12)."""


def prior_of(encoder: str) -> Calibration:
    """Return what is assumed while there are few examples."""
    return PRIORS[encoder]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that examples had when they were asked again."""

    inside: tuple[float, ...]  # those that reached their expert
    outside: tuple[float, ...]  # all, with their expert left out


NOTHING_ASKED = Evidence((), ())


@dataclass(frozen=True, slots=True)
class _Example:
    """An example by its numbers: its expert and its row, in the table and among the deep rows."""

    expert: int
    deep_expert: int
    row: int
    deep_row: int


def ask_again(table: VectorTable, deep: VectorTable, search: Search) -> Evidence:
    """Ask some of the examples of all experts as if they were prompts."""
    deep_at = _matching(table, deep)
    inside, outside = [], []
    for example in _sample(table, deep, deep_at):
        query = np.asarray(deep.rows[example.deep_row])
        found = _as_new(table, search(np.asarray(table.rows[example.row])), example)
        candidates = deep_at[found][deep_at[found] >= 0]
        others = _others(deep, candidates, query, example)
        mine = candidates[np.isin(candidates, others) | (candidates == example.deep_expert)]
        verdict = judge(deep, mine, query, hidden=example.deep_row)
        best = int(verdict.evidence.argmax())
        if mine[best] == example.deep_expert:
            inside.append(float(verdict.evidence[best]))
        if len(others):
            outside.append(float(judge(deep, others, query).evidence.max()))
    return Evidence(tuple(inside), tuple(outside))


def _others(deep: VectorTable, candidates: Rows, query: Vectors, example: _Example) -> Rows:
    """Return the candidates without the example's expert and without those that are like it.

    Otherwise other versions of a package would make prompts without an expert look close.
    """
    verdict = judge(deep, candidates, query)
    own = int(np.flatnonzero(candidates == example.deep_expert)[0])
    alike = verdict.groups == verdict.groups[own] if own < len(verdict) else []
    return np.delete(candidates, [own, *np.flatnonzero(alike)])


def calibrated(evidence: Evidence, prior: Calibration, *, experts: int) -> Calibration:
    """Return what the examples say; the fewer there are, the more the prior counts."""
    inside, outside = np.array(evidence.inside), np.array(evidence.outside)
    trust = len(inside) / (len(inside) + _PRIOR)
    if len(inside) == 0:
        return Calibration(prior.threshold, prior.slope, experts)
    threshold = _threshold(inside, outside)
    slope = _slope(inside, outside) if min(len(inside), len(outside)) > 1 else prior.slope
    return Calibration(
        threshold=trust * threshold + (1 - trust) * prior.threshold,
        slope=trust * slope + (1 - trust) * prior.slope,
        experts=experts,
    )


def read_calibration(path: Path, *, encoder: str) -> Calibration | None:
    """Read the calibration made earlier with this encoder; ``None`` when there is none."""
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
    """Keep the calibration; where it cannot be written, it is made again next time."""
    with suppress(OSError):
        document = {"encoder": encoder, **asdict(calibration)}
        write_atomic(path, json.dumps(document).encode(), mode=0o600)


def _matching(table: VectorTable, deep: VectorTable) -> Rows:
    """Return where the deep rows of every position are, -1 for positions without any."""
    at = np.full(len(table), -1, np.int64)
    alive = np.flatnonzero(table.alive)
    at[alive] = deep.positions(table.digests)
    return at


def _sample(table: VectorTable, deep: VectorTable, deep_at: Rows) -> Iterator[_Example]:
    """Draw examples, from no expert more than most have; descriptions are not asked.

    So no package can set the threshold for all by having many examples.
    """
    experts = np.flatnonzero(deep_at >= 0)
    experts = experts[deep.counts[deep_at[experts]] > 1]
    counts = deep.counts[deep_at[experts]] - 1
    asked = np.minimum(counts, max(OF_EACH, int(np.median(counts)))) if len(counts) else counts
    ends = np.cumsum(asked)
    total = int(asked.sum())
    for number in sorted(random.Random(_SEED).sample(range(total), min(total, MOST_ASKED))):  # noqa: S311  # a sample
        which = int(np.searchsorted(ends, number, side="right"))
        expert = int(experts[which])
        text = 1 + number - int(ends[which] - asked[which])
        at = int(deep_at[expert])
        yield _Example(expert, at, int(table.starts[expert]) + text, int(deep.starts[at]) + text)


def _as_new(table: VectorTable, found: Found, example: _Example) -> Rows:
    """Return what the search would find without the example: its expert may then rank lower."""
    rows = table.rows_of(np.array([example.expert]))
    own = (table.rows[rows[rows != example.row]] @ table.rows[example.row]).max()
    strange = found.experts != example.expert
    closer = int((found.cosines[strange] > own).sum())
    return np.insert(found.experts[strange], closer, example.expert)


def _threshold(inside: Vectors, outside: Vectors) -> float:
    """Return the evidence that is enough."""
    most = float(np.quantile(inside, TURNED_AWAY))
    return min(most, float(np.quantile(outside, STRANGERS))) if len(outside) else most


def _slope(inside: Vectors, outside: Vectors) -> float:
    """Return by how much the log-odds rise with the evidence."""
    squares = ((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()
    variance = squares / (len(inside) + len(outside) - 2)
    apart = float(inside.mean() - outside.mean())
    return min(max(apart / max(float(variance), 1e-6), _FLAT), _STEEP)
