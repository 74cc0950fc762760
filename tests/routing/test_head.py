"""The head against the plain formula, in float64 with the inverse written out."""

import numpy as np
import numpy.typing as npt
import pytest

from expertctl.routing import head
from expertctl.routing.head import (
    COMPETING,
    FEW,
    MANY,
    NEAREST,
    NOBODY,
    RIDGE,
    WIDTH,
    Verdict,
    judge,
    judge_all,
)
from expertctl.routing.vector_table import Vectors, VectorTable
from tests.routing.rows import DIMENSIONS, TEXTS, clusters, expert, table_of

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
    mean = table.rows[table.rows_of(np.array([position]))].mean(0)
    return at_random(1, seed=seed, around=mean)[0]


def everyone(table: VectorTable, query: Vectors) -> npt.NDArray[np.int64]:
    """All positions, the closest first."""
    best = [
        float((table.rows[table.rows_of(np.array([p]))] @ query).max()) for p in range(len(table))
    ]
    return np.argsort(-np.array(best)).astype(np.int64)


def plainly(groups: list[Vectors], query: Vectors) -> Doubles:
    """The answer of kernel ridge regression for each group of rows."""
    rows = np.concatenate(groups).astype(np.float64)
    asked = query.astype(np.float64)
    kernel = np.exp(WIDTH * (rows @ rows.T - 1))
    even = 1 / (len(groups) + 1)
    wanted = np.zeros((len(rows), len(groups)))
    ends = np.cumsum([len(group) for group in groups])
    for number, end in enumerate(ends):
        wanted[end - len(groups[number]) : end, number] = 1
    inverse = np.linalg.inv(kernel + RIDGE * np.eye(len(rows)))
    return np.exp(WIDTH * (rows @ asked - 1)) @ inverse @ (wanted - even) + even


def closest(rows: Vectors, query: Vectors, count: int) -> Vectors:
    return rows[np.argsort(-(rows @ query), kind="stable")[:count]]


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_the_plain_formula(seed: int) -> None:
    table = clusters(9, seed=seed)
    query = near(table, 4, seed=seed)
    order = everyone(table, query)
    verdict = judge(table, order, query)
    breadth = FEW if len(verdict) == FEW.candidates else MANY
    texts = [table.rows[table.rows_of(np.array([p]))] for p in order[: len(verdict)]]
    plain = plainly([closest(rows, query, breadth.rows) for rows in texts], query)
    assert np.allclose(verdict.shares, plain, atol=1e-4)
    assert order[int(verdict.evidence.argmax())] == 4
    means = [float(np.sort(rows @ query)[::-1][:NEAREST].mean()) for rows in texts]
    assert np.allclose(verdict.support, means, atol=1e-5)


def test_where_the_lead_is_clear_few_say_what_many_say(monkeypatch: pytest.MonkeyPatch) -> None:
    table = clusters(30)
    query = near(table, 7)
    order = everyone(table, query)
    few = judge(table, order, query)
    monkeypatch.setattr(head, "CLOSE", 2.0)
    many = judge(table, order, query)
    assert (len(few), len(many)) == (FEW.candidates, MANY.candidates)
    assert few.shares.argmax() == many.shares.argmax()
    assert abs(few.evidence.max() - many.evidence.max()) < 0.2


def test_where_it_is_open_more_are_compared_by_more() -> None:
    table = clusters(30)
    query = unit(table.rows.mean(0))[0]
    assert len(judge(table, everyone(table, query), query)) == MANY.candidates


def test_nobody_is_compared_with_nobody() -> None:
    table = clusters(3)
    nothing = judge(table, np.zeros(0, np.int64), table.rows[0])
    assert nothing is NOBODY
    assert judge_all(table, np.zeros(0, np.int64), table.rows[0]) is NOBODY
    assert len(nothing) == len(nothing.evidence) == 0


def test_a_single_expert_is_judged_against_nobody() -> None:
    table = clusters(1)
    inside = judge(table, np.array([0]), near(table, 0))
    strange = judge(table, np.array([0]), -near(table, 0))
    rows = closest(table.rows, near(table, 0), FEW.rows)
    assert inside.shares[0] == pytest.approx(plainly([rows], near(table, 0))[0], abs=1e-4)
    assert inside.shares[0] > 0.9
    assert strange.shares[0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_prompt_far_from_all_leaves_each_an_even_share(count: int) -> None:
    rows = [at_random(4, seed=n, around=np.eye(DIMENSIONS, dtype=np.float32)[n]) for n in range(12)]
    table = table_of({expert(n): rows[n] for n in range(count)})
    far = -unit(sum(table.rows, np.zeros(DIMENSIONS, np.float32)))[0]
    verdict = judge(table, np.arange(count), far)
    compared = len(verdict)
    assert np.allclose(verdict.shares, 1 / (compared + 1), atol=0.12)


def test_the_evidence_for_nobody_does_not_hang_on_how_many_compete() -> None:
    even = [Verdict(*figures(count)).evidence[0] for count in (1, 2, 3, 5, 6)]
    assert np.allclose(even, 1 / (COMPETING + 1))
    many = [Verdict(*figures(count)).evidence[0] for count in (8, 14)]
    assert np.allclose(many, [1 / 9, 1 / 15])


def figures(count: int) -> tuple[Vectors, Vectors, npt.NDArray[np.int64], float]:
    """What a prompt far from so many experts has."""
    shares = np.full(count, 1 / (count + 1), np.float32)
    windfall = head._windfall(count)
    return shares, np.zeros(count, np.float32), np.arange(count), windfall


def test_experts_that_are_alike_are_one_answer() -> None:
    table = clusters(3)
    texts = [table.rows[table.rows_of(np.array([p]))] for p in range(3)]
    doubled = table_of({expert(n): texts[min(n, 2)] for n in range(5)})  # 2, 3 and 4 are alike
    query = near(table, 2)
    alone = judge_all(table, np.arange(3), query)
    verdict = judge_all(doubled, np.arange(5), query)
    groups = verdict.groups.tolist()
    assert groups[2] == groups[3] == groups[4]
    assert len(set(groups)) == 3
    assert np.allclose(verdict.shares[2:], verdict.shares[2])
    assert verdict.shares[2] == pytest.approx(alone.shares[2], abs=0.1)
    assert verdict.windfall == alone.windfall


def test_where_all_of_the_few_are_alike_the_others_are_looked_at_too() -> None:
    table = clusters(2)
    texts = [table.rows[table.rows_of(np.array([p]))] for p in range(2)]
    copies = FEW.candidates
    copied = table_of({expert(n): texts[n // copies] for n in range(copies + 1)})
    among = near(table, 0)
    verdict = judge(copied, np.arange(copies + 1), among)
    assert verdict.groups.tolist() == [0] * copies + [1]
    only = judge(copied, np.arange(copies), among)
    assert only.groups.tolist() == [0] * copies


def test_two_of_one_row_each_are_alike_only_when_they_are_the_same() -> None:
    row = at_random(3)
    table = table_of({expert(0): row[:1], expert(1): row[:1], expert(2): row[1:2]})
    assert judge(table, np.arange(3), row[2]).groups.tolist() == [0, 0, 1]


def test_a_hidden_row_counts_as_if_it_were_not_there() -> None:
    table = clusters(3)
    number = 8 + 5  # of the second expert
    query = table.rows[number]
    rows = [table.rows[table.rows_of(np.array([p]))] for p in range(3)]
    without = table_of(
        {expert(0): rows[0], expert(1): np.delete(rows[1], 5, axis=0), expert(2): rows[2]}
    )
    hidden = judge(table, np.arange(3), query, hidden=number)
    plain = judge(without, np.arange(3), query)
    assert np.allclose(hidden.shares, plain.shares, atol=1e-5)
    assert np.allclose(hidden.support, plain.support, atol=1e-6)
    assert hidden.support[1] < judge(table, np.arange(3), query).support[1]


def test_an_expert_whose_only_row_is_hidden_has_nothing_to_say() -> None:
    rows = at_random(3)
    table = table_of({expert(0): rows[:1], expert(1): rows[1:2]})
    verdict = judge(table, np.arange(2), rows[0], hidden=0)
    assert verdict.support[0] == 0
    assert np.isfinite(verdict.shares).all()
    assert verdict.evidence.argmax() != 0 or verdict.evidence[0] < 1


def test_rows_without_a_word_give_numbers() -> None:
    zeros = np.zeros((2, DIMENSIONS), np.float32)
    table = table_of({expert(0): zeros, expert(1): at_random(3), expert(2): zeros[:1]})
    for query in (zeros[0], table.rows[3]):
        verdict = judge(table, np.arange(3), query)
        assert np.isfinite(verdict.evidence).all()
    assert judge(table, np.arange(3), zeros[0]).support.max() == 0


def test_of_two_hundred_rows_the_closest_count_beside_one_of_two() -> None:
    centre = at_random(2, seed=5)
    table = table_of(
        {
            expert(0): at_random(200, seed=1, around=centre[0]),
            expert(1): at_random(2, seed=2, around=centre[1]),
        }
    )
    for position in (0, 1):
        verdict = judge(table, np.arange(2), centre[position])
        assert int(verdict.shares.argmax()) == position
        assert verdict.shares[position] > 0.5


def test_the_order_of_candidates_does_not_matter() -> None:
    table = clusters(5)
    query = near(table, 1)
    order = np.array([3, 1, 4, 0, 2])
    there, back = judge_all(table, order, query), judge_all(table, np.arange(5), query)
    assert np.allclose(there.shares, back.shares[order], atol=1e-5)
    assert TEXTS == 8
