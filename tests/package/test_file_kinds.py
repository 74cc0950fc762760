"""What a file is, told from its first bytes; no table of tensors is taken for something else."""

import json
import pickle
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from expertctl.package.adapter_files import HEAD_BYTES, detect_other_kind

LIKE_PICKLES = st.builds(
    lambda high, protocol: high << 16 | protocol << 8 | 0x80,
    st.integers(0, 1 << 15),
    st.integers(2, 5),
)
"""Lengths whose first two bytes are those of a pickle."""


@given(st.integers(2, 4 << 20) | LIKE_PICKLES)
@example(0x10280)
def test_no_length_of_a_header_looks_like_another_kind(length: int) -> None:
    head = struct.pack("<Q", length) + b'{"__metadata__":{"format":"pt"}}'
    assert detect_other_kind(head, size=8 + length) is None


@given(st.dictionaries(st.text(max_size=8), st.integers(), max_size=4))
def test_no_json_looks_like_another_kind(document: dict[str, int]) -> None:
    data = json.dumps(document, indent=2).encode()
    assert detect_other_kind(data[:HEAD_BYTES], size=len(data)) is None


@given(
    st.sampled_from([2, 3, 4, 5]),
    st.dictionaries(st.text(max_size=8), st.lists(st.integers(), max_size=9), min_size=1),
)
def test_every_pickle_is_seen(protocol: int, value: dict[str, list[int]]) -> None:
    data = pickle.dumps(value, protocol=protocol)
    found = detect_other_kind(data[:HEAD_BYTES], size=len(data))
    assert found is not None
    assert "pickle" in found.problem


@pytest.mark.parametrize(
    "start", [b"<html>", b"<!DOCTYPE HTML>", b"\xef\xbb\xbf \r\n<!doctype html>"]
)
def test_a_page_begins_in_many_ways(start: bytes) -> None:
    found = detect_other_kind(start, size=len(start))
    assert found is not None
    assert "HTML" in found.problem
