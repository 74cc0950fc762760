"""The head: which of the experts that a search found a prompt belongs to, in closed form.

Kernel ridge regression, one expert against the rest (Saunders, Gammerman and Vovk, 1998), on deep
rows of the candidates' own texts. It is fitted when it is asked, on the rows closest to the prompt,
so there is nothing to train: an expert counts from the moment its rows are there. A few candidates
are asked first, and more of them where these few leave it open.

Experts whose texts are as close to each other as to their own are one answer to the question, and
the head does not choose between them.
"""

from dataclasses import dataclass

import numpy as np

from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable

WIDTH = 2.0
"""The kernel of two unit rows is ``exp(WIDTH * (cosine - 1))``: a Gaussian of their distance."""
RIDGE = 0.03
CLOSE = 0.2
"""With a lead smaller than this, more candidates and more of their rows are looked at."""
ALIKE = 0.99
NEAREST = 3
"""Support is the mean cosine of so many rows of an expert."""


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many candidates are compared, by how many of their rows."""

    candidates: int
    rows: int


FEW, MANY = Breadth(6, 6), Breadth(14, 11)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What the head says of the candidates that it compared, in their order.

    ``shares`` is the regression's answer: about 1 for the expert that a prompt belongs to and 0 for
    the others; of experts that are alike, each has what they have together. ``support`` is how
    close the prompt is to an expert's closest texts. ``groups`` numbers what is alike.
    """

    shares: Vectors
    support: Vectors
    groups: Rows

    @property
    def evidence(self) -> Vectors:
        """What decides whether an expert is used: see `calibration`."""
        evidence: Vectors = self.shares + self.support
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
    if _lead(few) > CLOSE:
        return few
    return _compared(table, candidates, query, MANY, hidden)


def _compared(
    table: VectorTable, candidates: Rows, query: Vectors, breadth: Breadth, hidden: int | None
) -> Verdict:
    positions = candidates[: breadth.candidates]
    near = _nearest_rows(table, positions, query, breadth.rows, hidden)
    kernel = np.exp(np.float32(WIDTH) * (near.rows @ near.rows.T - np.float32(1)))
    members = (near.owners[:, None] == np.arange(len(positions))).astype(np.float32)
    groups = _groups(kernel, members)
    if groups is None:
        shares = _regression(kernel, members, near.cosines)
        return Verdict(shares, near.support, np.arange(len(positions)))
    shares = _regression(kernel, _merged(members, groups), near.cosines)
    return Verdict(shares[groups], near.support, groups)


@dataclass(frozen=True, slots=True, eq=False)
class _Near:
    """The rows of some candidates that are closest to a prompt."""

    rows: Vectors  # [rows, deep dimensions]
    owners: Rows  # which candidate each belongs to
    cosines: Vectors
    support: Vectors  # [candidates]


def _nearest_rows(
    table: VectorTable, positions: Rows, query: Vectors, count: int, hidden: int | None
) -> _Near:
    counts = table.counts[positions]
    offsets = np.arange(counts.max())
    inside: Mask = offsets < counts[:, None]
    numbers = np.where(
        inside, table.starts[positions][:, None] + offsets, 0
    )  # [candidates, widest]
    if hidden is not None:
        inside &= numbers != hidden
    rows = np.asarray(table.rows[numbers.ravel()])
    cosines = np.where(inside, (rows @ query).reshape(numbers.shape), np.float32(-2))
    ranked = np.argsort(-cosines, axis=1)[:, :count]
    best = np.take_along_axis(cosines, ranked, axis=1)
    kept = (ranked + np.arange(len(positions))[:, None] * len(offsets))[best > -2]
    return _Near(
        rows=rows[kept],
        owners=kept // len(offsets),
        cosines=best[best > -2],
        support=_support(best),
    )


def _support(best: Vectors) -> Vectors:
    """Return the mean of the first few cosines of each candidate; of none it is 0."""
    first = best[:, :NEAREST]
    there = first > -2
    total = np.where(there, first, np.float32(0)).sum(axis=1)
    support: Vectors = total / np.maximum(there.sum(axis=1), 1).astype(np.float32)
    return support


def _regression(kernel: Vectors, members: Vectors, cosines: Vectors) -> Vectors:
    """Return the answer for each group: ``k (K + RIDGE I)^-1 (Y - e) + e``.

    Far from all rows that is e, for which nobody counts as one more group.
    """
    even = np.float32(1 / (members.shape[1] + 1))
    ridge = kernel.copy()
    ridge.flat[:: len(kernel) + 1] += np.float32(RIDGE)
    asked = np.exp(np.float32(WIDTH) * (cosines - np.float32(1)))
    answers: Vectors = asked @ np.linalg.solve(ridge, members - even) + even
    return answers


def _groups(kernel: Vectors, members: Vectors) -> Rows | None:
    """Number the candidates so that those alike have one number; ``None`` when none are.

    Two are alike when the mean kernel between their rows is that within them, a row with itself
    not counted.
    """
    sizes = members.sum(axis=0)
    between = members.T @ kernel @ members
    pairs = np.maximum(sizes * (sizes - 1), 1)
    within = np.where(sizes > 1, (np.diag(between) - sizes) / pairs, np.float32(1))
    mean = between / np.maximum(np.outer(sizes, sizes), 1)
    alike = mean >= ALIKE * np.sqrt(np.outer(within, within))
    alike &= sizes > 0
    np.fill_diagonal(alike, True)
    if alike.sum() == len(sizes):
        return None
    return np.unique(alike.argmax(axis=1), return_inverse=True)[1].reshape(-1)


def _merged(members: Vectors, groups: Rows) -> Vectors:
    """Return membership in groups."""
    merged = np.zeros((len(members), int(groups.max()) + 1), np.float32)
    np.add.at(merged.T, groups, members.T)
    return merged


def _lead(verdict: Verdict) -> float:
    """Return by how much the best group leads; all of it when there is no other."""
    shares = np.sort(verdict.shares[np.unique(verdict.groups, return_index=True)[1]])
    return float(shares[-1] - shares[-2]) if len(shares) > 1 else float("inf")
