"""Routed experts in the files of a base, read as the rows that torch multiplies.

Rows stored in the dtype of the run are read straight from the file to where they are wanted.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_stack import StackShape
from expertctl.engine.tensor_packing import portions, read_numbers
from expertctl.package.base_tensors import StoredTensor
from expertctl.store.copy_file import Dropped, always

Numbers = np.ndarray[Any, Any]
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class ExpertRows:
    """Reads the rows of an expert from safetensors files, in the dtype of a stack.

    Where the files hold the experts of a layer as one tensor, these are some of its rows.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], shape: StackShape) -> None:
        """Read from where the tensors of a base lie."""
        self._stored, self._shape = stored, shape

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return how many bytes of files that took.

        Raises:
            InvalidPackageError: when a file cannot be read to its end.
            Dropped: when it is no longer wanted.
        """
        gate_up, down = self._shape.parts(torch.from_numpy(block))
        gate, up = gate_up.tensor_split(2)
        read = 0
        names = ("gate_proj", "up_proj", "down_proj")
        stored = [self._stored[f"{expert_module(layer, expert)}.{name}.weight"] for name in names]
        for tensor, rows in zip(stored, (gate, up, down), strict=True):
            if not is_wanted():
                raise Dropped(read)
            _read(tensor, rows)
            read += tensor.size
        return read

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer of an expert.

        Raises:
            InvalidPackageError: when the file cannot be read to its end.
        """
        tensor = self._stored[f"{module}.weight"]
        rows = torch.empty(tensor.info.shape, dtype=self._shape.dtype)
        _read(tensor, rows)
        return rows

    def lend(self, layer: int, expert: int) -> int | None:
        """Return None: an expert must be on the device that computes it."""
        return None


def expert_module(layer: int, expert: int) -> str:
    """Return the name of an expert in a layer of the base."""
    return f"model.layers.{layer}.mlp.experts.{expert}"


def _read(tensor: StoredTensor, rows: Tensor) -> None:
    dtype = _DTYPES[tensor.info.dtype]
    if dtype is rows.dtype:
        read_numbers(tensor, rows.view(torch.uint8).numpy())
        return
    done = 0
    for numbers in portions(tensor):
        part = torch.from_numpy(numbers).view(dtype)
        rows[done : done + len(part)].copy_(part)
        done += len(part)
