"""How batches are worked on, by the published cases and on both sides of each boundary."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routing import (
    BatchShape,
    PromptPolicy,
    choose_worklist_order,
    is_bypassed,
    is_dense,
    plan_batch,
    reduces_before_merging,
)

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text(encoding="utf-8")
)["prompt_policy"]
PROMPT = BatchShape(phase=Phase.PROMPT, tokens=256, used=8, experts=64, hot=32)
DECODE = replace(PROMPT, phase=Phase.DECODE, tokens=1)
WARMUP = replace(PROMPT, phase=Phase.WARMUP)
EVERYTHING = PromptPolicy(reduce_merge="on", dense_min_tokens=0, bypass="on", order="expert_major")
"""All that a prompt can be given."""


def of_capacity(tokens: int, capacity: int | None) -> BatchShape:
    """A prompt of some tokens with so many routed slots; the nearest that there is."""
    shape = replace(PROMPT, tokens=tokens)
    return shape if capacity is None else replace(shape, used=capacity // tokens)


@pytest.mark.parametrize("case", [c for c in VECTORS if "dense" in c], ids=str)
def test_prompts_are_dense_as_the_vectors_say(case: dict[str, Any]) -> None:
    policy = PromptPolicy(dense_min_tokens=case["dense_min"])
    assert is_dense(policy, replace(PROMPT, tokens=case["n_tokens"])) is case["dense"]


@pytest.mark.parametrize("case", [c for c in VECTORS if "on" in c], ids=str)
def test_lanes_are_reduced_first_as_the_vectors_say(case: dict[str, Any]) -> None:
    policy = PromptPolicy(reduce_merge=case["reduce_merge"])
    batch = of_capacity(case["n_tokens"], case.get("capacity"))
    assert reduces_before_merging(policy, batch) is case["on"]


@pytest.mark.parametrize("case", [c for c in VECTORS if "bypass" in c], ids=str)
def test_prompts_are_bypassed_as_the_vectors_say(case: dict[str, Any]) -> None:
    policy = PromptPolicy(min_hot_ratio=case["min_ratio"])
    batch = replace(PROMPT, hot=case["hot"], experts=case["of"])
    assert is_bypassed(policy, batch) is case["bypass"]
    assert plan_batch(policy, batch).cached is not case["bypass"]


@pytest.mark.parametrize(("hot", "bypass"), [(12, True), (13, False)])
def test_of_256_experts_thirteen_are_not_below_a_twentieth(hot: int, bypass: bool) -> None:
    batch = replace(PROMPT, hot=hot, experts=256)
    assert is_bypassed(PromptPolicy(min_hot_ratio=0.05), batch) is bypass


@pytest.mark.parametrize(
    ("tokens", "used", "wanted"), [(16, 16, False), (32, 8, True), (31, 8, False), (32, 2, True),
                                   (32, 1, False), (63, 1, False), (64, 1, True)]
)  # fmt: skip
def test_auto_reduces_from_32_tokens_and_64_slots_on(tokens: int, used: int, wanted: bool) -> None:
    batch = replace(PROMPT, tokens=tokens, used=used)
    assert reduces_before_merging(PromptPolicy(reduce_merge="auto"), batch) is wanted


def test_lanes_are_reduced_where_that_is_wanted_whatever_their_size() -> None:
    small = replace(PROMPT, tokens=2, used=1)
    assert reduces_before_merging(PromptPolicy(reduce_merge="on"), small)
    assert not reduces_before_merging(PromptPolicy(reduce_merge="off"), PROMPT)
    assert not reduces_before_merging(PromptPolicy(), PROMPT)


@pytest.mark.parametrize("reduce_merge", ["on", "auto"])
def test_one_lane_or_one_slot_has_nothing_to_reduce(reduce_merge: Any) -> None:
    policy = PromptPolicy(reduce_merge=reduce_merge)
    assert reduces_before_merging(policy, PROMPT)
    assert not reduces_before_merging(policy, replace(PROMPT, cold=False))
    assert not reduces_before_merging(policy, replace(PROMPT, tokens=1, used=1))


def test_a_single_generated_token_reduces_its_lanes_where_the_base_gains_by_it() -> None:
    policy = PromptPolicy(reduce_merge="on", decode_reduce=True)
    assert reduces_before_merging(policy, DECODE)
    assert not reduces_before_merging(policy, replace(DECODE, tokens=2))
    assert not reduces_before_merging(policy, replace(DECODE, used=1))
    assert not reduces_before_merging(replace(policy, decode_reduce=False), DECODE)
    assert not reduces_before_merging(policy, replace(WARMUP, tokens=1))


def test_dense_prompts_may_have_any_length_but_one() -> None:
    policy = PromptPolicy(dense_min_tokens=0)
    assert is_dense(policy, replace(PROMPT, tokens=2))
    assert not is_dense(policy, replace(PROMPT, tokens=1))
    assert not is_dense(replace(policy, dense=False), PROMPT)


def test_a_bypass_can_be_forbidden_wanted_and_spared_short_prompts() -> None:
    cold = replace(PROMPT, hot=0)
    low = PromptPolicy(min_hot_ratio=0.5)
    assert is_bypassed(low, cold)
    assert not is_bypassed(replace(low, bypass="off"), cold)
    assert is_bypassed(PromptPolicy(bypass="on"), PROMPT)
    assert not is_bypassed(PromptPolicy(), cold)  # no ratio is below zero
    spared = replace(low, bypass_min_tokens=100)
    assert is_bypassed(spared, replace(cold, tokens=100))
    assert not is_bypassed(spared, replace(cold, tokens=99))


def test_worklists_are_by_expert_for_prompts_alone() -> None:
    assert choose_worklist_order(PromptPolicy(), Phase.PROMPT) == "expert_major"
    aligned = PromptPolicy(order="token_aligned")
    assert choose_worklist_order(aligned, Phase.PROMPT) == "token_aligned"
    for phase in (Phase.DECODE, Phase.WARMUP):
        assert choose_worklist_order(aligned, phase) == "token_major"
        assert choose_worklist_order(PromptPolicy(), phase) == "token_major"


@given(
    st.sampled_from([Phase.DECODE, Phase.WARMUP]),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(0, 64),
    st.integers(0, 3),
    st.booleans(),
)
def test_nothing_of_a_prompt_is_done_while_generating_or_warming_up(
    phase: Phase, tokens: int, used: int, hot: int, lanes: int, cold: bool
) -> None:
    batch = BatchShape(
        phase=phase, tokens=tokens, used=used, experts=64, hot=hot, lanes=lanes, cold=cold
    )
    plan = plan_batch(EVERYTHING, batch)
    assert (plan.bypassed, plan.dense, plan.reduce_merge, plan.compact_cold) == (False,) * 4
    assert plan.order == "token_major"
    single = phase is Phase.DECODE and (lanes == 1 or (lanes > 1 and tokens == 1))
    assert plan.cached is single


def test_four_tokens_of_generating_use_one_lane_and_not_several() -> None:
    policy, four = PromptPolicy(), replace(DECODE, tokens=4)
    assert plan_batch(policy, four).cached
    assert not plan_batch(policy, replace(four, lanes=2)).cached


def test_five_tokens_of_generating_are_planned_like_a_prompt() -> None:
    policy = replace(EVERYTHING, bypass="off")
    five = replace(DECODE, tokens=5, lanes=2)
    assert plan_batch(policy, five) == plan_batch(policy, replace(five, phase=Phase.PROMPT))


def test_a_plan_of_a_long_prompt_has_all_that_is_wanted() -> None:
    plan = plan_batch(PromptPolicy(reduce_merge="auto"), PROMPT)
    assert (plan.cached, plan.bypassed, plan.order) == (True, False, "expert_major")
    assert (plan.dense, plan.reduce_merge, plan.compact_cold) == (True, True, True)
    loose = plan_batch(PromptPolicy(reduce_merge="auto", compact_cold=False), PROMPT)
    assert (loose.reduce_merge, loose.compact_cold) == (True, False)


def test_a_bypassed_prompt_keeps_its_order_and_nothing_of_the_cache() -> None:
    plan = plan_batch(EVERYTHING, PROMPT)
    assert (plan.bypassed, plan.order) == (True, "expert_major")
    assert (plan.cached, plan.dense, plan.reduce_merge, plan.compact_cold) == (False,) * 4
