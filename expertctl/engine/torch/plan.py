"""Stored numbers as torch tensors, and adapter plans for torch backends.

A plan is compiled to arrays in host memory. On the processor its tensors are views of those; for a
device the whole plan, published arrays included, is moved as one block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.adapters.fuse import FoldedChain
from expertctl.engine.adapters.plan_tensors import DeltaCompiler, FloatDelta, allocate_floats
from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.torch.functional import PlanDeltas, TorchDelta

_FLOAT_BYTES = 4


def to_tensor(numbers: FloatArray) -> Tensor:
    """Return stored numbers as a tensor in the same memory."""
    if numbers.dtype == np.uint16:
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(numbers)


def to_array(tensor: Tensor) -> FloatArray:
    """Return a tensor as stored numbers, in the same memory if that is on the host."""
    there = tensor.detach().cpu()
    if there.dtype is torch.bfloat16:
        bits: FloatArray = there.view(torch.int16).numpy().view(np.uint16)
        return bits
    found: FloatArray = there.numpy()
    return found


@dataclass(frozen=True)
class TorchPlanCompiler:
    """Folded layers to be compiled to tensors on a device; the cost is known in advance."""

    layers: Mapping[str, FoldedChain]
    device: str

    @cached_property
    def host(self) -> DeltaCompiler:
        """The compiler in host memory."""
        return DeltaCompiler(self.layers, in_place=self._is_on_host)

    @property
    def nbytes(self) -> int:
        """The bytes that `compile` will allocate on the device."""
        return self.host.nbytes

    @property
    def width(self) -> int:
        """Maximum number of columns between A and B; 1 if there are only scales."""
        return self.host.width

    @property
    def shares_adapter_memory(self) -> bool:
        """Whether published arrays are used in place."""
        return self.host.shares_adapter_memory

    def scratch_bytes(self, workers: int) -> int:
        """Return the maximum additional bytes of host memory that this many workers need."""
        return self.host.scratch_bytes(workers) + (0 if self._is_on_host else self.nbytes)

    def compile(self, workers: int) -> PlanDeltas:
        """Compile each group, and move the plan to its device."""
        if self._is_on_host:
            compiled = self.host.compile(workers)
            return PlanDeltas({name: _view_delta(each) for name, each in compiled.items()})
        memory = allocate_floats(self.nbytes // _FLOAT_BYTES)
        deltas = self.host.compile_into(memory, workers)
        block = torch.from_numpy(memory).to(self.device)
        return PlanDeltas({n: _move_delta(each, memory, block) for n, each in deltas.items()})

    @property
    def _is_on_host(self) -> bool:
        return self.device == "cpu"


def _view_delta(delta: FloatDelta) -> TorchDelta:
    parts = {name: getattr(delta, name) for name in _PARTS}
    return LinearDelta(
        **{name: None if part is None else torch.from_numpy(part) for name, part in parts.items()}
    )


def _move_delta(delta: FloatDelta, memory: AnyArray, block: Tensor) -> TorchDelta:
    """Return the same arrays in a copy of the memory that they were allocated from."""
    first = memory.ctypes.data

    def find(part: AnyArray | None) -> Tensor | None:
        if part is None:
            return None
        strides = [stride // _FLOAT_BYTES for stride in part.strides]
        return block.as_strided(part.shape, strides, (part.ctypes.data - first) // _FLOAT_BYTES)

    return LinearDelta(**{name: find(getattr(delta, name)) for name in _PARTS})


_PARTS = tuple(each.name for each in fields(LinearDelta))
