"""The tensors of a base in plain arrays: exactly those that its configuration names.

All tensors are in one block of memory, which is written once: norms and biases first, float32, then
matrices, float32 or the bits of bfloat16. Tensors follow each other in the order of the
configuration, so layers with the same input (queries, keys and values; gate and up) are one matrix
as well (`PlainWeights.stack`). The output matrix of a tied base is the embedding.

`StoredWeights` are the same tensors without the memory: matrices stay in the files, and some rows
at a time are read whenever they are used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.arrays import AnyArray, FloatArray, round_to_bfloat16, widen
from expertctl.engine.base_files import (
    check_tied_head,
    iter_row_portions,
    list_rounding_warnings,
    read_rows,
    tied_head_scratch_bytes,
)
from expertctl.engine.kernels.packed_format import rows_per_portion
from expertctl.engine.memory.host import allocate
from expertctl.errors import UsageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.expert_columns import MAX_CACHED_BYTES
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, ModelConfig
from expertctl.package.stored_tensor import StoredTensor

_MATRIX_DTYPES: dict[str, "np.dtype[Any]"] = {
    "float32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
}
_LONG_NAMES = {"float32": "float32", "bf16": "bfloat16"}
_FLOAT = np.dtype(np.float32)
_NUMBER_BYTES = {"float32": 4, "bf16": 28}
"""Bytes per number of a portion: as it is stored; for bf16 also widened, and as it is rounded."""
_OBJECT_BYTES, _TENSOR_BYTES = 16 << 10, 2 << 10
"""Bytes of objects, and of those of a tensor in a header."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeights:
    """All tensors of a base by name, as read-only views of one block."""

    tensors: Mapping[str, FloatArray]
    nbytes: int
    """Bytes of all tensors."""
    read_bytes: int
    """Bytes of files read."""
    warnings: tuple[str, ...]
    _block: AnyArray
    _offsets: Mapping[str, int]

    def get_output_matrix(self) -> FloatArray:
        """Return the output matrix, which may be tied to the embedding."""
        return self.tensors.get(HEAD_TENSOR, self.tensors[EMBEDDING_TENSOR])

    def stack(self, names: Sequence[str]) -> FloatArray:
        """Return tensors that follow each other as one, [sum of rows, ...]."""
        parts = [self.tensors[name] for name in names]
        begin, size = self._offsets[names[0]], sum(part.nbytes for part in parts)
        ends = [self._offsets[n] + part.nbytes for n, part in zip(names, parts, strict=True)]
        assert ends[:-1] == [self._offsets[name] for name in names[1:]], "they are neighbours"
        whole = self._block[begin : begin + size].view(parts[0].dtype)
        return whole.reshape(-1, *parts[0].shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A matrix in the files of a base, or several with the same columns as one."""

    parts: tuple[StoredTensor, ...]

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(part.info.shape[0] for part in self.parts)

    def __getitem__(self, rows: AnyArray) -> AnyArray:
        """Read rows of a single matrix by their numbers: float32 [rows, columns]."""
        [tensor] = self.parts
        return read_rows(tensor, rows)

    def iter_portions(self) -> Iterator[AnyArray]:
        """Yield all rows, some at a time: float32, valid until the next ones."""
        for part in self.parts:
            yield from map(widen, iter_row_portions(part))


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """All tensors of a base by name: vectors in memory, float32, and matrices in the files."""

    tensors: Mapping[str, AnyArray | StoredMatrix]

    def get_output_matrix(self) -> AnyArray | StoredMatrix:
        """Return the output matrix, which may be tied to the embedding."""
        return self.tensors.get(HEAD_TENSOR, self.tensors[EMBEDDING_TENSOR])

    def stack(self, names: Sequence[str]) -> AnyArray | StoredMatrix:
        """Return vectors, or matrices with the same columns, as one."""
        vectors, matrices = list[AnyArray](), list[StoredTensor]()
        for part in (self.tensors[name] for name in names):
            if isinstance(part, StoredMatrix):
                matrices.extend(part.parts)
            else:
                vectors.append(part)
        return StoredMatrix(tuple(matrices)) if matrices else np.concatenate(vectors)


class WeightTensors(Protocol):
    """What a decoder is built of: `PlainWeights` or `StoredWeights`."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Vectors and matrices by name."""

    def get_output_matrix(self) -> Any:
        """Return the output matrix."""

    def stack(self, names: Sequence[str]) -> Any:
        """Return tensors that follow each other as one."""


def open_stored_weights(directory: Path, config: ModelConfig) -> StoredWeights:
    """Read the vectors of a base, and the headers of its files.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when tensors are missing, unexpected or of another shape.
    """
    stored = read_base_tensors(directory, config)
    return StoredWeights({name: _open_tensor(stored[name]) for name in config.tensor_shapes()})


def _open_tensor(tensor: StoredTensor) -> AnyArray | StoredMatrix:
    if len(tensor.info.shape) == 2:
        return StoredMatrix((tensor,))
    numbers = np.empty(tensor.info.shape, np.float32)
    _read_tensor(tensor, numbers)
    return numbers


def check_plain_dtype(dtype: str) -> None:
    """Check that plain arrays can hold matrices in a dtype.

    Raises:
        UsageError: if not.
    """
    if dtype not in _MATRIX_DTYPES:
        raise UsageError(
            f"numpy does not hold a base in {dtype[:40]!r}, only in {' or '.join(_MATRIX_DTYPES)}",
            hint="--dtype float32 is always possible",
        )


def plain_weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of all tensors of a base with matrices in a dtype."""
    return config.count_weight_bytes(itemsize=_MATRIX_DTYPES[dtype].itemsize)


def loading_scratch_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the maximum bytes that `load_plain_weights` needs on top of the weights."""
    shapes = config.tensor_shapes().values()
    portion = max(min(rows_per_portion(shape[-1]) * shape[-1], prod(shape)) for shape in shapes)
    reading, tensors = portion * _NUMBER_BYTES[dtype], len(shapes)
    if config.tied:  # its head may be stored, too
        reading = max(reading, tied_head_scratch_bytes(config.vocab_size, config.hidden_size))
        tensors += 1
    if config.stored_places.names.experts_as_columns:
        reading += min(MAX_CACHED_BYTES, config.count_weight_bytes(itemsize=_FLOAT.itemsize))
    return reading + tensors * _TENSOR_BYTES + _OBJECT_BYTES


def load_plain_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: str = "float32",
    progress: Progress = ignore_progress,
) -> PlainWeights:
    """Read a base with matrices in a dtype; ``progress`` counts the bytes of tensors.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when tensors are missing, unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float, or a tied head that differs from the
            embedding.
    """
    stored = read_base_tensors(directory, config)
    if config.tied and HEAD_TENSOR in stored:
        check_tied_head(directory, stored)
    block = np.frombuffer(allocate(plain_weight_bytes(config, dtype)), np.uint8)
    offsets, tensors = _place_tensors(config, dtype, block)
    for name, place in tensors.items():
        _read_tensor(stored[name], place)
        place.flags.writeable = False
        progress(place.nbytes)
    block.flags.writeable = False
    used = [stored[name] for name in tensors]
    return PlainWeights(
        tensors,
        nbytes=len(block),
        read_bytes=sum(tensor.size for tensor in used),
        warnings=list_rounding_warnings(used, _LONG_NAMES[dtype]),
        _block=block,
        _offsets=offsets,
    )


def _get_dtype(shape: tuple[int, ...], dtype: str) -> "np.dtype[Any]":
    return _MATRIX_DTYPES[dtype] if len(shape) == 2 else _FLOAT


def _place_tensors(
    config: ModelConfig, dtype: str, block: AnyArray
) -> tuple[dict[str, int], dict[str, FloatArray]]:
    """Return the offset of each tensor in a block, and its place; vectors come first."""
    offsets: dict[str, int] = {}
    tensors: dict[str, FloatArray] = {}
    begin = 0
    for name, shape in sorted(config.tensor_shapes().items(), key=lambda item: len(item[1])):
        kind = _get_dtype(shape, dtype)
        end = begin + prod(shape) * kind.itemsize
        offsets[name], tensors[name] = begin, block[begin:end].view(kind).reshape(shape)
        begin = end
    return offsets, tensors


def _read_tensor(tensor: StoredTensor, place: FloatArray) -> None:
    first = 0
    for numbers in iter_row_portions(tensor):
        rows = place[first : first + len(numbers)]
        first += len(numbers)
        if rows.dtype == numbers.dtype:
            rows[...] = numbers
        elif rows.dtype == np.uint16:
            rows[...] = round_to_bfloat16(widen(numbers))
        elif numbers.dtype == np.uint16:
            np.left_shift(numbers, 16, out=rows.view(np.uint32), dtype=np.uint32)
        else:
            rows[...] = numbers
