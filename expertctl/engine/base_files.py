"""Reading the tensors of a base from its files into arrays, and what may be wrong with them.

Files are read, not mapped, because mapped pages would count as memory of this process. This module
imports neither numba nor torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from expertctl.engine.arrays import STORED_DTYPES, AnyArray, widen
from expertctl.engine.kernels.packed_format import rows_per_portion
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR
from expertctl.package.stored_tensor import StoredTensor, TensorCodec

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOAT_BYTES, _COMPARED_NUMBERS = 4, 1 << 14


def iter_row_portions(
    tensor: StoredTensor, first: int = 0, rows: int | None = None
) -> Iterator[AnyArray]:
    """Yield rows of a stored tensor in portions, in a buffer that is reused.

    Raises:
        InvalidPackageError: if the file cannot be read to its end.
    """
    shape, dtype = tensor.info.shape, STORED_DTYPES[tensor.info.dtype]
    columns = prod(shape[1:])
    rows, height = shape[0] if rows is None else rows, rows_per_portion(columns)
    if tensor.codec is not None:
        for begin in range(first, first + rows, height):
            yield _decode_rows(tensor, tensor.codec, begin, min(height, first + rows - begin))
        return
    buffer = np.empty(min(rows, height) * columns, dtype)
    try:
        with tensor.open() as stream:
            for begin in range(0, rows, height):
                part = buffer[: min(height, rows - begin) * columns]
                _read_stored_rows(tensor, first + begin, part, stream)
                if tensor.layout is not None and tensor.layout.transposed:
                    part = part.reshape(columns, -1).T.copy()
                yield part.reshape(-1, *shape[1:])
    except OSError as error:
        raise make_unreadable_error(tensor.path, error) from error


def _decode_rows(tensor: StoredTensor, codec: TensorCodec, first: int, count: int) -> AnyArray:
    try:
        return codec.read_rows(first, count)
    except OSError as error:
        raise make_unreadable_error(tensor.path, error) from error


def read_tensor(tensor: StoredTensor, numbers: AnyArray) -> None:
    """Read the raw bytes of a stored tensor without a codec into an array of the same size.

    Raises:
        InvalidPackageError: if the file cannot be read to its end.
    """
    assert tensor.codec is None, "its bytes are not its numbers"
    assert tensor.layout is None, "its rows do not follow each other"
    try:
        with tensor.open() as stream:
            stream.seek(tensor.offset)
            _read_into(numbers, stream)
    except OSError as error:
        raise make_unreadable_error(tensor.path, error) from error


def _read_stored_rows(
    tensor: StoredTensor, first: int, numbers: AnyArray, stream: BinaryIO
) -> None:
    """Read rows from ``first`` on, as many as fit into an array; columns in their stored order."""
    left, begin = numbers.data.cast("B"), 0
    rows = numbers.size // max(1, prod(tensor.info.shape[1:]))
    for offset, size in tensor.iter_ranges(first, rows):
        stream.seek(offset)
        _read_into(left[begin : begin + size], stream)
        begin += size


def read_rows(tensor: StoredTensor, numbers: AnyArray) -> AnyArray:
    """Return rows of a stored matrix by their numbers, float32 [rows, columns].

    Raises:
        InvalidPackageError: if the file cannot be read.
    """
    columns, dtype = tensor.info.shape[1], STORED_DTYPES[tensor.info.dtype]
    rows = np.empty((len(numbers), columns), dtype)
    if tensor.codec is not None:
        for row, number in zip(rows, numbers.tolist(), strict=True):
            row[...] = _decode_rows(tensor, tensor.codec, number, 1)[0]
        return rows
    try:
        with tensor.open() as stream:
            for row, number in zip(rows, numbers.tolist(), strict=True):
                stream.seek(tensor.offset + number * row.nbytes)
                _read_into(row, stream)
    except OSError as error:
        raise make_unreadable_error(tensor.path, error) from error
    return widen(rows)


def check_tied_head(directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Check that a tied head stored in the files equals the embedding.

    Raises:
        InvalidPackageError: if a file cannot be read to its end.
        IncompatibleError: if it differs.
    """
    tensors = (stored[EMBEDDING_TENSOR], stored[HEAD_TENSOR])
    for ours, other in zip(*map(iter_row_portions, tensors), strict=True):
        if not _equals(ours.reshape(-1), other.reshape(-1)):
            raise make_tied_head_error(directory)


def tied_head_scratch_bytes(rows: int, columns: int) -> int:
    """Return the maximum bytes that `check_tied_head` needs for an embedding."""
    portion = min(rows_per_portion(columns), rows) * columns
    return 2 * _FLOAT_BYTES * portion + (2 * _FLOAT_BYTES + 1) * min(_COMPARED_NUMBERS, portion)


def is_routed_expert(name: str) -> bool:
    """Return whether a tensor or a module belongs to a routed expert."""
    return ".mlp.experts." in name


def list_rounding_warnings(stored: Iterable[StoredTensor], target: str) -> tuple[str, ...]:
    """Warn about matrices that are rounded to a float type; float32 represents all of them."""
    rounded = {
        _FLOATS.get(tensor.storage, tensor.storage)
        for tensor in stored
        if len(tensor.info.shape) == 2
        and target not in ("float32", _FLOATS.get(tensor.decoded or tensor.storage))
    }
    return tuple(f"base weights stored as {n} are rounded to {target}" for n in sorted(rounded))


def list_block_warnings(stored: Iterable[StoredTensor], target: str) -> tuple[str, ...]:
    """Say that matrices stored in blocks are held in other ones; no kernel reads those."""
    kinds = {t.storage for t in stored if len(t.info.shape) == 2} - _FLOATS.keys()
    text = f"base weights stored in blocks of {' and '.join(sorted(kinds))} are held in {target}"
    return (text,) if kinds else ()


def make_tied_head_error(directory: Path) -> IncompatibleError:
    """Return the error for a tied head that is also stored, with other values."""
    return IncompatibleError(
        f"{directory}: config.json ties the head to the embedding, but {HEAD_TENSOR} "
        "differs from it",
        hint="set tie_word_embeddings to false if the head is meant to be its own matrix",
    )


def make_unreadable_error(path: Path, error: Exception) -> InvalidPackageError:
    """Return the error for a file that cannot be read completely."""
    return InvalidPackageError(str(path), [f"not a readable file of weights: {error}"])


def _equals(ours: AnyArray, other: AnyArray) -> bool:
    """Return whether stored numbers [count] are equal; some at a time are widened."""
    parts = (slice(n, n + _COMPARED_NUMBERS) for n in range(0, len(ours), _COMPARED_NUMBERS))
    return all(np.array_equal(widen(ours[part]), widen(other[part])) for part in parts)


def _read_into(numbers: AnyArray | memoryview, stream: BinaryIO) -> None:
    """Fill an array.

    Raises:
        OSError: if the file ends early.
    """
    left = numbers if isinstance(numbers, memoryview) else numbers.data.cast("B")
    while left:
        count = cast(int, stream.readinto(left))  # type: ignore[attr-defined]  # of raw files
        if not count:
            raise OSError("it is cut short")
        left = left[count:]
