"""The head against the plain formula, in float64 with the inverse written out."""

import numpy as np
import numpy.typing as npt
import pytest

from expertctl.routing import reranker
from expertctl.routing.reranker import (
    KERNEL_WIDTH,
    LARGE_RERANK,
    MIN_COMPETING,
    NO_SCORES,
    RIDGE,
    SIMILARITY_ROWS,
    SMALL_RERANK,
    RerankScores,
    rerank,
    rerank_all,
)
from expertctl.routing.vector_table import Vectors, VectorTable
from tests.routing.vector_tables import (
    DIMENSIONS,
    TEXTS,
    make_clusters,
    make_expert_digest,
    make_table,
)

Doubles = npt.NDArray[np.float64]


def unit(*rows: Vectors) -> Vectors:
    stacked = np.stack(rows).astype(np.float32)
    made: Vectors = stacked / np.linalg.norm(stacked, axis=1, keepdims=True)
    return made


def at_random(count: int, *, seed: int = 0, around: Vectors | None = None) -> Vectors:
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((count, DIMENSIONS)).astype(np.float32)
    return unit(*(noise if around is None else around + 0.05 * noise))


def near(table: VectorTable, position: int, *, seed: int = 0) -> Vectors:
    """A prompt like the texts of an expert."""
    mean = table.rows[table.select_rows(np.array([position]))].mean(0)
    return at_random(1, seed=seed, around=mean)[0]


def everyone(table: VectorTable, query: Vectors) -> npt.NDArray[np.int64]:
    """All positions, the closest first."""
    best = [
        float((table.rows[table.select_rows(np.array([p]))] @ query).max())
        for p in range(len(table))
    ]
    return np.argsort(-np.array(best)).astype(np.int64)


def plainly(groups: list[Vectors], query: Vectors) -> Doubles:
    """The answer of kernel ridge regression for each group of rows."""
    rows = np.concatenate(groups).astype(np.float64)
    asked = query.astype(np.float64)
    kernel = np.exp(KERNEL_WIDTH * (rows @ rows.T - 1))
    even = 1 / (len(groups) + 1)
    wanted = np.zeros((len(rows), len(groups)))
    ends = np.cumsum([len(group) for group in groups])
    for number, end in enumerate(ends):
        wanted[end - len(groups[number]) : end, number] = 1
    inverse = np.linalg.inv(kernel + RIDGE * np.eye(len(rows)))
    return np.exp(KERNEL_WIDTH * (rows @ asked - 1)) @ inverse @ (wanted - even) + even


def closest(rows: Vectors, query: Vectors, count: int) -> Vectors:
    return rows[np.argsort(-(rows @ query), kind="stable")[:count]]


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_the_plain_formula(seed: int) -> None:
    table = make_clusters(9, seed=seed)
    query = near(table, 4, seed=seed)
    order = everyone(table, query)
    verdict = rerank(table, order, query)
    breadth = SMALL_RERANK if len(verdict) == SMALL_RERANK.candidates else LARGE_RERANK
    texts = [table.rows[table.select_rows(np.array([p]))] for p in order[: len(verdict)]]
    plain = plainly([closest(rows, query, breadth.rows) for rows in texts], query)
    assert np.allclose(verdict.probabilities, plain, atol=1e-4)
    assert order[int(verdict.evidence.argmax())] == 4
    means = [float(np.sort(rows @ query)[::-1][:SIMILARITY_ROWS].mean()) for rows in texts]
    assert np.allclose(verdict.similarities, means, atol=1e-5)


def test_where_the_lead_is_clear_few_say_what_many_say(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_clusters(30)
    query = near(table, 7)
    order = everyone(table, query)
    few = rerank(table, order, query)
    monkeypatch.setattr(reranker, "MIN_CLEAR_LEAD", 2.0)
    many = rerank(table, order, query)
    assert (len(few), len(many)) == (SMALL_RERANK.candidates, LARGE_RERANK.candidates)
    assert few.probabilities.argmax() == many.probabilities.argmax()
    assert abs(few.evidence.max() - many.evidence.max()) < 0.2


def test_where_it_is_open_more_are_compared_by_more() -> None:
    table = make_clusters(30)
    query = unit(table.rows.mean(0))[0]
    assert len(rerank(table, everyone(table, query), query)) == LARGE_RERANK.candidates


def test_nobody_is_compared_with_nobody() -> None:
    table = make_clusters(3)
    nothing = rerank(table, np.zeros(0, np.int64), table.rows[0])
    assert nothing is NO_SCORES
    assert rerank_all(table, np.zeros(0, np.int64), table.rows[0]) is NO_SCORES
    assert len(nothing) == len(nothing.evidence) == 0


def test_a_single_expert_is_judged_against_nobody() -> None:
    table = make_clusters(1)
    inside = rerank(table, np.array([0]), near(table, 0))
    strange = rerank(table, np.array([0]), -near(table, 0))
    rows = closest(table.rows, near(table, 0), SMALL_RERANK.rows)
    assert inside.probabilities[0] == pytest.approx(plainly([rows], near(table, 0))[0], abs=1e-4)
    assert inside.probabilities[0] > 0.9
    assert strange.probabilities[0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_prompt_far_from_all_leaves_each_an_even_share(count: int) -> None:
    rows = [at_random(4, seed=n, around=np.eye(DIMENSIONS, dtype=np.float32)[n]) for n in range(12)]
    table = make_table({make_expert_digest(n): rows[n] for n in range(count)})
    far = -unit(sum(table.rows, np.zeros(DIMENSIONS, np.float32)))[0]
    verdict = rerank(table, np.arange(count), far)
    compared = len(verdict)
    assert np.allclose(verdict.probabilities, 1 / (compared + 1), atol=0.12)


def test_the_evidence_for_nobody_does_not_hang_on_how_many_compete() -> None:
    even = [RerankScores(*figures(count)).evidence[0] for count in (1, 2, 3, 5, 6)]
    assert np.allclose(even, 1 / (MIN_COMPETING + 1))
    many = [RerankScores(*figures(count)).evidence[0] for count in (8, 14)]
    assert np.allclose(many, [1 / 9, 1 / 15])


def figures(count: int) -> tuple[Vectors, Vectors, npt.NDArray[np.int64], float]:
    """What a prompt far from so many experts has."""
    shares = np.full(count, 1 / (count + 1), np.float32)
    windfall = reranker._compute_prior_correction(count)
    return shares, np.zeros(count, np.float32), np.arange(count), windfall


def test_experts_that_are_alike_are_one_answer() -> None:
    table = make_clusters(3)
    texts = [table.rows[table.select_rows(np.array([p]))] for p in range(3)]
    doubled = make_table(
        {make_expert_digest(n): texts[min(n, 2)] for n in range(5)}
    )  # 2, 3 and 4 are alike
    query = near(table, 2)
    alone = rerank_all(table, np.arange(3), query)
    verdict = rerank_all(doubled, np.arange(5), query)
    groups = verdict.groups.tolist()
    assert groups[2] == groups[3] == groups[4]
    assert len(set(groups)) == 3
    assert np.allclose(verdict.probabilities[2:], verdict.probabilities[2])
    assert verdict.probabilities[2] == pytest.approx(alone.probabilities[2], abs=0.1)
    assert verdict.prior_correction == alone.prior_correction


def test_where_all_of_the_few_are_alike_the_others_are_looked_at_too() -> None:
    table = make_clusters(2)
    texts = [table.rows[table.select_rows(np.array([p]))] for p in range(2)]
    copies = SMALL_RERANK.candidates
    copied = make_table({make_expert_digest(n): texts[n // copies] for n in range(copies + 1)})
    among = near(table, 0)
    verdict = rerank(copied, np.arange(copies + 1), among)
    assert verdict.groups.tolist() == [0] * copies + [1]
    only = rerank(copied, np.arange(copies), among)
    assert only.groups.tolist() == [0] * copies


def test_two_of_one_row_each_are_alike_only_when_they_are_the_same() -> None:
    row = at_random(3)
    table = make_table(
        {
            make_expert_digest(0): row[:1],
            make_expert_digest(1): row[:1],
            make_expert_digest(2): row[1:2],
        }
    )
    assert rerank(table, np.arange(3), row[2]).groups.tolist() == [0, 0, 1]


def test_a_hidden_row_counts_as_if_it_were_not_there() -> None:
    table = make_clusters(3)
    number = 8 + 5  # of the second expert
    query = table.rows[number]
    rows = [table.rows[table.select_rows(np.array([p]))] for p in range(3)]
    without = make_table(
        {
            make_expert_digest(0): rows[0],
            make_expert_digest(1): np.delete(rows[1], 5, axis=0),
            make_expert_digest(2): rows[2],
        }
    )
    hidden = rerank(table, np.arange(3), query, excluded_row=number)
    plain = rerank(without, np.arange(3), query)
    assert np.allclose(hidden.probabilities, plain.probabilities, atol=1e-5)
    assert np.allclose(hidden.similarities, plain.similarities, atol=1e-6)
    assert hidden.similarities[1] < rerank(table, np.arange(3), query).similarities[1]


def test_an_expert_whose_only_row_is_hidden_has_nothing_to_say() -> None:
    rows = at_random(3)
    table = make_table({make_expert_digest(0): rows[:1], make_expert_digest(1): rows[1:2]})
    verdict = rerank(table, np.arange(2), rows[0], excluded_row=0)
    assert verdict.similarities[0] == 0
    assert np.isfinite(verdict.probabilities).all()
    assert verdict.evidence.argmax() != 0 or verdict.evidence[0] < 1


def test_rows_without_a_word_give_numbers() -> None:
    zeros = np.zeros((2, DIMENSIONS), np.float32)
    table = make_table(
        {
            make_expert_digest(0): zeros,
            make_expert_digest(1): at_random(3),
            make_expert_digest(2): zeros[:1],
        }
    )
    for query in (zeros[0], table.rows[3]):
        verdict = rerank(table, np.arange(3), query)
        assert np.isfinite(verdict.evidence).all()
    assert rerank(table, np.arange(3), zeros[0]).similarities.max() == 0


def test_of_two_hundred_rows_the_closest_count_beside_one_of_two() -> None:
    centre = at_random(2, seed=5)
    table = make_table(
        {
            make_expert_digest(0): at_random(200, seed=1, around=centre[0]),
            make_expert_digest(1): at_random(2, seed=2, around=centre[1]),
        }
    )
    for position in (0, 1):
        verdict = rerank(table, np.arange(2), centre[position])
        assert int(verdict.probabilities.argmax()) == position
        assert verdict.probabilities[position] > 0.5


def test_the_order_of_candidates_does_not_matter() -> None:
    table = make_clusters(5)
    query = near(table, 1)
    order = np.array([3, 1, 4, 0, 2])
    there, back = rerank_all(table, order, query), rerank_all(table, np.arange(5), query)
    assert np.allclose(there.probabilities, back.probabilities[order], atol=1e-5)
    assert TEXTS == 8
