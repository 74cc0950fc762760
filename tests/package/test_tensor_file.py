"""safetensors headers: the library as oracle for good ones, and what must be refused."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from expertctl.errors import InvalidPackageError
from expertctl.package.tensor_file import (
    ADAPTER_LIMITS,
    HeaderLimits,
    TensorTable,
    parse_header,
    read_header,
    read_table,
)
from tests.package.forged_packages import make_safetensors, make_tensor_file

NAMES = st.from_regex(r"[a-zA-Z0-9_]{1,8}(\.[a-zA-Z0-9_]{1,8}){0,3}", fullmatch=True)
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def parse(data: bytes, limits: HeaderLimits = ADAPTER_LIMITS) -> TensorTable:
    return parse_header(data, file_size=len(data), what="x", limits=limits)


def refused(data: bytes) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        parse(data)
    return caught.value.message


@given(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_files_of_the_library_are_read_as_it_reads_them(shapes: dict[str, tuple[int, ...]]) -> None:
    arrays = {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(shapes.items())}
    data = save(arrays)
    found = parse(data)
    for name, fields in deserialize(data):
        tensor = found.tensors[name]
        assert list(tensor.shape) == fields["shape"]
        begin, end = found.data_offset + tensor.begin, found.data_offset + tensor.end
        assert data[begin:end] == bytes(fields["data"])
    assert set(found.tensors) == set(arrays)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=200)
def test_random_headers_are_refused(text: bytes) -> None:
    refused(make_safetensors(text))


@given(st.integers(0, 300), st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_what_we_accept_after_a_flipped_byte_the_library_accepts_too(at: int, by: int) -> None:
    data = bytearray(save({"a.b": np.zeros(3, np.float32), "a.c": np.zeros((2, 2), np.float16)}))
    data[at % len(data)] ^= by
    try:
        found = parse(bytes(data))
    except InvalidPackageError:
        return
    theirs = {name: fields for name, fields in deserialize(bytes(data))}
    assert {name: list(tensor.shape) for name, tensor in found.tensors.items()} == {
        name: fields["shape"] for name, fields in theirs.items()
    }
    for name, tensor in found.tensors.items():
        begin, end = found.data_offset + tensor.begin, found.data_offset + tensor.end
        assert (tensor.dtype, data[begin:end]) == (theirs[name]["dtype"], theirs[name]["data"])


DEEP = b'{"a":' * 40 + b"1" + b"}" * 40


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="an empty file"),
        pytest.param(b"1234567", id="seven bytes"),
        pytest.param(b"\xff" * 8, id="length 2^64-1"),
        pytest.param((100_000_001).to_bytes(8, "little") + b"{}", id="length above 100 MB"),
        pytest.param((50).to_bytes(8, "little") + b"{}", id="length beyond the file"),
        pytest.param(make_safetensors(b'{"\xff":1}'), id="not UTF-8"),
        pytest.param(make_safetensors(b"not json"), id="not JSON"),
        pytest.param(make_safetensors(b"[]"), id="an array"),
        pytest.param(make_safetensors(b"{}"), id="an empty table"),
        pytest.param(make_safetensors(b"{}\0"), id="a trailing NUL"),
        pytest.param(make_safetensors(DEEP), id="deep nesting"),
        pytest.param(make_safetensors(b'{"\\ud800":1}'), id="a lone surrogate"),
        pytest.param(
            make_safetensors(b" " + json.dumps({"a": GOOD}).encode(), bytes(8)), id="space"
        ),
        pytest.param(
            make_safetensors(json.dumps({"a": GOOD}).encode() + b"\n", bytes(8)), id="newline"
        ),
        pytest.param(b"\x80\x04\x95" + bytes(20), id="a pickle"),
        pytest.param(b"PK\x03\x04" + bytes(60), id="a zip, as .pt and .npz and .keras are"),
        pytest.param(b"GGUF\x03\0\0\0" + bytes(60), id="GGUF"),
        pytest.param(b"\x93NUMPY\x01\0" + bytes(60), id="npy"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(data: bytes) -> None:
    refused(data)


def entry(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


@pytest.mark.parametrize(
    ("entries", "size", "message"),
    [
        pytest.param({"a": entry(data_offsets=[4, 12])}, 12, "begins at 4", id="hole at start"),
        pytest.param(
            {"a": entry(), "b": entry(data_offsets=[12, 20])}, 20, "begins at 12", id="hole"
        ),
        pytest.param(
            {"a": entry(), "b": entry(data_offsets=[4, 12])}, 12, "begins at 4", id="overlap"
        ),
        pytest.param({"a": entry(), "b": entry()}, 8, "begins at 0", id="the same bytes twice"),
        pytest.param({"a": entry()}, 9, "the file holds 9", id="trailing bytes"),
        pytest.param({"a": entry()}, 7, "the file holds 7", id="missing bytes"),
        pytest.param({"a": entry(data_offsets=[8, 0])}, 8, "8 to 0", id="begin after end"),
        pytest.param({"a": entry(data_offsets=[-8, 0])}, 8, "offsets", id="negative"),
        pytest.param({"a": entry(data_offsets=[0.0, 8.0])}, 8, "offsets", id="floats"),
        pytest.param({"a": entry(data_offsets=[0, 8, 9])}, 8, "offsets", id="three offsets"),
        pytest.param({"a": entry(data_offsets=[False, 8])}, 8, "offsets", id="false"),
        pytest.param({"a": entry(data_offsets={"0": 8})}, 8, "offsets", id="offsets object"),
        pytest.param({"a": entry(shape=[3])}, 8, "not 12 bytes", id="shape and bytes"),
        pytest.param({"a": entry(shape=[2**31, 2**31])}, 8, "bytes", id="shape overflow"),
        pytest.param(
            {"a": entry(shape=[0, 2**52], data_offsets=[0, 0])}, 0, "empty tensors", id="zero"
        ),
        pytest.param({"a": entry(shape=[-2])}, 8, "shape", id="negative dimension"),
        pytest.param({"a": entry(shape=[2.0])}, 8, "shape", id="float dimension"),
        pytest.param({"a": entry(shape=[True, 2])}, 8, "shape", id="true dimension"),
        pytest.param({"a": entry(shape=[1] * 9 + [2])}, 8, "shape", id="ten dimensions"),
        pytest.param({"a": entry(shape="2")}, 8, "shape", id="text shape"),
        pytest.param({"a": entry(dtype="F32 ")}, 8, "dtype", id="unknown dtype"),
        pytest.param({"a": entry(dtype="F4", shape=[16])}, 8, "dtype", id="FP4"),
        pytest.param({"a": entry(dtype="F6_E2M3", shape=[4])}, 3, "dtype", id="FP6"),
        pytest.param({"a": entry(dtype=["F32"])}, 8, "dtype", id="dtype list"),
        pytest.param({"a": entry(extra=1)}, 8, "not exactly", id="unknown field"),
        pytest.param({"a": {"dtype": "F32", "shape": [2]}}, 8, "not exactly", id="no offsets"),
        pytest.param({"a": [1]}, 8, "not exactly", id="entry that is a list"),
        pytest.param({"": entry()}, 8, "tensor name", id="empty name"),
        pytest.param({"../../etc/x": entry()}, 8, "tensor name", id="path"),
        pytest.param({"a b": entry()}, 8, "tensor name", id="space"),
        pytest.param({"a..b": entry()}, 8, "tensor name", id="empty part"),
        pytest.param({"a" * 513: entry()}, 8, "tensor name", id="long name"),
        pytest.param({"a\u202eb": entry()}, 8, "tensor name", id="direction override"),
        pytest.param({"__metadata__": {"a": 1}, "a": entry()}, 8, "not text", id="number metadata"),
        pytest.param({"__metadata__": [], "a": entry()}, 8, "not an object", id="list metadata"),
        pytest.param({"__metadata__": {"format": "pt"}}, 0, "no tensor", id="metadata alone"),
    ],
)
def test_a_table_that_could_be_misread_is_refused(
    entries: dict[str, Any], size: int, message: str
) -> None:
    assert message in refused(make_tensor_file(entries, bytes(size)))


def test_a_duplicate_key_is_refused_even_with_the_same_value() -> None:
    one = json.dumps(GOOD)
    text = f'{{"a":{one},"a":{one}}}'.encode()
    assert deserialize(make_safetensors(text, bytes(8)))
    assert "duplicate key 'a'" in refused(make_safetensors(text, bytes(8)))


def test_a_pickle_in_the_metadata_stays_text() -> None:
    data = make_tensor_file({"__metadata__": {"x": "\x80\x04\x95"}, "a": GOOD}, bytes(8))
    assert list(parse(data).tensors) == ["a"]


def test_ten_million_tensors_cost_no_more_than_the_limit() -> None:
    with pytest.raises(InvalidPackageError, match="at most 10 allowed"):
        parse(make_tensor_file({"a": GOOD}, bytes(8)), HeaderLimits(header_bytes=10, tensors=5))
    many = {f"t{i}": entry(data_offsets=[8 * i, 8 * i + 8]) for i in range(7)}
    with pytest.raises(InvalidPackageError, match="7 tensors, at most 5 allowed"):
        parse(make_tensor_file(many, bytes(56)), HeaderLimits(header_bytes=1000, tensors=5))


def test_every_problem_of_a_table_is_named() -> None:
    message = refused(
        make_tensor_file({"a": entry(shape=[3]), "b": entry(dtype="X"), "c/d": entry()})
    )
    assert all(text in message for text in ("3 problems", "a: ", "b: ", "'c/d'"))


def test_many_problems_are_cut_short() -> None:
    message = refused(make_tensor_file({f"t{i}": entry(dtype="X") for i in range(50)}))
    assert "and 30 more" in message


def test_a_huge_type_is_not_repeated_in_the_message() -> None:
    assert len(refused(make_tensor_file({"a": entry(dtype="F" * 100_000)}, bytes(8)))) < 200


def test_a_header_cut_short_is_refused() -> None:
    data = make_tensor_file({"a": GOOD}, bytes(8))
    with pytest.raises(InvalidPackageError, match="cut short"):
        parse_header(data[:20], file_size=len(data), what="x")


def test_a_stream_and_a_file_give_the_same_table(tmp_path: Path) -> None:
    data = make_tensor_file({"a": GOOD}, bytes(8))
    (tmp_path / "x.safetensors").write_bytes(data)
    from_file = read_table(tmp_path / "x.safetensors")
    assert from_file == parse(data)
    assert from_file == read_header(io.BytesIO(data), file_size=len(data), what="x")


def test_the_library_refuses_what_its_own_rules_forbid_and_so_do_we() -> None:
    data = make_tensor_file({"a": entry(data_offsets=[4, 12])}, bytes(12))
    with pytest.raises(SafetensorError):
        deserialize(data)
    refused(data)
