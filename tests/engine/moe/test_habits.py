"""What is kept of a base: three lines, each as its own document, or nothing that is believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.digest import Digest
from expertctl.engine.moe.activity_document import ActivityDocument, LayerActivity
from expertctl.engine.moe.habits import Habits, read_habits, write_habits
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.errors import InvalidPackageError

BASE = Digest.of(b"a base")
COUNTED = ActivityDocument(
    "update", (LayerActivity(1, calls=4, hot={3: 5}, cold={0: 2}, cold_per_call=0.5),), 8, 2
)


def slots(*cached: int) -> LayerSlots:
    found = LayerSlots(experts=8, capacity=4)
    for slot, expert in enumerate(cached):
        found.exchange(slot=slot, expert=expert)
    found.note(np.array([list(cached[:2])]))
    return found


def habits() -> Habits:
    return Habits(BASE).grown(COUNTED, {1: slots(3, 5)}, timestamp=12.5)


def test_what_is_written_is_read() -> None:
    found = read_habits(write_habits(habits()), what="ours")
    assert found == habits()
    assert found.state is not None
    assert found.state.layers[1].cached_ids == (3, 5, -1, -1)
    assert found.state.prompt == "", "no word of a text is kept"
    assert read_habits(write_habits(Habits(BASE)), what="ours").state is None


def test_they_grow_and_the_last_state_counts() -> None:
    twice = habits().grown(COUNTED, {1: slots(6, 7)}, timestamp=13)
    assert twice.activity.layers[0].hits == {0: 4, 3: 10}
    assert twice.state is not None
    assert twice.state.layers[1].cached_ids == (6, 7, -1, -1)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b'"version": 1', b'"version": 2', "version 2 is not read"),
        (b'"version": 1', b'"version": true', "Expected `int`"),
        (b'"base": "sha256:', b'"base": "md5:', "is not a digest"),
        (b'"base"', b'"bases"', "unknown field"),
        (b"\n", b"\n\n", "not 3 lines"),
        (b"opt_perf.v1", b"opt_perf.v2", "schema"),
        (b'"version":1', b'"version":3', "version"),
        (b"[[3,5]]", b"[[3,-5]]", "-5"),
        (b"[[3,5]]", b"[[9,5]]", "expert 9 of only 8"),
    ],
)
def test_what_is_damaged_is_refused(old: bytes, new: bytes, told: str) -> None:
    data = write_habits(habits())
    assert old in data
    with pytest.raises(InvalidPackageError, match=told):
        read_habits(data.replace(old, new), what="damaged")


@given(st.binary(max_size=200) | st.lists(st.sampled_from([b"{}", b"\n", b"[]"])).map(b"".join))
def test_what_are_no_habits_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        read_habits(data, what="nothing")


@given(st.data())
def test_habits_cut_anywhere_are_refused(data: st.DataObject) -> None:
    whole = write_habits(habits())
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(InvalidPackageError):
        read_habits(whole[:cut], what="cut")
