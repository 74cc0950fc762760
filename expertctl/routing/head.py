"""The head: which of the experts that a search found a prompt belongs to, in closed form.

Kernel ridge regression, one expert against the rest (Saunders, Gammerman and Vovk, 1998), on deep
rows of the candidates' own texts. It is fitted when it is asked, on the rows closest to the prompt,
so there is nothing to train: an expert counts from the moment its rows are there. A few candidates
are compared first, and more where these few leave it open.

Experts whose texts are as close to each other as to their own count as one answer; the head does
not choose between them.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable

WIDTH = 2.0
"""The kernel of two unit rows is ``exp(WIDTH * (cosine - 1))``: a Gaussian of their distance."""
RIDGE = 0.03
CLOSE = 0.2
"""With a lead smaller than this, more candidates and more of their rows are looked at."""
ALIKE = 0.99
RELATED = 0.19
"""The least mean kernel of texts that may be alike; texts without a common word have 0.14."""
NEAREST = 3
"""Support is the mean cosine of this many rows of an expert."""
_NOWHERE = -2
"""The cosine of a row that is not there."""


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many candidates are compared, and how many rows of each."""

    candidates: int
    rows: int


FEW, MANY = Breadth(4, 6), Breadth(8, 11)
COMPETING = 6
"""Where this many experts or more compete, no share has a windfall."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What the head says of the candidates that it compared, in their order.

    ``shares`` is the regression's answer: about 1 for the expert that a prompt belongs to and 0 for
    the others; experts that are alike each have the share of their group. ``support`` is how close
    the prompt is to an expert's closest texts. ``groups`` numbers the groups of alike experts.
    ``windfall`` is the part of every share that comes from having few experts to compare with.
    """

    shares: Vectors
    support: Vectors
    groups: Rows
    windfall: float = 0.0

    @property
    def evidence(self) -> Vectors:
        """What decides whether an expert is used: see `calibration`."""
        evidence: Vectors = self.shares + self.support - self.windfall
        return evidence

    def __len__(self) -> int:
        """How many candidates were compared."""
        return len(self.shares)


NOBODY = Verdict(np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


def judge(
    table: VectorTable, candidates: Rows, query: Vectors, *, hidden: int | None = None
) -> Verdict:
    """Compare candidates, the likeliest first, by their rows in a table of deep rows.

    ``query`` is a deep row of unit length; ``hidden`` is a row of the table that does not count.
    """
    if len(candidates) == 0:
        return NOBODY
    few = _compared(table, candidates, query, FEW, hidden)
    if _lead(few, len(candidates)) > CLOSE:
        return few
    return _compared(table, candidates, query, MANY, hidden)


def judge_all(table: VectorTable, candidates: Rows, query: Vectors) -> Verdict:
    """Compare all candidates, with as many rows as `judge` takes where few leave it open."""
    breadth = Breadth(len(candidates), MANY.rows)
    return _compared(table, candidates, query, breadth, None) if len(candidates) else NOBODY


def _compared(
    table: VectorTable, candidates: Rows, query: Vectors, breadth: Breadth, hidden: int | None
) -> Verdict:
    positions = candidates[: breadth.candidates]
    near = _nearest_rows(table, positions, query, breadth.rows, hidden)
    kernel = _kernel(near.rows @ near.rows.T)
    split = _split(near.sizes)
    groups = _groups(kernel, split)
    if groups is None:
        shares = _regression(kernel, split.members, near.cosines)
        return Verdict(shares, near.support, np.arange(len(shares)), _windfall(len(shares)))
    answers = _regression(kernel, _merged(split.members, groups), near.cosines)
    return Verdict(answers[groups], near.support, groups, _windfall(len(answers)))


def _windfall(groups: int) -> float:
    """Return how far the share on a prompt for no expert exceeds the one where six compete.

    Without this correction, a threshold that holds for many experts would let the only expert of
    a base answer nearly everything.
    """
    return max(1 / (groups + 1) - 1 / (COMPETING + 1), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Near:
    """The rows of some candidates closest to a prompt, grouped by candidate."""

    rows: Vectors  # [rows, deep dimensions]
    cosines: Vectors
    sizes: tuple[int, ...]  # how many of these rows each candidate has
    support: Vectors  # [candidates]


def _nearest_rows(
    table: VectorTable, positions: Rows, query: Vectors, count: int, hidden: int | None
) -> _Near:
    starts, counts = table.starts[positions], table.counts[positions].tolist()
    cosines = _cosines(table, starts.tolist(), counts, query)
    if hidden is not None:
        cosines[starts[:, None] + np.arange(max(counts)) == hidden] = _NOWHERE
    below = -cosines
    ranked = below.argsort(axis=1)[:, :count]
    below.sort(axis=1)
    best: Vectors = -below[:, :count]
    ranked += starts[:, None]
    if hidden is None and min(counts) >= best.shape[1]:
        sizes = (best.shape[1],) * len(counts)
        return _Near(table.rows[ranked.reshape(-1)], best.reshape(-1), sizes, _support(best))
    there = best > _NOWHERE
    sizes = tuple(there.sum(axis=1).tolist())
    return _Near(table.rows[ranked[there]], best[there], sizes, _support_of_some(best))


def _cosines(table: VectorTable, starts: list[int], counts: list[int], query: Vectors) -> Vectors:
    """Return the cosines of all rows, one line per candidate, filled up with `_NOWHERE`."""
    cosines = np.full((len(counts), max(counts)), _NOWHERE, np.float32)
    for own, start, count in zip(cosines, starts, counts, strict=True):
        table.rows[start : start + count].dot(query, out=own[:count])
    return cosines


def _support(best: Vectors) -> Vectors:
    """Return the mean of the first few cosines of each candidate."""
    first = best[:, :NEAREST]
    support: Vectors = first.sum(axis=1) / first.shape[1]
    return support


def _support_of_some(best: Vectors) -> Vectors:
    """Do as `_support` where some cosines are missing; without any it is 0."""
    first = best[:, :NEAREST]
    there = first > _NOWHERE
    total = np.where(there, first, np.float32(0)).sum(axis=1)
    support: Vectors = total / np.maximum(there.sum(axis=1), 1).astype(np.float32)
    return support


def _kernel(cosines: Vectors) -> Vectors:
    """Turn cosines into the kernel; the cosines are overwritten."""
    cosines -= 1
    cosines *= WIDTH
    return np.exp(cosines, out=cosines)


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """What follows from the number of rows of each candidate; read-only."""

    members: Vectors  # which candidate each row is of: one column for each
    means: Vectors  # the same, scaled so that a product with it gives means
    own: Vectors  # the share of a row with itself in the mean kernel of a candidate's rows
    pairs: Vectors  # that mean less that share, times this, is the mean without it
    lone: Vectors  # 1 for the candidates with no pairs of rows


@lru_cache(maxsize=256)
def _split(sizes: tuple[int, ...]) -> _Split:
    members = np.repeat(np.eye(len(sizes), dtype=np.float32), sizes, axis=0)
    counts = np.maximum(np.array(sizes, np.float32), np.float32(1))
    lone = (counts == 1).astype(np.float32)
    own = np.reciprocal(counts)
    return _Split(members, members * own, own, counts / (counts - 1 + lone), lone)


def _regression(kernel: Vectors, members: Vectors, cosines: Vectors) -> Vectors:
    """Return the answer for each group: ``k (K + RIDGE I)^-1 (Y - e) + e``.

    Far from all rows that is e, for which "no expert" counts as one more group. ``kernel`` and
    ``cosines`` are overwritten.
    """
    even = 1 / (members.shape[1] + 1)
    kernel.reshape(-1)[:: len(kernel) + 1] += RIDGE
    weights = np.linalg.solve(kernel, _kernel(cosines))  # the kernel is symmetric
    answers: Vectors = weights.dot(members) + even * (1 - weights.sum())
    return answers


def _groups(kernel: Vectors, split: _Split) -> Rows | None:
    """Number the candidates so that alike ones have one number; ``None`` when none are alike.

    Two are alike when the mean kernel between their rows is about that within each of them, not
    counting a row with itself, and at least about `RELATED`: few mixed texts are like no others.
    """
    between: Vectors = split.means.T.dot(kernel).dot(split.means)  # `@` takes twice as long here
    within = (between.diagonal() - split.own) * split.pairs + split.lone
    bound = np.maximum(within, RELATED) * ALIKE
    alike: Mask = between >= np.maximum(bound, bound[:, None])
    alike.reshape(-1)[:: len(alike) + 1] = True
    if np.count_nonzero(alike) == len(alike):
        return None
    return np.unique(alike.argmax(axis=1), return_inverse=True)[1].reshape(-1)


def _merged(members: Vectors, groups: Rows) -> Vectors:
    """Return membership in groups."""
    merged = np.zeros((len(members), int(groups.max()) + 1), np.float32)
    np.add.at(merged.T, groups, members.T)
    return merged


def _lead(verdict: Verdict, candidates: int) -> float:
    """Return the lead of the best group; there is none where it hid all other candidates."""
    groups: list[int] = verdict.groups.tolist()
    answers: list[float] = verdict.shares.tolist()
    shares = sorted(dict(zip(groups, answers, strict=True)).values())
    if len(shares) > 1:
        return shares[-1] - shares[-2]
    return 0.0 if len(verdict) < candidates else float("inf")
