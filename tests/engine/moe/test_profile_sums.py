"""What is learnt adds up, is told apart again, and fades; nothing of it is ever below nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.profile_codecs import read_activity, write_activity
from expertctl.engine.moe.usage_profile import (
    EMPTY_PROFILE,
    MAX_PROFILE_TOKENS,
    LaneTimes,
    LayerUsage,
    UsageProfile,
    accumulate_scores,
    add_profiles,
    subtract_profile,
)
from expertctl.errors import IncompatibleError

EXPERTS, USED = 16, 2
counts = st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 1000), max_size=6)


@st.composite
def documents(draw: st.DrawFn) -> UsageProfile:
    numbers = draw(st.sets(st.integers(0, 5), max_size=4))
    layers = tuple(
        LayerUsage(
            number, calls=draw(st.integers(0, 99)), hot=draw(counts), cold=draw(counts),
            requests=draw(st.integers(0, 99)),
        )
        for number in sorted(numbers)
    )  # fmt: skip
    return UsageProfile("update", layers, experts=EXPERTS, used=USED)


def one(hot: dict[int, int], *, calls: int = 1, **more: object) -> UsageProfile:
    layer = LayerUsage(3, calls=calls, hot=hot, **more)  # type: ignore[arg-type]
    return UsageProfile("update", (layer,), experts=EXPERTS, used=USED)


def hits(document: UsageProfile) -> dict[int, dict[int, int]]:
    return {layer.layer: layer.hits for layer in document.layers if layer.hits}


@given(documents(), documents())
def test_what_was_added_is_told_apart_again(before: UsageProfile, more: UsageProfile) -> None:
    total = add_profiles(before, more)
    assert hits(subtract_profile(total, before)) == hits(more)
    assert hits(add_profiles(before, subtract_profile(total, before))) == hits(total)


@given(documents(), documents())
def test_the_order_does_not_matter(here: UsageProfile, there: UsageProfile) -> None:
    assert hits(add_profiles(here, there)) == hits(add_profiles(there, here))


@given(documents(), documents())
def test_a_sum_can_be_written_and_read(here: UsageProfile, there: UsageProfile) -> None:
    total = add_profiles(here, there)
    assert hits(read_activity(write_activity(total), what="a sum")) == hits(total)


def test_nothing_is_added_to_nothing() -> None:
    assert add_profiles(EMPTY_PROFILE, one({1: 4})).layers == one({1: 4}).layers
    assert EMPTY_PROFILE.tokens == 0


def test_where_counters_went_over_all_that_is_there_is_new() -> None:
    before, now = one({1: 1}, calls=1), one({1: 4}, calls=2)
    assert hits(subtract_profile(now, before)) == {3: {1: 3}}
    again = replace(now, overflow_resets=1)
    assert subtract_profile(again, before) == again
    assert hits(subtract_profile(again, again)) == {}


def test_scores_grow_by_what_was_counted_and_fade() -> None:
    assert accumulate_scores([{1: 2.5}, {}], one({1: 4, 2: 1}), (3, 7)) == [{1: 6.5, 2: 1}, {}]
    (faded,) = accumulate_scores([{1: MAX_PROFILE_TOKENS}], one({2: MAX_PROFILE_TOKENS + 2}), (3,))
    assert faded == {1: MAX_PROFILE_TOKENS / 2, 2: MAX_PROFILE_TOKENS / 2 + 1}
    assert accumulate_scores([{}], EMPTY_PROFILE, (3,)) == [{}]


def test_means_are_weighted_by_calls() -> None:
    slow, quick = LaneTimes(parallel_join_wait=40.0), LaneTimes(parallel_join_wait=10.0)
    total = add_profiles(
        one({1: 1}, calls=1, times=slow), one({1: 1}, calls=2, times=quick)
    ).layers[0]
    assert total.times.parallel_join_wait == pytest.approx(20)
    assert total.calls == 3
    cold = add_profiles(one({}, calls=2, cold={5: 6}), one({}, calls=1, cold={5: 6})).layers[0]
    assert cold.cold_per_call == pytest.approx(4)


def test_counts_of_which_nobody_knows_whether_they_were_hot_count_as_cold_beside_others() -> None:
    total = add_profiles(one({}, raw={4: 7}), one({4: 1})).layers[0]
    assert (total.hot, total.cold, total.raw) == ({4: 1}, {4: 7}, {})
    alone = add_profiles(one({}, raw={4: 7}), one({}, raw={4: 1})).layers[0]
    assert (alone.hits, alone.raw) == ({4: 8}, {4: 8})


def test_old_usage_decays() -> None:
    """After 18 times 65,536 tokens nothing is left of an expert that 65,536 asked for once."""
    half = MAX_PROFILE_TOKENS // 2
    learnt = one({0: half, 1: half}, calls=half)
    for _ in range(18):
        learnt = add_profiles(learnt, one({2: half, 3: half}, calls=half))
        assert learnt.tokens <= MAX_PROFILE_TOKENS
    assert hits(learnt) == {3: {2: half, 3: half}}


def test_counts_of_other_experts_do_not_add_up() -> None:
    other = UsageProfile("update", experts=EXPERTS + 1)
    with pytest.raises(IncompatibleError, match="of 16 and of 17 routed experts"):
        add_profiles(one({1: 1}), other)


def test_prompts_are_added_to_prompts_and_tokens_to_both() -> None:
    """24 prompts asked for more than two experts each: they are 24 all the same."""
    raw = {expert: 20 for expert in range(8)}
    prompts = UsageProfile(
        "update", (LayerUsage(3, raw=raw),), experts=EXPERTS, prompts=24, preset="mixed"
    )
    assert prompts.tokens == 24
    tokens = one({1: 6, 2: 4})
    assert tokens.tokens == 6
    both = add_profiles(prompts, tokens)
    assert (both.tokens, both.preset) == (30, "mixed")
    assert add_profiles(tokens, prompts).tokens == 30
    assert add_profiles(both, both).tokens == 60
    assert add_profiles(tokens, tokens).prompts == 0


def test_prompts_fade_with_what_they_asked_for() -> None:
    half = MAX_PROFILE_TOKENS // 2
    prompts = UsageProfile("update", (LayerUsage(3, raw={1: half}),), prompts=half)
    total = add_profiles(add_profiles(prompts, prompts), prompts)
    assert (total.prompts, total.layers[0].raw) == (3 * half // 2, {1: 3 * half // 2})
