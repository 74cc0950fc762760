"""Strict JSON: what two readers could understand differently is refused (RFC 7493)."""

import gc
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import MAX_DEPTH, encode_canonical, load_object, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'\xef\xbb\xbf{"a": 1}', "strict JSON"),
        (b'"\xff"', "not UTF-8"),
        (b"[NaN]", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[1e999]", "too large"),
        (b"[9007199254740992]", "2\\^53"),
        (b"[" + b"9" * 10_000 + b"]", "2\\^53"),
        (b"[" * 100 + b"]" * 100, f"deeper than {MAX_DEPTH}"),
        (b"[" * 100_000, "strict JSON"),
        (rb'"\ud800"', "lone surrogate"),
        (rb'{"\udfff": 1}', "lone surrogate"),
        (b'{"a": 1} x', "strict JSON"),
        (b"", "strict JSON"),
        (b"{'a': 1}", "strict JSON"),
    ],
)
def test_ambiguous_json_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidPackageError, match=reason):
        loads(data, what="it", max_bytes=1 << 20)


def test_a_document_beyond_its_bound_is_refused_unread() -> None:
    with pytest.raises(InvalidPackageError, match="at most 10 allowed"):
        loads(b"[" + b" " * 20 + b"]", what="it", max_bytes=10)


def test_a_duplicate_among_very_many_keys_is_found_at_once() -> None:
    keys = ",".join(f'"{number}":0' for number in range(100_000))
    with pytest.raises(InvalidPackageError, match="duplicate key '99999'"):
        loads(f'{{{keys},"99999":0}}'.encode(), what="it", max_bytes=4 << 20)


def test_a_huge_key_is_not_repeated_in_the_message() -> None:
    key = b'"' + b"k" * 100_000 + b'":0'
    with pytest.raises(InvalidPackageError) as caught:
        loads(b"{" + key + b"," + key + b"}", what="it", max_bytes=1 << 20)
    assert len(caught.value.message) < 200


def test_an_array_is_not_an_object() -> None:
    with pytest.raises(InvalidPackageError, match="not a JSON object"):
        load_object(b"[]", what="it", max_bytes=10)


@given(VALUES)
def test_what_the_standard_library_writes_is_read_back(value: object) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        data.decode()
    except UnicodeDecodeError:
        with pytest.raises(InvalidPackageError):
            loads(data, what="it", max_bytes=1 << 20)
        return
    assert loads(data, what="it", max_bytes=1 << 20) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_document_or_an_error_of_ours(data: bytes) -> None:
    try:
        value = loads(data, what="it", max_bytes=100)
    except InvalidPackageError:
        return
    assert json.loads(data) == value


def test_canonical_bytes_are_those_of_rfc_8785() -> None:
    # RFC 8785 section 3.2.3: keys sort by UTF-16 code units.
    document = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\xf6": 7}
    expected = '{"\\r":2,"1":4,"\x80":6,"\xf6":7,"\u20ac":1,"\U0001f600":5,"\ufb33":3}'
    assert encode_canonical(document) == expected.encode()


@pytest.mark.parametrize("end", [b"]", b",NaN]"])
def test_no_garbage_is_searched_while_a_large_document_is_read(end: bytes) -> None:
    """Each search would go through all that was read until then."""
    searched: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        searched.append(f"{phase} {info['generation']}")

    data = b"[" + b"[]," * 200_000 + b"[]" + end
    gc.callbacks.append(note)
    try:
        with suppress(InvalidPackageError):
            loads(data, what="large", max_bytes=len(data))
    finally:
        gc.callbacks.remove(note)
    assert len(searched) <= 4, "what came before, and what was read, once"
    assert gc.isenabled()


def test_whoever_searches_for_no_garbage_does_not_do_so_after_a_large_document() -> None:
    gc.disable()
    try:
        loads(b"[" + b"[]," * 40_000 + b"[]]", what="large", max_bytes=1 << 20)
        assert not gc.isenabled()
    finally:
        gc.enable()
