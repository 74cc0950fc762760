"""Who follows whom: the formula in plain words, and what it comes to."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.moe.layer_slots import (
    LEARNING_RATE,
    MAX_LEARNT_PAIRS,
    MAX_SEQUENCES,
    TransitionModel,
)

LAYERS, EXPERTS, USED = 2, 6, 2
token = st.permutations(range(EXPERTS)).map(lambda order: order[:USED])
one_pass = st.lists(st.tuples(token, token), min_size=1, max_size=9)
one_text = st.lists(st.tuples(token, token), min_size=2, max_size=30)


def asked(*tokens: tuple[list[int], ...]) -> list[np.ndarray]:
    """What a pass asked for: of each token the experts of each layer."""
    return list(np.array(tokens).swapaxes(0, 1))


class SequentialModel:
    """The same, one chance after the other."""

    def __init__(self) -> None:
        self.chances: dict[tuple[int, int, int], float] = defaultdict(float)
        self.before: list[tuple[list[int], ...]] = []

    def learn(self, before: tuple[list[int], ...], after: tuple[list[int], ...]) -> None:
        for layer in range(LAYERS):
            for expert in before[layer]:
                for other in range(EXPERTS):
                    now = self.chances[layer, expert, other]
                    came = float(other in after[layer])
                    self.chances[layer, expert, other] = now + LEARNING_RATE * (came - now)

    def passed(self, tokens: list[tuple[list[int], ...]]) -> None:
        if len(tokens) > MAX_SEQUENCES:
            for before, after in pairwise(tokens):
                self.learn(before, after)
            self.before = tokens[-1:]
            return
        if len(self.before) == len(tokens):
            for before, after in zip(self.before, tokens, strict=True):
                self.learn(before, after)
        self.before = tokens

    def chance(self, layer: int, tokens: list[tuple[list[int], ...]], other: int) -> float:
        last = tokens if len(tokens) <= MAX_SEQUENCES else tokens[-1:]
        rows = [self.chances[layer, expert, other] for each in last for expert in each[layer]]
        return sum(rows) / USED


@settings(deadline=None)
@given(st.lists(one_pass, min_size=1, max_size=8))
def test_chances_are_what_the_formula_says(passes: list[list[tuple[list[int], ...]]]) -> None:
    followers, plain = TransitionModel(layers=LAYERS, experts=EXPERTS), SequentialModel()
    for tokens in passes:
        followers.observe_pass(asked(*tokens), len(tokens))
        plain.passed(tokens)
        for layer, selected in enumerate(asked(*tokens)):
            wanted = [plain.chance(layer, tokens, other) for other in range(EXPERTS)]
            assert followers.predict(layer, selected) == pytest.approx(wanted, abs=1e-6)


@settings(deadline=None)
@given(one_text, st.tuples(token, token))
def test_who_is_asked_for_one_token_of_a_prompt_follows_nobody_there(
    prompt: list[tuple[list[int], ...]], after: tuple[list[int], ...]
) -> None:
    """The last layer: what follows the prompt follows its last token, there as elsewhere."""
    followers, plain = TransitionModel(layers=LAYERS, experts=EXPERTS), SequentialModel()
    first, last = asked(*prompt)
    followers.observe_pass([first, last[-1:]], len(prompt))
    for one, next_one in pairwise(prompt):
        plain.learn(one, next_one)
    for place in [place for place in plain.chances if place[0] == LAYERS - 1]:
        del plain.chances[place]
    followers.observe_pass(asked(after), 1)
    plain.learn(prompt[-1], after)
    for layer, selected in enumerate(asked(after)):
        wanted = [plain.chance(layer, [after], other) for other in range(EXPERTS)]
        assert followers.predict(layer, selected) == pytest.approx(wanted, abs=1e-6)


def test_where_only_the_last_layer_is_routed_prompts_follow_nobody() -> None:
    """Neither tokens that it was not asked for nor the end of the text before."""
    followers = TransitionModel(layers=1, experts=4)
    followers.observe_pass([np.array([[0, 1]])], 9)
    followers.observe_pass([np.array([[2, 3]])], 5)
    assert not followers.predict(0, np.array([[0, 1]])).any()
    followers.observe_pass([np.array([[1, 2]])], 1)
    assert followers.predict(0, np.array([[2, 3]])) == pytest.approx(
        [0, LEARNING_RATE, LEARNING_RATE, 0]
    )


def test_at_first_nobody_is_likely() -> None:
    followers = TransitionModel(layers=1, experts=EXPERTS)
    assert followers.predict(0, np.array([[1, 2]])).tolist() == [0] * EXPERTS
    assert followers.nbytes == EXPERTS * EXPERTS * 4


def test_who_always_follows_is_certain_in_the_end() -> None:
    followers = TransitionModel(layers=1, experts=4)
    for _ in range(300):
        for pair in ([0, 1], [2, 3]):
            followers.observe_pass([np.array([pair])], 1)
    assert followers.predict(0, np.array([[0, 1]])) == pytest.approx([0, 0, 1, 1], abs=0.01)
    assert followers.predict(0, np.array([[0, 3]])) == pytest.approx([0.5] * 4, abs=0.01)


def test_where_tokens_do_not_depend_on_each_other_it_is_how_often_each_is_asked_for() -> None:
    drawn, often = np.random.default_rng(0), np.array([0.6, 0.3, 0.1])
    followers = TransitionModel(layers=1, experts=3)
    found = []
    for number in range(6000):
        token = drawn.choice(3, 1, p=often)
        followers.observe_pass([token[None]], 1)
        if number > 1000:
            found.append(followers.predict(0, token[None]))
    assert np.mean(found, axis=0) == pytest.approx(often, abs=0.03)


def test_of_a_prompt_the_last_tokens_are_learnt_from() -> None:
    prompt = [([0], [0])] * 50 + [([1], [1])] * (MAX_LEARNT_PAIRS + 1)
    followers = TransitionModel(layers=2, experts=3)
    followers.observe_pass(asked(*prompt), len(prompt))
    assert not followers.predict(0, np.array([[0]])).any()
    kept = 1 - (1 - LEARNING_RATE) ** MAX_LEARNT_PAIRS
    assert followers.predict(1, np.array([[1]])) == pytest.approx([0, kept, 0])
    followers.observe_pass(asked(([2], [2])), 1)
    assert followers.predict(0, np.array([[1]]))[2] == pytest.approx(LEARNING_RATE), (
        "its first follower"
    )


def test_texts_that_begin_or_end_are_not_taken_for_each_other() -> None:
    followers = TransitionModel(layers=1, experts=4)
    followers.observe_pass([np.array([[0], [1]])], 2)
    followers.observe_pass([np.array([[2]])], 1)
    assert not followers.predict(0, np.array([[0], [1]])).any()


def test_of_a_prompt_only_its_last_token_stays() -> None:
    followers = TransitionModel(layers=2, experts=8)
    followers.observe_pass([np.zeros((512, 3), np.int64)] * 2, 512)
    before = followers._previous
    assert before is not None
    assert before.shape == (1, 2, 3)
    assert before.base is None or before.base.nbytes == before.nbytes
