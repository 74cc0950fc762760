"""The reranker: which of the experts found by a search a prompt belongs to, in closed form.

Kernel ridge regression, one expert against the rest (Saunders, Gammerman and Vovk, 1998), on the
rerank rows of the candidates' own texts. It is fitted for each prompt on the rows closest to it, so
there is nothing to train: an expert counts as soon as its rows exist. A few candidates are compared
first, and more if the result is unclear. Experts whose texts are as close to each other as to their
own form one group; the reranker does not choose within a group.

The background, rows of everyday texts that are for no expert, competes as one more group, which is
never chosen. It takes part with the rows closest to the prompt, without those that are about as
close to a text of a candidate as a paraphrase: what an expert is for is no background.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable

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
BACKGROUND_ROWS = 6
"""Most rows of the background that are compared with a prompt."""
MAX_BACKGROUND_COSINE = 0.8
"""The largest cosine of a row of the background to one of a candidate."""


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


NO_BACKGROUND = np.zeros((0, 0), np.float32)


def rerank(
    table: VectorTable,
    candidates: Rows,
    query: Vectors,
    *,
    background: Vectors = NO_BACKGROUND,
    excluded_row: int | None = None,
) -> RerankScores:
    """Compare candidates, ordered by likelihood, by their rows in a table of rerank rows.

    ``query`` is a rerank row of unit length, ``background`` rows [texts, rerank dimensions] of
    texts for no expert; ``excluded_row`` is a row of the table to ignore.
    """
    if len(candidates) == 0:
        return NO_SCORES
    few = _rerank_with(table, candidates, query, SMALL_RERANK, background, excluded_row)
    if _measure_lead(few, len(candidates)) > MIN_CLEAR_LEAD:
        return few
    return _rerank_with(table, candidates, query, LARGE_RERANK, background, excluded_row)


def rerank_all(
    table: VectorTable, candidates: Rows, query: Vectors, *, background: Vectors = NO_BACKGROUND
) -> RerankScores:
    """Compare all candidates, with as many rows of each as `rerank` uses for unclear results."""
    if len(candidates) == 0:
        return NO_SCORES
    breadth = RerankSize(len(candidates), LARGE_RERANK.rows)
    return _rerank_with(table, candidates, query, breadth, background, None)


def _rerank_with(
    table: VectorTable,
    candidates: Rows,
    query: Vectors,
    breadth: RerankSize,
    background: Vectors,
    excluded_row: int | None,
) -> RerankScores:
    positions = candidates[: breadth.candidates]
    near = _gather_rows(table, positions, query, breadth.rows, excluded_row)
    rows, cosines = near.rows, near.cosines
    if len(background):
        others, their_cosines = _select_background(background, near.rows, query)
        rows = np.concatenate([rows, others])
        cosines = np.concatenate([cosines, their_cosines])
    kernel, own = _to_kernel(rows @ rows.T), len(near.rows)
    split = _build_group_layout(near.sizes)
    groups = _group_alike(kernel[:own, :own], split)
    members = split.members if groups is None else _merge_members(split.members, groups)
    count = members.shape[1]
    if len(rows) > own:
        members = _add_background(members, len(rows) - own)
    answers = _solve_ridge(kernel, members, cosines)[:count]
    correction = _compute_prior_correction(members.shape[1])
    if groups is None:
        return RerankScores(answers, near.similarities, np.arange(count), correction)
    return RerankScores(answers[groups], near.similarities, groups, correction)


def _select_background(
    background: Vectors, rows: Vectors, query: Vectors
) -> tuple[Vectors, Vectors]:
    """Return the rows of the background that compete with the rows of candidates; their cosines."""
    cosines = background @ query
    closest = np.argsort(-cosines)[:BACKGROUND_ROWS]
    chosen = background[closest]
    is_free = (chosen @ rows.T).max(axis=1) <= MAX_BACKGROUND_COSINE
    return chosen[is_free], cosines[closest][is_free].astype(np.float32)


def _add_background(members: Vectors, count: int) -> Vectors:
    """Return the membership of rows with those of the background, which are one more group."""
    rows, groups = members.shape
    added = np.zeros((rows + count, groups + 1), np.float32)
    added[:rows, :groups] = members
    added[rows:, groups] = 1
    return added


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
