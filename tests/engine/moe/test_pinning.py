"""Who comes where pins change: the absent ones, for whoever is worth least."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.swap_policy import Swap, plan_pin_swaps


def layer(*residents: int, experts: int = 8, capacity: int = 4) -> LayerSlots:
    slots = LayerSlots(experts=experts, capacity=capacity)
    for slot, expert in enumerate(residents):
        slots.assign(slot=slot, expert=expert)
    return slots


def test_whoever_is_resident_stays_where_he_is() -> None:
    slots = layer(5, 1, 2, 3)
    slots.pin([2, 5])
    assert plan_pin_swaps([slots]) == []
    slots.pin([])
    assert plan_pin_swaps([slots]) == []


def test_free_slots_are_taken_first_then_those_of_whom_is_worth_least() -> None:
    slots = layer(0, 1, 2)
    slots.record_tokens(np.array([[0, 2], [0, 2]]))
    slots.pin([6, 7])
    assert plan_pin_swaps([layer(0, 1, 2, 3), slots]) == [Swap(1, 3, None, 6), Swap(1, 1, 1, 7)]


@given(
    residents=st.sets(st.integers(0, 7), max_size=4), pinned=st.sets(st.integers(0, 7), max_size=4)
)
def test_all_who_are_pinned_are_resident_then_and_nobody_goes_who_is(
    residents: set[int], pinned: set[int]
) -> None:
    slots = layer(*residents)
    slots.pin(pinned)
    for swap in plan_pin_swaps([slots]):
        assert slots.assign(slot=swap.slot, expert=swap.add) == swap.evict
    slots.check_integrity()
    assert pinned <= set(slots.resident_ids)
    assert pinned & residents <= set(slots.resident_ids)
