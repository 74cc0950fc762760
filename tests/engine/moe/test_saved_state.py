"""A cache that begins as another ended: there and back again, other sizes, hostile documents."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.profile_codecs import MAX_BYTES
from expertctl.engine.moe.warmup import (
    LayerState,
    SavedCacheState,
    capture_state,
    check_state,
    read_state,
    restore_state,
    write_state,
)
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.schema.strict_json import loads
from expertctl.schema.validation import find_problems

EXAMPLES = Path(__file__).parents[3] / "schemas" / "examples" / "moe-state"


def warm(*cached: int, experts: int = 16, capacity: int | None = None) -> LayerSlots:
    slots = LayerSlots(experts=experts, capacity=len(cached) if capacity is None else capacity)
    for slot, expert in enumerate(cached):
        slots.assign(slot=slot, expert=expert)
    return slots


def saved(slots: dict[int, LayerSlots]) -> SavedCacheState:
    data = write_state(capture_state(slots, timestamp=1.5, prompt="Hello"))
    assert find_problems(loads(data, what="ours", max_bytes=MAX_BYTES), "moe-state") == []
    return read_state(data, what="ours")


def bring(slots: LayerSlots, experts: list[int]) -> None:
    for slot, expert in zip(slots.free_slots, experts, strict=False):
        slots.assign(slot=slot, expert=expert)
    slots.check_integrity()


def test_a_restored_cache_has_the_same_experts_in_the_same_slots_and_the_same_priorities() -> None:
    before = warm(5, 9, 2)
    before.record_tokens(np.array([[5, 9], [5, 1], [1, 2]]))
    again = LayerSlots(experts=16, capacity=3)
    bring(again, restore_state(saved({4: before}), {4: again})[4])
    assert again.ids.tolist() == before.ids.tolist()
    assert again.priorities().tolist() == before.priorities().tolist()
    assert again.step == 3


def test_in_fewer_slots_whoever_was_worth_most_comes_and_in_more_the_lowest_ids() -> None:
    before = warm(5, 9, 2, 7)
    before.record_tokens(np.array([[7, 2], [7, 9], [7, 9]]))
    smaller, larger = (LayerSlots(experts=16, capacity=n) for n in (2, 6))
    state = saved({0: before})
    assert restore_state(state, {0: smaller}) == {0: [9, 7]}, "in the order of their slots"
    assert restore_state(state, {0: larger}) == {0: [5, 9, 2, 7, 0, 1]}


def test_pinned_experts_come_whatever_was_saved() -> None:
    slots = LayerSlots(experts=16, capacity=2, pinned=(11,))
    assert set(restore_state(saved({0: warm(5, 9)}), {0: slots})[0]) == {11, 5}


def test_a_layer_that_was_not_saved_begins_without_counts() -> None:
    slots = LayerSlots(experts=4, capacity=2)
    assert restore_state(saved({}), {3: slots}) == {3: [0, 1]}
    assert not slots.counts.any()


def test_a_state_of_another_base_is_refused_and_changes_nothing() -> None:
    layers = {0: LayerSlots(experts=16, capacity=2), 1: LayerSlots(experts=8, capacity=2)}
    state = saved({0: warm(5, 9), 1: warm(5, 9)})
    with pytest.raises(IncompatibleError, match="expert 9 in layer 1, where there are 8"):
        restore_state(state, layers)
    assert not layers[0].counts.any()


def test_a_state_of_a_layer_that_the_base_does_not_have_is_refused() -> None:
    state = saved({1: warm(5, 9)})
    check_state(state, [1, 3], experts=10)
    with pytest.raises(IncompatibleError, match="layer 1, which has no routed experts"):
        check_state(state, [3], experts=10)
    with pytest.raises(IncompatibleError, match="expert 9 in layer 1"):
        check_state(state, [1, 3], experts=9)


def test_a_cache_that_counts_beyond_what_json_has_is_saved_all_the_same() -> None:
    last = 2**53 - 1
    state = SavedCacheState(0.0, "", {0: LayerState((5,), {5: 1e308}, {5: last}, last)})
    slots = LayerSlots(experts=16, capacity=1)
    bring(slots, restore_state(read_state(write_state(state), what="hostile"), {0: slots})[0])
    slots.record_tokens(np.array([[5, 9]] * 3))
    found = saved({0: slots}).layers[0]
    assert (found.step, found.last_active[5]) == (last, last)
    assert found.frequency[5] == pytest.approx(1e308, rel=0.2)


def test_a_written_state_has_the_published_keys() -> None:
    document = json.loads(
        write_state(capture_state({0: warm(5, capacity=2)}, timestamp=7, prompt="P"))
    )
    assert document == {
        "version": 1,
        "capacity": 2,
        "timestamp": 7,
        "metadata": {"prompt": "P", "capacity": 2},
        "layers": {
            "0": {
                "cached_ids": [5, -1],
                "frequency": {"5": 1},
                "last_active": {"5": 0},
                "step": 0,
                "all_seen": [5],
            }
        },
    }


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(InvalidPackageError, match="version"):
        read_state(json.dumps({"version": version, "layers": {}}).encode(), what="a state")


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ({"step": 7.0}, "Expected `int`, got `float`"),
        ({"cached_ids": [3, -1, -1, 3]}, "an expert appears twice"),
        ({"last_active": {"3": 8}}, "8 is after the last step, 7"),
    ],
)
def test_a_state_that_cannot_be_is_refused(layer: dict[str, object], told: str) -> None:
    whole = {"cached_ids": [], "frequency": {}, "last_active": {}, "step": 7, **layer}
    document = {"version": 1, "layers": {"0": whole}}
    with pytest.raises(InvalidPackageError, match=told):
        read_state(json.dumps(document).encode(), what="a state")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("valid/*.json")), ids=lambda path: path.stem)
def test_a_valid_example_is_read(path: Path) -> None:
    found, told = read_state(path.read_bytes(), what=path.name), json.loads(path.read_bytes())
    assert found.prompt == told.get("metadata", {}).get("prompt", "")
    assert {str(number) for number in found.layers} == set(told["layers"])
    for number, layer in found.layers.items():
        expected = told["layers"][str(number)]
        assert [*layer.cached_ids] == expected["cached_ids"]
        assert layer.step == expected["step"]
        for ours, theirs in ((layer.frequency, "frequency"), (layer.last_active, "last_active")):
            assert {str(expert): count for expert, count in ours.items()} == expected[theirs]


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("invalid/*.json")), ids=lambda path: path.stem
)
def test_an_invalid_example_is_refused(path: Path) -> None:
    with pytest.raises(InvalidPackageError):
        read_state(path.read_bytes(), what=path.name)


@pytest.mark.parametrize("data", [b" " * (MAX_BYTES + 1), b"[]", b'{"version":1}', b"{"])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        read_state(data, what="nothing")


tokens = st.lists(st.lists(st.integers(0, 15), min_size=2, max_size=2), max_size=6)


@given(st.lists(st.permutations(range(16)), max_size=3), st.integers(0, 16), tokens)
def test_what_is_saved_is_restored(
    orders: list[list[int]], capacity: int, asked: list[list[int]]
) -> None:
    before = {number: warm(*order[:capacity]) for number, order in enumerate(orders)}
    for layer in before.values():
        layer.record_tokens(np.array(asked, int).reshape(len(asked), 2))
    again = {number: LayerSlots(experts=16, capacity=capacity) for number in before}
    for number, experts in restore_state(saved(before), again).items():
        bring(again[number], experts)
    assert capture_state(again, timestamp=0) == capture_state(before, timestamp=0)
