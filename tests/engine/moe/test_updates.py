"""What is swapped between two tokens: each published rule, and properties of any window."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.swap_policy import (
    MAX_PASSES,
    MAX_SWAPS_PER_LAYER,
    RequestBuffer,
    Swap,
    SwapUpdate,
    plan_updates,
)

RULES = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())[
    "update_between_tokens"
]


def layer(*cached: int, experts: int = 16, pinned: tuple[int, ...] = ()) -> LayerSlots:
    slots = LayerSlots(experts=experts, capacity=len(cached), pinned=pinned)
    for slot, expert in enumerate(cached):
        slots.assign(slot=slot, expert=expert)
    return slots


def passes(*asked: list[list[int]]) -> RequestBuffer:
    """A buffer with passes of one token each; a pass is what each layer asked for."""
    buffer = RequestBuffer()
    for selected in asked:
        buffer.append([np.array([ids]) for ids in selected])
    return buffer


def update(slots: list[LayerSlots], buffer: RequestBuffer, *, layers: int = 48) -> SwapUpdate:
    return plan_updates(slots, buffer, layer_budget=layers)


def apply(slots: list[LayerSlots], found: SwapUpdate) -> None:
    for swap in found.swaps:
        assert slots[swap.layer].assign(slot=swap.slot, expert=swap.add) == swap.evict
    for one in slots:
        one.check_integrity()


def test_a_swap_brings_what_was_missing_for_what_is_worth_least() -> None:
    slots = [layer(3, 5, 7)]
    slots[0].record_tokens(np.array([[3], [3], [5]]))
    found = update(slots, passes([[9, 9]], [[3, 3]]))
    assert found.swaps == (Swap(layer=0, slot=2, evict=7, add=9),)
    apply(slots, found)
    assert slots[0].resident_ids == [3, 5, 9]


def test_the_pass_in_flight_is_neither_counted_nor_are_its_experts_evicted() -> None:
    assert RULES["skip_in_flight_tail"]
    slots, buffer = [layer(3, 5)], passes([[9]], [[9]], [[3]])
    found = update(slots, buffer)
    assert found.swaps == (Swap(0, slot=1, evict=5, add=9),)
    assert slots[0].step == 2
    assert slots[0].last_used[3] == 0, "nobody counted that the last token asked for it"
    apply(slots, found)
    buffer.append([np.array([[3]])])
    update(slots, buffer)
    assert slots[0].last_used[3] == slots[0].step == 3, "it is counted by the next update"


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_settled_pass_nothing_is_counted_or_swapped(count: int) -> None:
    slots = [layer(3, 5)]
    found = update(slots, passes(*[[[9]]] * count))
    assert found == SwapUpdate((), (0,), (0,))
    assert found.fallback_rate == 0
    assert slots[0].step == 0


def test_at_most_ten_are_swapped_in_a_layer_and_lower_ids_come_of_equal_worth() -> None:
    assert RULES["max_swaps_per_layer_per_call"] == MAX_SWAPS_PER_LAYER == 10
    slots = [layer(*range(20), experts=40)]
    wanted = list(range(20, 35))
    found = update(slots, passes([wanted], [wanted], [[20]]))
    assert [swap.add for swap in found.swaps] == list(range(20, 30)), "ascending ids, as published"
    assert [swap.slot for swap in found.swaps] == list(range(10)), "ascending (priority, slot)"
    apply(slots, found)


def test_where_more_is_missing_than_may_come_the_most_wanted_comes_in_ascending_order() -> None:
    slots = [layer(0, 1, experts=8)]
    found = update(slots, passes([[7, 4, 6]], [[7, 4, 5]], [[7]]))
    assert [swap.add for swap in found.swaps] == [4, 7]


def test_nobody_comes_who_is_worth_no_more_than_who_would_go() -> None:
    slots = [layer(3, 5)]
    slots[0].record_tokens(np.array([[3, 5]] * 4))
    found = update(slots, passes([[9]], [[3]]))
    assert found.swaps == ()
    assert found.misses == (1,)
    assert slots[0].counts[9] == 1, "it is counted all the same, and comes when it is asked again"


def test_who_is_likely_next_stays_and_comes_before_others() -> None:
    slots = [layer(3, 5)]
    slots[0].record_tokens(np.array([[3, 5]] * 4))
    slots[0].chances[[3, 9]] = 0.2
    found = update(slots, passes([[8, 9]], [[0]]))
    assert found.swaps == (Swap(0, slot=1, evict=5, add=9),)


def test_pinned_experts_stay_whatever_they_are_worth() -> None:
    slots = [layer(3, 5, pinned=(3,))]
    found = update(slots, passes(*[[[8, 9]]] * 4, [[0]]))
    assert found.swaps == (Swap(0, slot=1, evict=5, add=8),)


def test_empty_slots_are_taken_first() -> None:
    slots = [LayerSlots(experts=8, capacity=3)]
    slots[0].assign(slot=1, expert=0)
    found = update(slots, passes([[6, 7]], [[0]]))
    assert found.swaps == (Swap(0, slot=0, evict=None, add=6), Swap(0, slot=2, evict=None, add=7))
    apply(slots, found)


def test_only_so_many_layers_swap_those_that_gain_most_and_others_still_count() -> None:
    assert "only" in RULES["global_budget"]
    slots = [layer(0), layer(0), layer(0)]
    buffer = passes([[1, 2], [1, 2], [2, 3]], [[1, 4], [3, 4], [2, 5]], [[7], [7], [7]])
    found = update(slots, buffer, layers=2)
    assert [(swap.layer, swap.add) for swap in found.swaps] == [(0, 1), (2, 2)], "asked for twice"
    assert found.requests == (3, 4, 3)
    assert [one.step for one in slots] == [2, 2, 2]
    none = passes([[1], [1], [1]], [[0], [0], [0]])
    assert update(slots, none, layers=0).swaps == ()
    assert [one.step for one in slots] == [3, 3, 3]


def test_a_layer_that_had_to_wait_is_served_when_it_gains_most() -> None:
    slots, served = [layer(0, experts=4) for _ in range(4)], set()
    buffer = passes([[1]] * 4)
    for _ in range(8):
        buffer.append([np.array([[1]])] * 4)
        found = update(slots, buffer, layers=1)
        apply(slots, found)
        served |= {swap.layer for swap in found.swaps}
    assert served == {0, 1, 2, 3}


def test_the_fallback_rate_is_unique_misses_by_unique_requests() -> None:
    assert RULES["fallback_rate"] == "unique misses / unique requests over the window"
    slots = [layer(0, 1), layer(2, 3)]
    found = update(slots, passes([[0, 9], [2, 3]], [[0, 9], [2, 8]], [[0, 0], [0, 0]]))
    assert (found.requests, found.misses) == ((2, 3), (1, 1))
    assert found.fallback_rate == 2 / 5


def test_what_is_no_expert_is_neither_asked_for_nor_missing() -> None:
    slots = [layer(0, 1, experts=4)]
    found = update(slots, passes([[-1, 4]], [[-1, 7]]))
    assert (found.requests, found.misses, found.swaps) == ((0,), (0,), ())


def test_a_layer_without_slots_swaps_nothing() -> None:
    found = update([LayerSlots(experts=4, capacity=0)], passes([[1]], [[2]]))
    assert (found.swaps, found.misses) == ((), (1,))


def test_a_buffer_keeps_what_was_asked_for_though_the_memory_is_used_again() -> None:
    buffer, memory = RequestBuffer(), np.array([[1, 2]])
    buffer.append([memory])
    memory[:] = 7
    buffer.append([memory])
    [[kept]] = buffer.take_settled()
    assert kept.tolist() == [[1, 2]]


def test_a_buffer_that_nobody_takes_from_stays_bounded() -> None:
    buffer = passes(*[[[1]]] * (3 * MAX_PASSES))
    assert len(buffer.take_settled()) == MAX_PASSES - 1


tokens = st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=3), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.data())
def test_in_any_window_an_update_keeps_the_rules(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(0, 12))
    pinned = data.draw(st.sets(st.integers(0, capacity - 1), max_size=3)) if capacity else set()
    slots = [layer(*range(capacity), experts=12, pinned=tuple(pinned)) for _ in range(2)]
    buffer = RequestBuffer()
    for _ in range(data.draw(st.integers(2, 4))):
        settled, in_flight = data.draw(st.lists(tokens, max_size=3)), data.draw(tokens)
        for asked in [*settled, in_flight]:
            buffer.append([np.array(asked)] * 2)
        window = {
            expert for pass_ in buffer._passes for token in pass_[0].tolist() for expert in token
        }
        budget, most = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 12))
        before = [one.resident_ids for one in slots]
        found = plan_updates(slots, buffer, layer_budget=budget, swaps_per_layer=most)
        assert len({swap.layer for swap in found.swaps}) <= budget
        for number, residents in enumerate(before):
            swaps = [swap for swap in found.swaps if swap.layer == number]
            assert len(swaps) <= most
            assert [swap.add for swap in swaps] == sorted({swap.add for swap in swaps})
            assert {swap.add for swap in swaps} <= window - set(residents)
            assert not {swap.evict for swap in swaps} & (window | pinned)
        apply(slots, found)
