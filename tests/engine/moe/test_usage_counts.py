"""What is kept of a base: three lines, each as its own document, or nothing that is believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.usage_profile import LayerUsage, UsageProfile
from expertctl.engine.moe.usage_store import LearntUsage, encode_learnt_usage, parse_learnt_usage
from expertctl.errors import InvalidPackageError
from expertctl.reference import Digest

BASE = Digest.compute(b"a base")
COUNTED = UsageProfile(
    "update", (LayerUsage(1, calls=4, hot={3: 5}, cold={0: 2}, cold_per_call=0.5),), 8, 2
)


def slots(*cached: int) -> LayerSlots:
    found = LayerSlots(experts=8, capacity=4)
    for slot, expert in enumerate(cached):
        found.assign(slot=slot, expert=expert)
    found.record_tokens(np.array([list(cached[:2])]))
    return found


def make_learnt_usage() -> LearntUsage:
    return LearntUsage(BASE).add_profile(COUNTED, {1: slots(3, 5)}, timestamp=12.5)


def test_what_is_written_is_read() -> None:
    found = parse_learnt_usage(encode_learnt_usage(make_learnt_usage()), what="ours")
    assert found == make_learnt_usage()
    assert found.state is not None
    assert found.state.layers[1].cached_ids == (3, 5, -1, -1)
    assert found.state.prompt == "", "no word of a text is kept"
    assert parse_learnt_usage(encode_learnt_usage(LearntUsage(BASE)), what="ours").state is None


def test_they_grow_and_the_last_state_counts() -> None:
    twice = make_learnt_usage().add_profile(COUNTED, {1: slots(6, 7)}, timestamp=13)
    assert twice.profile.layers[0].hits == {0: 4, 3: 10}
    assert twice.state is not None
    assert twice.state.layers[1].cached_ids == (6, 7, -1, -1)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b'"version": 1', b'"version": 2', "version 2 is not supported"),
        (b'"version": 1', b'"version": true', "Expected `int`"),
        (b'"base": "sha256:', b'"base": "md5:', "is not a digest"),
        (b'"base"', b'"bases"', "unknown field"),
        (b"\n", b"\n\n", "expected 3 lines"),
        (b"opt_perf.v1", b"opt_perf.v2", "schema"),
        (b'"version":1', b'"version":3', "version"),
        (b"[[3,5]]", b"[[3,-5]]", "-5"),
        (b"[[3,5]]", b"[[9,5]]", "expert 9 of only 8"),
    ],
)
def test_what_is_damaged_is_refused(old: bytes, new: bytes, told: str) -> None:
    data = encode_learnt_usage(make_learnt_usage())
    assert old in data
    with pytest.raises(InvalidPackageError, match=told):
        parse_learnt_usage(data.replace(old, new), what="damaged")


@given(st.binary(max_size=200) | st.lists(st.sampled_from([b"{}", b"\n", b"[]"])).map(b"".join))
def test_what_is_no_learnt_usage_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_learnt_usage(data, what="nothing")


@given(st.data())
def test_learnt_usage_cut_anywhere_is_refused(data: st.DataObject) -> None:
    whole = encode_learnt_usage(make_learnt_usage())
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(InvalidPackageError):
        parse_learnt_usage(whole[:cut], what="cut")
