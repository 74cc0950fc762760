"""The tensors of a GGUF base: the table in its folder, and how their rows are read.

`GGUF_TABLE` names the GGUF file and, for every tensor, its canonical name, kind, shape and offset,
so that loading a base does not parse the header again. It is written when the base is added.

An entry may be some rows of a stored tensor: projections and experts are stored in one. Floats have
the digest of the same tensor in safetensors, where they mean the same: rows are put back into their
order, the one that was added to the weights of norms is subtracted, and a vector that was only
widened to float32 is hashed in its own dtype.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.package.gguf_file import BLOCK_KINDS, BlockKind
from expertctl.package.stored_tensor import FileState, StoredTensor
from expertctl.package.tensor_file import TensorInfo
from expertctl.schema.strict_json import read_bounded
from expertctl.schema.validation import decode_json

if TYPE_CHECKING:
    import numpy as np

GGUF_TABLE = "gguf.json"
"""The file in the folder of a GGUF base that stands for its weights."""
_MAX_TABLE_BYTES = 64 << 20
_PORTION = 1 << 20
_COLUMNS = 1 << 24
"""The numbers that are transposed at a time."""
_KINDS = {kind.name: kind for kind in BLOCK_KINDS.values()}
_FLOATS = ("F32", "F16", "BF16")


class GgufEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor in the table."""

    name: str
    """Its canonical name."""
    stored: str
    """Its name in the file."""
    kind: str
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file, in bytes."""
    paired: int = 0
    """The size of a head whose rows are stored in pairs; 0: rows are in their order."""
    plain: str = ""
    """The dtype from which its float32 numbers were widened."""
    shifted: bool = False
    """Whether the file has one plus each number."""
    transposed: bool = False
    """Whether folders store it as [in, out], and it is hashed so; it is [out, in] in the file."""


class GgufTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `GGUF_TABLE`."""

    schema: int
    file: str
    """The absolute path of the GGUF file, or its name in the same folder."""
    tensors: tuple[GgufEntry, ...]


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """Decodes rows of a tensor in a GGUF file."""

    raw: StoredTensor
    """Where its bytes are; the shape is that of the numbers."""
    kind: BlockKind
    head_dim: int
    """The size of a head whose rows are stored in pairs; 0: rows are in their order."""

    @property
    def storage(self) -> str:
        """The kind of its blocks."""
        return self.kind.name

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The bytes of the tensor in the file."""
        return (self.raw,)

    def read_rows(self, first: int, count: int) -> "np.ndarray[Any, Any]":
        """Return rows as float32 [count, columns], or [count]; raises as `TensorCodec`."""
        from expertctl.package.gguf_blocks import decode_blocks  # numpy: only to read numbers

        numbers = decode_blocks(self.kind, self.read_row_bytes(first, count))
        return numbers.reshape(count, *self.raw.info.shape[1:])

    def read_row_bytes(self, first: int, count: int) -> bytes:
        """Return the bytes of rows in the order of the model; raises as `TensorCodec`."""
        if not self.head_dim:
            return self._read_stored(first, count)
        from expertctl.package.gguf_blocks import restore_row_order

        dim, size = self.head_dim, self.row_bytes
        begin, end = first // dim * dim, -(-(first + count) // dim) * dim
        stored = self._read_stored(begin, end - begin)
        rows = restore_row_order(stored, row_bytes=size, head_dim=dim)
        return rows[(first - begin) * size : (first - begin + count) * size]

    @property
    def row_bytes(self) -> int:
        """The size of one row in the file, in bytes."""
        shape = self.raw.info.shape
        return self.kind.count_bytes(shape[1] if len(shape) > 1 else 1)

    def _read_stored(self, first: int, count: int) -> bytes:
        left, parts = count * self.row_bytes, []
        with self.raw.open() as stream:
            stream.seek(self.raw.offset + first * self.row_bytes)
            while left:
                part = stream.read(left)
                if not part:
                    raise OSError("it is cut short")
                parts.append(part)
                left -= len(part)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class GgufFloats:
    """An `ExactCodec` of floats that are in another order, in a wider dtype, or shifted by one."""

    rows: GgufCodec
    plain: str
    """The dtype that they mean; narrower than the stored one where that is exact."""
    shifted: bool = False
    """Whether the file has one plus each number."""
    transposed: bool = False
    """Whether its columns are hashed one after another."""

    @property
    def storage(self) -> str:
        """The dtype that is hashed."""
        return self.plain

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The bytes of the tensor in the file."""
        return self.rows.parts

    def read_rows(self, first: int, count: int) -> "np.ndarray[Any, Any]":
        """Return rows as float32; raises as `TensorCodec`.

        Subtracting one is exact for every number that adding one makes.
        """
        numbers = self.rows.read_rows(first, count)
        return numbers - 1 if self.shifted else numbers

    def iter_plain_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of all rows in ``plain``; raises as `TensorCodec`."""
        from expertctl.package.gguf_blocks import narrow_floats

        if self.transposed:
            yield from self._iter_columns()
            return
        total, height = self.rows.raw.info.shape[0], max(1, _PORTION // self.rows.row_bytes)
        for first in range(0, total, height):
            count = min(height, total - first)
            if self.plain == self.rows.kind.name and not self.shifted:
                yield self.rows.read_row_bytes(first, count)
            else:
                yield narrow_floats(self.read_rows(first, count), self.plain)

    def _iter_columns(self) -> Iterator[bytes]:
        """Yield the bytes of some columns at a time, for which all rows are read."""
        from expertctl.package.gguf_blocks import narrow_floats, transpose_rows

        rows, columns = self.rows.raw.info.shape
        width, height = max(1, _COLUMNS // rows), max(1, _PORTION // self.rows.row_bytes)
        for first in range(0, columns, width):
            parts = (
                self.read_rows(row, min(height, rows - row))[:, first : first + width]
                for row in range(0, rows, height)
            )
            yield narrow_floats(transpose_rows(parts), self.plain)


def find_gguf_file(directory: Path) -> Path:
    """Return the path of the GGUF file that a table in a folder names.

    Raises as `read_table_document`.
    """
    return directory / read_table_document(directory).file


def read_table_document(directory: Path) -> GgufTable:
    """Read the table of a folder.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    path = directory / GGUF_TABLE
    try:
        table = decode_json(read_bounded(path, max_bytes=_MAX_TABLE_BYTES), GgufTable)
    except msgspec.MsgspecError as error:
        raise InvalidPackageError(str(path), [f"not a table of tensors: {error}"]) from error
    if table.schema != 1:
        raise InvalidPackageError(str(path), [f"version {table.schema}, only 1 is read"])
    return table


def read_gguf_table(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF base by canonical name.

    Raises:
        NotFoundError: when the GGUF file is gone.
        InvalidPackageError: when the table is malformed, or does not fit the file.
    """
    table = read_table_document(directory)
    path = directory / table.file
    try:
        state = FileState.from_stat(path.stat())
    except OSError as error:
        hint = "put it back, or remove the base and add the file where it is now"
        raise NotFoundError(f"{path} is missing", hint=hint) from error
    return {entry.name: _locate_tensor(path, state, entry) for entry in table.tensors}


def _locate_tensor(path: Path, state: FileState, entry: GgufEntry) -> StoredTensor:
    kind, shape = _KINDS.get(entry.kind), entry.shape
    sound = kind is not None and 1 <= len(shape) <= 2 and min((*shape, entry.offset)) >= 0
    if kind is None or not sound:
        raise InvalidPackageError(str(path), [f"{entry.name} has a malformed entry in the table"])
    paired = entry.paired
    if shape[-1] % kind.numbers or (paired and (paired < 0 or paired % 2 or shape[0] % paired)):
        raise InvalidPackageError(str(path), [f"{entry.name} has a malformed entry in the table"])
    is_odd = len(shape) != 2 and kind.name not in _FLOATS
    is_odd |= entry.transposed and (len(shape) != 2 or kind.name not in _FLOATS)
    if is_odd or (entry.shifted and kind.name != "F32"):
        raise InvalidPackageError(str(path), [f"{entry.name} has a malformed entry in the table"])
    size = kind.count_bytes(math.prod(shape))
    if entry.offset + size > state.size:
        raise InvalidPackageError(str(path), [f"{entry.stored} ends after the file"])
    info = TensorInfo(kind.name if kind.name in _FLOATS else "U8", shape, 0, size)
    raw = StoredTensor(path, info, entry.offset, entry.stored, file=state)
    is_plain = kind.name in _FLOATS
    if is_plain and not (entry.paired or entry.plain or entry.shifted or entry.transposed):
        return raw
    rows = GgufCodec(raw, kind, entry.paired)
    plain = entry.plain or kind.name
    floats = GgufFloats(rows, plain, entry.shifted, entry.transposed)
    codec = floats if is_plain else rows
    decoded = TensorInfo("F32", shape, 0, 4 * math.prod(shape))
    return StoredTensor(path, decoded, entry.offset, entry.stored, file=state, codec=codec)
