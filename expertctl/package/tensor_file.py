"""Reading safetensors headers, stricter than the format's own library.

A header that two readers could understand differently is refused: leading white space, duplicate
keys, unknown fields, gaps, overlaps, unusual names. Layout: u64 length, JSON header, tensor bytes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

LENGTH_BYTES = 8
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Sizes of the supported dtypes in bytes; dtypes of 4 or 6 bits are refused by name."""

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_MAX_NAME = 512
_MAX_DIMENSIONS = 8
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """The limits of a header."""

    header_bytes: int
    tensors: int


ADAPTER_LIMITS = HeaderLimits(header_bytes=4 << 20, tensors=200_000)
BASE_LIMITS = HeaderLimits(header_bytes=32 << 20, tensors=1_000_000)


class TensorInfo(NamedTuple):
    """One tensor; ``begin`` and ``end`` are offsets from the first byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Every tensor of a file, by name, in file order; their bytes begin at ``data_offset``."""

    tensors: Mapping[str, TensorInfo]
    data_offset: int
    file_size: int


def parse_header_length(
    first: bytes | bytearray, *, file_size: int, what: str, limits: HeaderLimits
) -> int:
    """Return the length of the JSON header that follows the first eight bytes.

    Raises:
        InvalidPackageError: for a length that exceeds the limits or the file.
    """
    if len(first) < LENGTH_BYTES:
        raise InvalidPackageError(what, [f"{file_size} bytes are too few for a safetensors file"])
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > limits.header_bytes:
        raise InvalidPackageError(
            what, [f"a safetensors header of {length} bytes, at most {limits.header_bytes} allowed"]
        )
    if length > file_size - LENGTH_BYTES:
        raise InvalidPackageError(
            what, [f"a safetensors header of {length} bytes in a file of {file_size}"]
        )
    return length


def parse_header(
    start: bytes | bytearray, *, file_size: int, what: str, limits: HeaderLimits = ADAPTER_LIMITS
) -> TensorTable:
    """Parse the header at the start of a file, which may be followed by more bytes.

    Raises:
        InvalidPackageError: with every problem of the header.
    """
    length = parse_header_length(start, file_size=file_size, what=what, limits=limits)
    text = bytes(start[LENGTH_BYTES : LENGTH_BYTES + length])
    if len(text) < length:
        raise InvalidPackageError(what, ["the safetensors header is cut short"])
    if not (text.startswith(b"{") and text.rstrip(b" ").endswith(b"}")):
        raise InvalidPackageError(what, ["the safetensors header is not a bare JSON object"])
    document = load_object(text, what=f"{what} header", max_bytes=limits.header_bytes)
    if len(document) > limits.tensors + 1:
        problem = f"{len(document)} tensors, at most {limits.tensors} allowed"
        raise InvalidPackageError(what, [problem])
    return _build_table(document, data_offset=LENGTH_BYTES + length, file_size=file_size, what=what)


def read_header(
    stream: BinaryIO, *, file_size: int, what: str, limits: HeaderLimits = ADAPTER_LIMITS
) -> TensorTable:
    """Read the header of a file from a stream at its beginning; raises as `parse_header`."""
    first = stream.read(LENGTH_BYTES)
    length = parse_header_length(first, file_size=file_size, what=what, limits=limits)
    return parse_header(first + stream.read(length), file_size=file_size, what=what, limits=limits)


def read_table(path: Path, *, limits: HeaderLimits = ADAPTER_LIMITS) -> TensorTable:
    """Read the header of a file; raises as `parse_header`."""
    with path.open("rb") as stream:
        size = path.stat().st_size
        return read_header(stream, file_size=size, what=path.name, limits=limits)


def _build_table(
    document: JsonObject, *, data_offset: int, file_size: int, what: str
) -> TensorTable:
    problems = _find_metadata_problems(document.pop(_METADATA, None))
    problems += _describe_empty_tensors(document)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in document.items():
        try:
            tensors[_check_name(name)] = _parse_tensor(name, entry)
        except _EmptyTensorError:
            continue
        except _TensorEntryError as error:
            problems.append(str(error))
    if not document:
        problems.append("there is no tensor")
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].begin))
    if not problems:
        problems = _find_layout_problems(ordered, file_size - data_offset)
    if problems:
        rest = len(problems) - _MAX_PROBLEMS
        more = [f"… and {rest} more"] if rest > 0 else []
        raise InvalidPackageError(what, [*problems[:_MAX_PROBLEMS], *more])
    return TensorTable(ordered, data_offset, file_size)


class _TensorEntryError(ValueError):
    """A problem of one tensor."""


class _EmptyTensorError(_TensorEntryError):
    """A tensor without numbers; all of these are reported in one line."""


def _describe_empty_tensors(document: JsonObject) -> list[str]:
    """Report tensors without numbers, as DeepSpeed ZeRO-3 leaves for parameters it partitions."""
    empty = [name for name, entry in document.items() if _is_empty(entry)]
    if not empty:
        return []
    more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    return [
        f"{empty[0][:_MAX_NAME]!r}{more}: empty tensors, as DeepSpeed ZeRO-3 leaves them: gather "
        "the parameters and save again"
    ]


def _is_empty(entry: JsonValue) -> bool:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return isinstance(shape, list) and any(type(size) is int and size == 0 for size in shape)


def _find_metadata_problems(metadata: JsonValue) -> list[str]:
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return [f"{_METADATA} is not an object"]
    return [
        f"{_METADATA}: {k[:80]!r} is not text" for k, v in metadata.items() if type(v) is not str
    ]


def _check_name(name: str) -> str:
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise _TensorEntryError(f"{name[:80]!r} is not a tensor name")
    return name


def _parse_tensor(name: str, entry: JsonValue) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise _TensorEntryError(f"{name}: not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _TensorEntryError(f"{name}: dtype {dtype!r:.80} is not supported")
    if _is_empty(entry):
        raise _EmptyTensorError(name)
    sizes, span = _parse_integers(shape, minimum=1), _parse_integers(offsets, minimum=0)
    if sizes is None or len(sizes) > _MAX_DIMENSIONS:
        raise _TensorEntryError(f"{name}: {shape!r:.80} is not a shape")
    if span is None or len(span) != 2:
        raise _TensorEntryError(f"{name}: {offsets!r:.80} are not two offsets")
    begin, end = span
    size = math.prod(sizes) * DTYPE_BYTES[dtype]
    if end - begin != size:
        raise _TensorEntryError(f"{name}: {begin} to {end} is not {size} bytes of {dtype} {sizes}")
    return TensorInfo(dtype, tuple(sizes), begin, end)


def _parse_integers(values: JsonValue, *, minimum: int) -> list[int] | None:
    """Return a list of integers, None for anything else; true is not 1."""
    if not isinstance(values, list):
        return None
    for value in values:
        if type(value) is not int or value < minimum:
            return None
    return cast(list[int], values)


def _find_layout_problems(ordered: Mapping[str, TensorInfo], data_size: int) -> list[str]:
    """Check that tensors cover the data exactly: no gap, no overlap, nothing after the last."""
    expected = 0
    for name, tensor in ordered.items():
        if tensor.begin != expected:
            return [f"{name}: begins at {tensor.begin}, the one before ends at {expected}"]
        expected = tensor.end
    if expected != data_size:
        return [f"tensors end at {expected}, the file holds {data_size} bytes of data"]
    return []
