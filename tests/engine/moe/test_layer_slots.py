"""Which experts of a layer are resident: the published cases, and a model in plain words."""

import json
from itertools import pairwise
from math import fsum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expertctl.engine.moe.layer_slots import PREDICTION_WEIGHT, LayerSlots, compute_priority
from expertctl.errors import UsageError

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())


def filled(experts: int, cached: list[int], *, pinned: tuple[int, ...] = ()) -> LayerSlots:
    """Slots that hold these experts, in this order."""
    slots = LayerSlots(experts=experts, capacity=len(cached), pinned=pinned)
    for slot, expert in enumerate(cached):
        assert slots.assign(slot=slot, expert=expert) is None
    slots.check_integrity()
    return slots


def asked(*tokens: list[int]) -> np.ndarray:
    return np.array(tokens)


@pytest.mark.parametrize("case", CASES["lcp_priority"]["cases"])
def test_a_priority_is_what_the_published_formula_says(case: dict[str, float]) -> None:
    [worth] = compute_priority(np.array([case["count"]], float), np.array([case["age"]]))
    assert worth == case["priority"]


def test_the_published_least_worthy_goes_before_another_comes() -> None:
    case = CASES["eviction"][0]
    slots = filled(8, [int(expert) for expert in case["residents"]])
    slots.step = case["step"]
    for expert, (count, last_used) in case["residents"].items():
        slots.counts[int(expert)], slots.last_used[int(expert)] = count, last_used
    [slot, *_] = slots.rank_evictable([case["insert"]])
    assert slots.assign(slot=slot, expert=case["insert"]) == case["evicted"]
    assert len(slots.resident_ids) == case["capacity"]
    slots.check_integrity()


def test_a_lookup_leads_to_the_published_slots_and_never_from_an_absent_expert_to_a_real_one() -> (
    None
):
    case = CASES["lookup"][0]
    slots = filled(case["n_experts"], case["cached"])
    there = {int(expert): slot for expert, slot in case["slots"].items()}
    dummy = len(case["cached"])
    assert slots.lookup.tolist() == [there.get(expert, dummy) for expert in range(16)]
    assert slots.lookup.dtype == np.int32


def test_a_hit_mask_is_as_published() -> None:
    case = CASES["lookup"][1]
    slots = filled(case["n_experts"], case["cached"])
    assert slots.hit_mask.tolist() == case["hit_mask"]
    assert slots.hit_mask.dtype == np.float32


def test_an_exchange_changes_lookup_and_hit_mask_as_published() -> None:
    case, after = CASES["lookup"][2]["replace"], CASES["lookup"][2]["after"]
    slots = filled(8, [1, case["old"], 6])
    assert slots.assign(slot=case["slot"], expert=case["new"]) == case["old"]
    assert slots.lookup[case["new"]] == after["slot_of_7"]
    assert slots.hit_mask[case["old"]] == after["hit_3"]
    assert slots.hit_mask[case["new"]] == after["hit_7"]
    assert slots.lookup[case["old"]] == 3, "the dummy behind the last slot"
    slots.check_integrity()


def test_every_token_that_asks_is_counted_not_every_window() -> None:
    slots = LayerSlots(experts=4, capacity=2)
    slots.record_tokens(asked([0, 1], [0, 2], [0, 1]))
    left = [0.25 ** (since / 48) for since in range(3)]
    assert slots.counts == pytest.approx([sum(left), left[0] + left[2], 1, 0])
    assert slots.last_used.tolist() == [3, 3, 2, 0]
    assert slots.step == 3


@pytest.mark.parametrize("different", [False, True])
def test_tokens_count_the_same_one_by_one_and_together(different: bool) -> None:
    drawn = np.random.default_rng(0)
    selected = drawn.integers(0, 16, (3000, 4))
    selected[100:2500] %= 4
    if different:  # as the choices of a router are
        selected = drawn.random((3000, 16)).argsort()[:, :4]
    together, apart = (LayerSlots(experts=16, capacity=4) for _ in range(2))
    together.record_tokens(selected)
    for token in selected:
        apart.record_tokens(token[None])
    assert together.counts == pytest.approx(apart.counts, rel=1e-9)
    assert together.last_used.tolist() == apart.last_used.tolist()
    assert together.step == apart.step == 3000


def test_what_is_no_expert_is_not_counted() -> None:
    slots = LayerSlots(experts=4, capacity=2)
    slots.record_tokens(asked([-1, 2], [4, -7]))
    assert np.flatnonzero(slots.counts).tolist() == [2]
    assert slots.step == 2
    slots.record_tokens(np.empty((3, 0), int))
    slots.record_tokens(np.empty((0, 2), int))
    assert slots.step == 5


def test_of_equal_worth_the_lower_slot_goes_first() -> None:
    assert filled(8, [6, 2, 4]).rank_evictable() == [0, 1, 2]


def test_neither_pinned_nor_requested_experts_may_go() -> None:
    slots = filled(8, [6, 2, 4], pinned=(2,))
    assert slots.rank_evictable([4]) == [0]
    assert slots.rank_evictable([4, 6]) == [], "where all are protected nobody goes"
    with pytest.raises(ValueError, match="pinned"):
        slots.assign(slot=1, expert=0)
    slots.check_integrity()


def test_counts_outlive_residence() -> None:
    slots = filled(4, [0, 1])
    slots.record_tokens(asked([0], [0], [2]))
    slots.assign(slot=0, expert=2)
    slots.assign(slot=1, expert=0)
    assert slots.counts[0] > 1.9
    assert slots.resident_ids == [2, 0]


def test_an_expert_that_nobody_asked_for_counts_once_from_when_it_comes() -> None:
    slots = LayerSlots(experts=4, capacity=2)
    slots.record_tokens(asked([0], [0]))
    slots.assign(slot=0, expert=3)
    assert slots.priorities()[3] == 1


def test_an_expert_that_is_there_gets_no_second_slot() -> None:
    slots = filled(4, [0, 1])
    with pytest.raises(ValueError, match="in slot 1 already"):
        slots.assign(slot=0, expert=1)
    slots.check_integrity()


@pytest.mark.parametrize(("slot", "expert"), [(-1, 3), (2, 3), (0, -1), (0, 4)])
def test_neither_the_dummy_nor_what_is_not_there_can_be_exchanged(slot: int, expert: int) -> None:
    slots = filled(4, [0, 1])
    with pytest.raises(ValueError, match="is not in 0 to"):
        slots.assign(slot=slot, expert=expert)
    slots.check_integrity()
    assert slots.resident_ids == [0, 1]


def test_empty_slots_are_for_pinned_experts_then_for_those_ranked_then_for_the_lowest() -> None:
    slots = LayerSlots(experts=8, capacity=5, pinned=(6,))
    assert slots.choose_initial_experts([3, 6, 2]) == [6, 3, 2, 0, 1]
    slots.assign(slot=1, expert=3)
    assert slots.free_slots == [0, 2, 3, 4]
    assert slots.choose_initial_experts([3, 2]) == [6, 2, 0, 1]


def test_a_slot_can_be_given_up() -> None:
    slots = filled(4, [2, 0])
    assert slots.clear(slot=0) == 2
    assert slots.clear(slot=0) is None
    assert slots.free_slots == [0]
    assert slots.rank_evictable() == [1]
    slots.check_integrity()


def test_a_layer_without_slots_has_only_the_dummy() -> None:
    slots = LayerSlots(experts=4, capacity=0)
    slots.record_tokens(asked([1, 2]))
    assert slots.lookup.tolist() == [0, 0, 0, 0]
    assert not slots.hit_mask.any()
    assert slots.rank_evictable() == slots.choose_initial_experts() == slots.free_slots == []
    slots.check_integrity()


def test_a_layer_with_a_slot_for_each_expert_misses_none() -> None:
    slots = filled(4, [0, 1, 2, 3])
    slots.record_tokens(asked([1, 2]))
    assert slots.hit_mask.all()
    assert slots.choose_initial_experts() == []
    slots.check_integrity()


def test_more_pins_than_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="3 routed experts of a layer are pinned, but it has only"):
        LayerSlots(experts=8, capacity=2, pinned=(1, 2, 3))


@pytest.mark.parametrize(
    ("capacity", "pinned"), [(-1, ()), (9, ()), (2, (8,)), (2, (-1,))], ids=str
)
def test_numbers_that_cannot_be_are_refused(capacity: int, pinned: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"slots for 8 experts|not in 0 to 7"):
        LayerSlots(experts=8, capacity=capacity, pinned=pinned)


def test_who_is_likely_next_counts_three_times_what_that_comes_to_in_time() -> None:
    slots = filled(4, [0, 1])
    slots.record_tokens(asked(*[[0]] * 2000))
    assert 3 * slots.counts[0] == pytest.approx(PREDICTION_WEIGHT)
    assert (slots.worths() == slots.priorities()).all(), "nothing is known of the next token"
    slots.chances[1] = 0.4
    assert slots.worths()[1] == pytest.approx(slots.priorities()[1] + 0.4 * PREDICTION_WEIGHT)
    assert slots.rank_evictable() == [0, 1]


class Slots(RuleBasedStateMachine):
    """Beside the slots a dictionary, and every activation there ever was."""

    @initialize(
        experts=st.integers(1, 9),
        share=st.floats(0, 1),
        pins=st.sets(st.integers(0, 8), max_size=3),
    )
    def begin(self, experts: int, share: float, pins: set[int]) -> None:
        capacity = round(share * experts)
        self.pinned = set(sorted(pin for pin in pins if pin < experts)[:capacity])
        self.slots = LayerSlots(experts=experts, capacity=capacity, pinned=self.pinned)
        self.there: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {expert: [] for expert in range(experts)}
        self.now = 0

    @rule(tokens=st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2), max_size=5))
    def note(self, tokens: list[list[int]]) -> None:
        self.slots.record_tokens(np.array(tokens, int).reshape(len(tokens), 2))
        for token in tokens:
            self.now += 1
            for expert in token:
                if expert in self.uses:
                    self.uses[expert].append(self.now)

    @precondition(lambda self: self.slots.choose_initial_experts())
    @rule()
    def fill(self) -> None:
        for expert in self.slots.choose_initial_experts():
            [slot, *_] = self.slots.free_slots
            assert self.slots.assign(slot=slot, expert=expert) is None
            self.bring(slot, expert)

    @rule(wanted=st.integers(0, 8), requested=st.sets(st.integers(0, 8), max_size=3))
    def want(self, wanted: int, requested: set[int]) -> None:
        requested = {expert for expert in requested | {wanted} if expert in self.uses}
        going = self.slots.rank_evictable(requested)
        able = {
            slot: expert
            for slot, expert in self.there.items()
            if expert not in requested | self.pinned
        }
        assert set(going) == set(able)
        worths = [self.worth(able[slot]) for slot in going]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(worths))
        if going and wanted in self.uses and wanted not in self.there.values():
            assert self.slots.assign(slot=going[0], expert=wanted) == able[going[0]]
            self.bring(going[0], wanted)

    @precondition(lambda self: self.slots.rank_evictable())
    @rule()
    def give_up(self) -> None:
        [slot, *_] = self.slots.rank_evictable()
        assert self.slots.clear(slot=slot) == self.there.pop(slot)

    def bring(self, slot: int, expert: int) -> None:
        self.there[slot] = expert
        if not self.uses[expert]:
            self.uses[expert].append(self.now)

    def worth(self, expert: int) -> float:
        uses = self.uses[expert]
        count = fsum(0.25 ** ((uses[-1] - use) / 48) for use in uses)
        return float(count * 0.25 ** ((self.now - uses[-1]) / 128))

    @invariant()
    def slots_are_as_the_dictionary_says(self) -> None:
        if not hasattr(self, "there"):
            return
        slots = self.slots
        slots.check_integrity()
        assert slots.resident_ids == [self.there[slot] for slot in sorted(self.there)]
        assert len(self.there) <= slots.capacity
        worths = [self.worth(e) if uses else 0 for e, uses in self.uses.items()]
        assert slots.priorities() == pytest.approx(worths)


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSlots = Slots.TestCase


def test_pins_change_while_residents_stay() -> None:
    slots = LayerSlots(experts=6, capacity=2, pinned=[1])
    slots.assign(slot=0, expert=1)
    slots.pin([4])
    assert (slots.resident_ids, set(slots.pinned)) == ([1], {4})
    assert slots.clear(slot=0) == 1
    for wrong, error in (([0, 1, 2], UsageError), ([6], ValueError)):
        with pytest.raises(error):
            slots.pin(wrong)
    assert slots.pinned == {4}
