"""Which guesses are read: the formula in plain words, and what it comes to."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.moe.expert_loader import HIT_RATE_STEP, MIN_HIT_RATE, PredictionFilter
from expertctl.engine.moe.layer_slots import MAX_SEQUENCES

LAYERS, EXPERTS, USED = 3, 8, 2
token = st.permutations(range(EXPERTS)).map(lambda order: order[:USED])
tokens = st.lists(st.tuples(token, token, token), min_size=1, max_size=3)
one_pass = st.tuples(tokens, tokens).map(lambda each: list(zip(*each, strict=False)))


def ids(*tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def everybody(likely: np.ndarray) -> np.ndarray:
    return np.ones(likely.shape, bool)


@settings(deadline=None)
@given(st.lists(one_pass, min_size=1, max_size=40), st.sets(st.integers(0, EXPERTS - 1)))
def test_shares_are_what_the_formula_says(
    passes: list[list[tuple[tuple[list[int], ...], ...]]], there: set[int]
) -> None:
    guesses = PredictionFilter()
    plain: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for each in passes:
        for layer in range(LAYERS):
            chosen, guessed = (ids(*(token[part][layer] for token in each)) for part in (0, 1))
            absent = ~np.isin(guessed, list(there))
            read = guesses.select(layer, guessed, absent)
            by_rank = [(rank, e) for rank in range(USED) for e in guessed[:, rank].tolist()]
            wanted = [
                e for rank, e in by_rank if e not in there and plain[layer, rank] >= MIN_HIT_RATE
            ]
            assert read == list(dict.fromkeys(wanted))
            guesses.record_outcome(layer, set(chosen.ravel().tolist()))
            for rank in range(USED):
                mine = [e in chosen for e in guessed[:, rank].tolist() if e not in there]
                if mine:
                    plain[layer, rank] += HIT_RATE_STEP * (
                        sum(mine) / len(mine) - plain[layer, rank]
                    )
    for layer in range(LAYERS):
        expected = [plain[layer, rank] for rank in range(USED)]
        assert guesses.hit_rates(layer) == pytest.approx(expected)


def test_a_rank_that_is_always_wrong_is_read_thirty_five_times() -> None:
    """Of its share 0.98 ** 34 = 0.503 is left before the last, and 0.98 ** 35 = 0.493 after it."""
    guesses, read = PredictionFilter(), 0
    for _ in range(100):
        chosen = guesses.select(1, ids([3, 5]), everybody(ids([3, 5])))
        assert 5 in chosen
        read += 3 in chosen
        guesses.record_outcome(1, {5, 6})
    assert read == 35
    assert guesses.hit_rates(1) == pytest.approx([0.98**100, 1.0])


def test_a_rank_that_becomes_right_is_read_again() -> None:
    guesses, likely = PredictionFilter(), ids([3, 5])
    for _ in range(100):
        guesses.select(1, likely, everybody(likely))
        guesses.record_outcome(1, {5, 6})
    late = 0
    while guesses.select(1, likely, everybody(likely)) == [5]:
        guesses.record_outcome(1, {3, 6})
        late += 1
    share = 0.98**100
    assert 1 - (1 - share) * 0.98**late >= MIN_HIT_RATE > 1 - (1 - share) * 0.98 ** (late - 1)


def test_who_is_there_says_nothing_of_a_rank() -> None:
    """He is right more often than those who are not: what was asked for of late is there."""
    guesses, likely = PredictionFilter(), ids([3, 5])
    for _ in range(50):
        assert guesses.select(2, likely, np.array([[False, False]])) == []
        guesses.record_outcome(2, {1, 2})
    assert guesses.hit_rates(2) == (1.0, 1.0)


def test_a_guess_is_judged_by_its_own_layer_and_once() -> None:
    guesses, likely = PredictionFilter(), ids([3, 5])
    guesses.select(2, likely, everybody(likely))
    guesses.record_outcome(0, {1, 2})  # that pass failed, another one begins
    guesses.record_outcome(2, {1, 2})
    assert guesses.hit_rates(2) == (1.0, 1.0)
    guesses.select(2, likely, everybody(likely))
    for _ in range(3):
        guesses.record_outcome(2, {5, 2})
    assert guesses.hit_rates(2) == pytest.approx((0.98, 1.0))


def test_a_prompt_is_neither_held_back_nor_judged() -> None:
    guesses, likely = PredictionFilter(), ids([3, 5])
    for _ in range(50):
        guesses.select(1, likely, everybody(likely))
        guesses.record_outcome(1, {1, 2})
    before = guesses.hit_rates(1)
    prompt = np.repeat(likely, MAX_SEQUENCES + 1, axis=0)
    assert guesses.select(1, prompt, everybody(prompt)) == [3, 5]
    guesses.record_outcome(1, {1, 2})
    assert guesses.hit_rates(1) == before


def test_nothing_is_known_of_a_layer_nobody_guessed_at() -> None:
    assert PredictionFilter().hit_rates(1) == ()
