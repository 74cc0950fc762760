"""Reading the header of a GGUF file, which may come from anyone.

Layout, little endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version,
counts, metadata (key, type, value), one entry per tensor (name, dimensions, kind, offset), then the
data, aligned. Versions 2 and 3 are read.

Every count, length and offset is compared with the size of the file before it is used, so a file
can neither make this process allocate more than it holds nor make a reader leave it. Tensors may
not overlap, and names may not repeat.
"""

import itertools
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.stored_tensor import FileState

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20
_MAX_KEYS = 1 << 12
_MAX_TENSORS = 1 << 17
_MAX_ITEMS = 4_000_000
"""Items of all arrays together; each takes up to forty bytes in memory."""
_MAX_STRING = 16 << 20
_MAX_NAME = 256
_MAX_DIMENSIONS = 4
_MAX_SIZE = 1 << 40
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_PORTION = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,256}")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_FORMATS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The number types of metadata values, as codes of `struct`."""

_LENGTH = struct.Struct("<Q")

MetadataValue = bool | int | float | str | tuple[bool | int | float | str, ...]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """How the numbers of a tensor are stored: in blocks of as many numbers, of a size in bytes."""

    name: str
    numbers: int
    size: int

    def count_bytes(self, numbers: int) -> int:
        """Return the size of a row of whole blocks, in bytes."""
        return numbers // self.numbers * self.size


BLOCK_KINDS: Mapping[int, BlockKind] = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    30: BlockKind("BF16", 1, 2),
}
"""The kinds that are read, by the number in the file."""
_OTHER_KINDS: Mapping[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""The names of other kinds, for errors."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its kind, its shape with the columns last, and where its bytes are."""

    name: str
    kind: BlockKind
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of a GGUF file without the numbers of its tensors."""

    path: Path
    state: FileState
    """The state of the file before its header was read."""
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]
    """By name, in the order of the file."""


def is_gguf_file(path: Path) -> bool:
    """Tell whether a path is a file that begins as GGUF does, whatever it is called."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a file.

    Raises:
        InvalidPackageError: naming the field that is malformed.
        IncompatibleError: for a version or a kind of blocks that is not supported.
        OSError: when the file cannot be read.
    """
    state = FileState.from_stat(path.stat())
    with path.open("rb", buffering=0) as stream:
        reader = _HeaderReader(stream, size=state.size, what=str(path))
        tensor_count, key_count = _read_counts(reader)
        metadata = _read_metadata(reader, key_count)
        entries = [_read_tensor_entry(reader) for _ in range(tensor_count)]
        alignment = _read_alignment(reader, metadata)
        start = -(-reader.position // alignment) * alignment
    tensors = [_place_tensor(reader, entry, start=start, alignment=alignment) for entry in entries]
    _check_layout(reader, tensors)
    return GgufHeader(path, state, metadata, {tensor.name: tensor for tensor in tensors})


class _HeaderReader:
    """Reads a header front to back; every read is checked against the size of the file."""

    def __init__(self, stream: BinaryIO, *, size: int, what: str) -> None:
        self.what = what
        self.size = size
        self.position = 0
        self._items_left = _MAX_ITEMS
        self._stream = stream
        self._data = b""
        self._begin = 0  # of the data in the file

    def refuse(self, field: str, why: str) -> NoReturn:
        """Raise the error for a malformed field."""
        raise InvalidPackageError(self.what, [f"{field} {why}"])

    def take(self, count: int, field: str) -> bytes:
        """Return the next bytes."""
        if count > self.size - self.position:
            left = self.size - self.position
            self.refuse(field, f"needs {count} bytes, the file has {left} more")
        if self.position + count > _MAX_HEADER_BYTES:
            self.refuse(field, f"is beyond the first {_MAX_HEADER_BYTES >> 20} MiB, the limit")
        begin = self.position - self._begin
        if begin + count > len(self._data):
            self._fill(count, field)
            begin = 0
        self.position += count
        return self._data[begin : begin + count]

    def count_items(self, count: int, field: str) -> None:
        """Refuse an array if all of them have too many items."""
        self._items_left -= count
        if self._items_left < 0:
            self.refuse(field, f"has {count} items, at most {_MAX_ITEMS} are read in all")

    def take_number(self, code: str, field: str) -> int:
        """Return the next whole number of a format of `struct`."""
        (number,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), field))
        return int(number)

    def take_text(self, field: str, *, limit: int = _MAX_STRING) -> str:
        """Return the next string."""
        length = self.take_number("Q", field)
        if length > limit:
            self.refuse(field, f"is a text of {length} bytes, at most {limit} are read")
        try:
            return self.take(length, field).decode()
        except UnicodeDecodeError:
            self.refuse(field, "is not valid UTF-8")

    def take_texts(self, field: str, count: int) -> list[str]:
        """Return the next strings; a vocabulary has many, so those in the buffer are read here."""
        texts: list[str] = []
        while len(texts) < count:
            data, begin = self._data, self.position - self._begin
            try:
                while len(texts) < count and begin + 8 <= len(data):
                    (length,) = _LENGTH.unpack_from(data, begin)
                    end = begin + 8 + length
                    if end > len(data):
                        break
                    texts.append(data[begin + 8 : end].decode())
                    begin = end
            except UnicodeDecodeError:
                self.refuse(field, f"has an item that is not valid UTF-8, number {len(texts)}")
            self.position = self._begin + begin
            if len(texts) < count:
                texts.append(self.take_text(field))  # fills the buffer, or refuses
        return texts

    def _fill(self, count: int, field: str) -> None:
        rest = self._data[self.position - self._begin :]
        parts, wanted = [rest], max(count, _PORTION) - len(rest)
        while wanted > 0 and (part := self._stream.read(wanted)):
            parts.append(part)
            wanted -= len(part)
        self._data, self._begin = b"".join(parts), self.position
        if len(self._data) < count:
            self.refuse(field, "is cut short")


def _read_counts(reader: _HeaderReader) -> tuple[int, int]:
    if reader.take(len(MAGIC), "magic") != MAGIC:
        reader.refuse("magic", "is not GGUF")
    version = reader.take_number("I", "version")
    if version in (2 << 24, 3 << 24):
        raise IncompatibleError(
            f"{reader.what}: a big-endian GGUF file", hint="use the little-endian file of the model"
        )
    if version not in _VERSIONS:
        raise IncompatibleError(
            f"{reader.what}: GGUF version {version} is not supported",
            hint="supported are versions 2 and 3; convert the model with a current llama.cpp",
        )
    tensors, keys = reader.take_number("Q", "tensor count"), reader.take_number("Q", "key count")
    if not 0 < tensors <= _MAX_TENSORS:
        reader.refuse("tensor count", f"is {tensors}, it must be from 1 to {_MAX_TENSORS}")
    if keys > _MAX_KEYS:
        reader.refuse("key count", f"is {keys}, at most {_MAX_KEYS} are read")
    return tensors, keys


def _read_metadata(reader: _HeaderReader, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for number in range(count):
        key = reader.take_text(f"key {number}", limit=_MAX_NAME)
        if not key.isascii() or not key.isprintable() or not key:
            reader.refuse(f"key {number}", f"is {key[:80]!r}, which is no key")
        if key in metadata:
            reader.refuse(key, "appears twice")
        metadata[key] = _read_value(reader, key)
    return metadata


def _read_value(reader: _HeaderReader, key: str) -> MetadataValue:
    kind = reader.take_number("I", key)
    if kind == _STRING:
        return reader.take_text(key)
    if kind == _ARRAY:
        return _read_array(reader, key)
    (value,) = _read_numbers(reader, key, kind, 1)
    return value


def _read_array(reader: _HeaderReader, key: str) -> MetadataValue:
    kind, count = reader.take_number("I", key), reader.take_number("Q", key)
    if kind == _ARRAY:
        reader.refuse(key, "is an array of arrays, which is not read")
    reader.count_items(count, key)
    if kind != _STRING:
        return _read_numbers(reader, key, kind, count)
    if count * 8 > reader.size - reader.position:
        reader.refuse(key, f"has {count} items, more than the file holds")
    return tuple(reader.take_texts(key, count))


def _read_numbers(
    reader: _HeaderReader, key: str, kind: int, count: int
) -> tuple[bool | int | float, ...]:
    if kind not in _FORMATS:
        reader.refuse(key, f"has the unknown type {kind}")
    code = _FORMATS[kind]
    data = reader.take(struct.calcsize(f"<{code}") * count, key)
    if kind == _BOOL and not set(data) <= {0, 1}:
        reader.refuse(key, "is a boolean other than 0 and 1")
    values = struct.unpack(f"<{count}{code}", data)
    if code in "fd" and not all(map(math.isfinite, values)):
        reader.refuse(key, "is not a finite number")
    return values


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_tensor_entry(reader: _HeaderReader) -> _TensorEntry:
    name = reader.take_text("a tensor name", limit=_MAX_NAME)
    if not _NAME.fullmatch(name):
        reader.refuse("a tensor name", f"is {name[:80]!r}")
    dimensions = reader.take_number("I", name)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        reader.refuse(name, f"has {dimensions} dimensions, it must be 1 to {_MAX_DIMENSIONS}")
    shape = tuple(reader.take_number("Q", name) for _ in range(dimensions))
    if not all(0 < size <= _MAX_SIZE for size in shape):
        reader.refuse(name, f"has the shape {list(shape)}")
    kind, offset = reader.take_number("I", name), reader.take_number("Q", name)
    return _TensorEntry(name, shape[::-1], kind, offset)


def _read_alignment(reader: _HeaderReader, metadata: Mapping[str, MetadataValue]) -> int:
    name = "general.alignment"
    value = metadata.get(name, _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        reader.refuse(name, f"is {value!r:.40}, it must be a power of two")
    return value


def _place_tensor(
    reader: _HeaderReader, entry: _TensorEntry, *, start: int, alignment: int
) -> GgufTensor:
    kind = BLOCK_KINDS.get(entry.kind)
    if kind is None:
        known = ", ".join(kind.name for kind in BLOCK_KINDS.values())
        name = _OTHER_KINDS.get(entry.kind, f"of the unknown kind {entry.kind}")
        raise IncompatibleError(
            f"{reader.what}: tensor {entry.name} is {name}, which is not supported",
            hint=f"use a file of the model in one of {known}",
        )
    if entry.shape[-1] % kind.numbers:
        columns = entry.shape[-1]
        reader.refuse(entry.name, f"has rows of {columns}, no multiple of {kind.numbers}")
    if entry.offset % alignment:
        reader.refuse(entry.name, f"begins at {entry.offset}, no multiple of {alignment}")
    size = kind.count_bytes(math.prod(entry.shape))
    begin = start + entry.offset
    if begin + size > reader.size:
        reader.refuse(entry.name, f"ends at {begin + size}, the file has {reader.size} bytes")
    return GgufTensor(entry.name, kind, entry.shape, begin, size)


def _check_layout(reader: _HeaderReader, tensors: list[GgufTensor]) -> None:
    """Refuse tensors of the same name and tensors that share bytes."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            reader.refuse(tensor.name, "appears twice")
        names.add(tensor.name)
    for before, after in _iter_neighbours(tensors):
        if before.offset + before.size > after.offset:
            reader.refuse(after.name, f"overlaps {before.name}")


def _iter_neighbours(tensors: list[GgufTensor]) -> Iterator[tuple[GgufTensor, GgufTensor]]:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    return itertools.pairwise(ordered)
