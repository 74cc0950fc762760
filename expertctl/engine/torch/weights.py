"""Read the tensors of a base model from safetensors, exactly those that its configuration names.

Files may be memory-mapped and are never written, and nothing changes a tensor afterwards. Matrices
get the dtype of the run; norms and biases are always float32.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.base_files import (
    is_routed_expert,
    iter_row_portions,
    list_rounding_warnings,
    make_tied_head_error,
    make_unreadable_error,
)
from expertctl.errors import UsageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, ModelConfig
from expertctl.package.stored_tensor import StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class BaseWeights:
    """All tensors of a base by name; a tied head is absent, the embedding replaces it."""

    tensors: dict[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def get_output_matrix(self) -> Tensor:
        """Return the output matrix, which may be tied to the embedding."""
        return self.tensors.get(HEAD_TENSOR, self.tensors[EMBEDDING_TENSOR])


def load_base_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    experts: bool = True,
    progress: Progress = ignore_progress,
) -> BaseWeights:
    """Read a base, with or without routed experts; ``progress`` counts the bytes of tensors.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when tensors are missing, unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float, or a tied head that differs from the
            embedding.
    """
    stored = read_base_tensors(directory, config)
    wanted = [name for name in config.tensor_shapes() if experts or not is_routed_expert(name)]
    extra = [HEAD_TENSOR] if config.tied and HEAD_TENSOR in stored else []
    compared = {HEAD_TENSOR, EMBEDDING_TENSOR} if extra else set()
    target, found = torch.device(device), dict[str, Tensor]()
    with torch.inference_mode():
        read = {name: stored[name] for name in (*wanted, *extra)}
        for name, tensor in _read(read, dtype, exact=compared):
            found[name] = tensor if name in compared else _convert(tensor, dtype, target)
            if name not in compared:
                progress(found[name].nbytes)
        if config.tied:
            _drop_duplicate_head(directory, found)
        for name in compared & found.keys():
            found[name] = _convert(found[name], dtype, target)
            progress(found[name].nbytes)
    tensors = {name: found[name] for name in wanted}
    name = str(dtype).removeprefix("torch.")
    warnings = list_rounding_warnings([stored[n] for n in config.tensor_shapes()], name)
    return BaseWeights(tensors, dtype, torch.device(device), warnings)


def _read(
    tensors: Mapping[str, StoredTensor], dtype: torch.dtype, *, exact: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors as they are stored; matrices that a codec decodes have ``dtype``.

    Those in ``exact`` are not rounded.
    """
    plain = {name: tensor for name, tensor in tensors.items() if tensor.codec is None}
    for name in tensors.keys() - plain.keys():
        is_rounded = len(tensors[name].info.shape) == 2 and name not in exact
        yield name, _decode_whole(tensors[name], dtype if is_rounded else torch.float32)
    for path in sorted({tensor.path for tensor in plain.values()}):
        try:
            with _open(path) as file:
                here = {name: tensor for name, tensor in plain.items() if tensor.path == path}
                yield from _read_file(file, here)
        except (SafetensorError, OSError) as error:
            raise make_unreadable_error(path, error) from error


def _decode_whole(tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Decode a tensor in portions, so that it is never in memory in float32 besides."""
    whole, done = torch.empty(tensor.info.shape, dtype=dtype), 0
    for rows in iter_row_portions(tensor):
        whole[done : done + len(rows)] = torch.from_numpy(rows)
        done += len(rows)
    return whole


def _read_file(file: Any, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Read each stored tensor of a file once; tensors that are rows of it are views."""
    parts: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(tensor.stored, []).append(name)
    for stored, names in parts.items():
        whole = file.get_tensor(stored)
        for name in names:
            yield name, _slice_rows(whole, tensors[name])


def _slice_rows(whole: Tensor, tensor: StoredTensor) -> Tensor:
    shape, layout = tensor.info.shape, tensor.layout
    if tuple(whole.shape) == shape and layout is None:
        return whole
    if len(shape) < whole.ndim == 2:
        return whole[tensor.row]  # one head's norm of a stack
    rows = whole.T if layout is not None and layout.transposed else whole
    rows = rows.reshape(-1, *shape[1:])[tensor.row :]
    if layout is None or layout.transposed:
        return rows[: shape[0]].contiguous()
    numbers = torch.arange(shape[0])
    return rows[numbers // layout.block * layout.stride + numbers % layout.block]


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


def _drop_duplicate_head(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Drop a tied head that is stored as well; it must equal the embedding."""
    head = tensors.pop(HEAD_TENSOR, None)
    if head is not None and not torch.equal(head, tensors[EMBEDDING_TENSOR]):
        raise make_tied_head_error(directory)


def _convert(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return tensor.to(device, dtype if tensor.ndim == 2 else torch.float32)


_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def parse_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a base's matrices.

    Raises:
        UsageError: for a name without such a dtype.
    """
    if name not in _DTYPES:
        raise UsageError(
            f"torch does not hold a base in {name[:40]!r}, only in {' or '.join(_DTYPES)}",
            hint="--dtype float32 is always possible",
        )
    return _DTYPES[name]
