"""`StoredTensor`: where the numbers of one tensor of a base are, and how they are stored.

Numbers that are not stored as plain floats (in blocks with scales, or transposed) are decoded by
the `TensorCodec` of their tensor, which every reader asks for rows.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from expertctl.errors import InvalidPackageError
from expertctl.package.stored_layout import RowLayout
from expertctl.package.tensor_file import TensorInfo

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class FileState:
    """Identifies an unchanged file without reading it."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def from_stat(cls, found: os.stat_result) -> "FileState":
        """Return the state in a stat result."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class TensorCodec(Protocol):
    """Decodes a tensor whose numbers are not stored as plain floats."""

    @property
    def storage(self) -> str:
        """What the numbers are stored as, such as ``Q4_K``; part of the digest of a base."""

    @property
    def parts(self) -> "tuple[StoredTensor, ...]":
        """The stored tensors that it reads, in the order in which they are hashed."""

    def read_rows(self, first: int, count: int) -> "np.ndarray[Any, Any]":
        """Return ``count`` rows from row ``first`` on: float32 [count, columns], or [count].

        Raises:
            OSError: when a file ends early.
            InvalidPackageError: when a file changed since its header was read.
        """


@runtime_checkable
class ExactCodec(TensorCodec, Protocol):
    """A codec of plain floats in another order or a wider dtype, hashed as what they mean."""

    def iter_plain_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of all rows in order, in the dtype ``storage``; raises as `read_rows`."""


@runtime_checkable
class BlockCodec(TensorCodec, Protocol):
    """Decodes rows of blocks, which kernels may read as they are."""

    def read_row_bytes(self, first: int, count: int) -> bytes:
        """Return the bytes of rows in the order of the model; raises as `read_rows`."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a base: its file, dtype and shape, and the offset of its first byte.

    In the file it is the tensor ``stored``, or rows of it, starting at ``row``. With a ``codec``,
    dtype and shape are those of the decoded numbers (F32), and the offsets are of no use.
    """

    path: Path
    info: TensorInfo
    offset: int
    stored: str
    row: int = 0
    file: FileState | None = None
    """The state of the file when its header was read."""
    layout: RowLayout | None = None
    """How its rows lie in ``stored``; None: one after another."""
    codec: TensorCodec | None = None
    """Decodes its rows; None: they are stored as they are."""
    decoded: str | None = None
    """The 16-bit dtype that represents all numbers of its codec, such as BF16; None: none."""

    @property
    def size(self) -> int:
        """The size in the files, in bytes."""
        if self.codec is not None:
            return sum(part.size for part in self.codec.parts)
        return self.info.end - self.info.begin

    @property
    def storage(self) -> str:
        """What its numbers are stored as: a dtype, or the name of its codec."""
        return self.info.dtype if self.codec is None else self.codec.storage

    @property
    def has_whole_rows(self) -> bool:
        """Whether its rows are stored as they are, and not decoded or columns in the file."""
        return self.codec is None and (self.layout is None or not self.layout.transposed)

    def iter_ranges(self, first: int = 0, rows: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield offset and size of the bytes of some rows, or of all, in its file.

        Of rows that are columns of the stored matrix, the parts in each stored row are yielded.
        """
        assert self.codec is None, "its rows are decoded"
        shape = self.info.shape
        if rows is None:
            rows = (shape[0] if shape else 1) - first
        itemsize = self.size // math.prod(shape)
        columns = math.prod(shape[1:])
        if self.layout is None:
            yield self.offset + first * columns * itemsize, rows * columns * itemsize
            return
        for begin, size in self.layout.iter_ranges(first, rows, columns, itemsize):
            yield self.offset + begin, size

    def open(self) -> FileIO:
        """Open its file, unless it changed since its header was read, perhaps long ago.

        Raises:
            InvalidPackageError: when the file was replaced or written since.
            OSError: when it cannot be opened.
        """
        stream = FileIO(self.path)
        if self.file is not None and FileState.from_stat(os.fstat(stream.fileno())) != self.file:
            stream.close()
            changed = "it changed while the base was in memory; load the base again"
            raise InvalidPackageError(str(self.path), [changed])
        return stream
