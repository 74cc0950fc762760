"""The tensors of a compiled plan: A, B and factors of folded layers, written into one arena.

Blocks are kept in the dtype of the activations: widening a bfloat16 or float16 adapter once is
exact, narrowing a folded one would not be. Where one expert alone changes a layer, has that dtype
and nothing multiplies it, its published tensors are used as they lie in memory, with no copy.
Several B are written as rows, [rank, out]: one token then takes less than half the time. What is
for another device is compiled in the machine's memory and moved there as one block.
"""

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from expertctl.engine.fold import Block, Folded
from expertctl.engine.linear import LinearDelta
from expertctl.engine.memory import allocate
from expertctl.engine.products import Products, likeness, products, scratch_bytes
from expertctl.engine.threads import threads

_TOGETHER = 16
"""How many layers have their factors multiplied at a time."""


@dataclass(frozen=True)
class DeltaTensors:
    """Folded layers that are to become tensors; what that costs is known before."""

    layers: Mapping[str, Folded]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """How many numbers each layer takes."""
        return {name: elements(each, self.dtype, self.device) for name, each in self.layers.items()}

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of layers that are alike, some at a time."""
        return groups(self.layers)

    @property
    def nbytes(self) -> int:
        """What `compile` will allocate."""
        return sum(self.numbers.values()) * self.dtype.itemsize

    @property
    def width(self) -> int:
        """How wide rows between A and B are; 1 where there are factors alone."""
        return max((max(folded.rank, 1) for folded in self.layers.values()), default=0)

    @property
    def uses_in_place(self) -> bool:
        """Whether published tensors are used as they lie in memory."""
        return any(any(_shared(each, self.dtype, self.device)) for each in self.layers.values())

    def scratch_bytes(self, workers: int) -> int:
        """Return what so many workers need besides in the machine's memory, at most."""
        each = [scratch_bytes([self.layers[name] for name in group]) for group in self.groups]
        staged = 0 if self.device.type == "cpu" else self.nbytes
        return staged + sum(sorted(each, reverse=True)[:workers])

    def compile(self, workers: int) -> dict[str, LinearDelta]:
        """Compile group after group; each copy is small, so torch's own threads stay out of it."""
        sizes = [sum(self.numbers[name] for name in group) for group in self.groups]
        data = _empty(sum(sizes), self.dtype)
        arena = Arena(data, self.device)
        shares = [arena.share(size) for size in sizes]
        folded = [[self.layers[name] for name in group] for group in self.groups]
        with threads(1), ExitStack() as stack:
            # a new thread has its caches to fill and its heap to grow: not worth it for one alone
            each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
            done = list(each(compile_alike, folded, shares))
        names = chain.from_iterable(self.groups)
        found = dict(zip(names, chain.from_iterable(done), strict=True))
        if self.device.type != "cpu":
            found = _moved(found, data.to(self.device))
        return {module: found[module] for module in self.layers}


class Arena:
    """Memory that tensors are cut from."""

    def __init__(self, data: Tensor, device: torch.device | None = None) -> None:
        """Cut from these numbers, [elements]; ``device`` is where they go, if that is elsewhere."""
        self.dtype, self.device = data.dtype, device or data.device
        self._data, self._taken = data, 0

    def take(self, *shape: int) -> Tensor:
        """Return the next tensor."""
        begin = self._taken
        self._taken += torch.Size(shape).numel()
        return self._data[begin : self._taken].view(shape)

    def share(self, elements: int) -> "Arena":
        """Return an arena of the next numbers."""
        return Arena(self.take(elements), self.device)


def groups(layers: Mapping[str, Folded]) -> tuple[tuple[str, ...], ...]:
    """Return the names of layers that are alike, some at a time."""
    alike: dict[Hashable, list[str]] = {}
    for name, folded in layers.items():
        alike.setdefault(likeness(folded), []).append(name)
    return tuple(
        tuple(names[i : i + _TOGETHER])
        for names in alike.values()
        for i in range(0, len(names), _TOGETHER)
    )


def elements(folded: Folded, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many numbers `compile_alike` takes for a layer."""
    share_a, share_b = _shared(folded, dtype, device)
    a = 0 if share_a else sum(block.step.a.numel() for block in folded.blocks)
    b = 0 if share_b else sum(block.step.b.numel() for block in folded.blocks)
    return a + b + folded.scale_elements


@torch.inference_mode()
def compile_alike(layers: Sequence[Folded], arena: Arena) -> list[LinearDelta]:
    """Compile layers that are alike; few, so that what is multiplied stays in the caches."""
    pairs = zip(layers, products(layers), strict=True)
    return [_delta(folded, factors, arena) for folded, factors in pairs]


def _delta(folded: Folded, factors: Products, arena: Arena) -> LinearDelta:
    share_a, share_b = _shared(folded, arena.dtype, arena.device)
    first = folded.blocks[0].step if folded.blocks else None
    return LinearDelta(
        a=first.a if first and share_a else _stacked_a(folded.blocks, factors, arena),
        b=first.b if first and share_b else _stacked_b(folded.blocks, factors, arena),
        input_scale=_kept(factors.inputs, arena),
        output_scale=_kept(factors.outputs, arena),
        bias_scale=_kept(factors.bias, arena),
    )


def _stacked_a(blocks: Sequence[Block], factors: Products, arena: Arena) -> Tensor | None:
    """Return A, [sum of ranks, in], each block times the input factors after it."""
    if not blocks:
        return None
    ranks = [block.step.rank for block in blocks]
    a = arena.take(sum(ranks), blocks[0].step.a.shape[1])
    parts = a.split_with_sizes(ranks)
    torch._foreach_copy_(parts, [block.step.a for block in blocks])
    for part, block in zip(parts, blocks, strict=True):
        if (scale := factors.a_scale(block)) is not None:
            part.mul_(scale)
    return a


def _stacked_b(blocks: Sequence[Block], factors: Products, arena: Arena) -> Tensor | None:
    """Return B, [out, sum of ranks], each block times all that multiplies it."""
    if not blocks:
        return None
    ranks, out = [block.step.rank for block in blocks], len(blocks[0].step.b)
    rows = arena.take(out, *ranks).T if len(blocks) == 1 else arena.take(sum(ranks), out)
    parts = rows.split_with_sizes(ranks)
    for part, block, scale in zip(parts, blocks, factors.b_scales, strict=True):
        _write(part, block.step.b.T, block.factor if scale is None else scale)
    return rows.T


def _write(target: Tensor, source: Tensor, scale: Tensor | float) -> None:
    """Write the product, multiplied in the type of the target; of one type it takes one pass."""
    if source.dtype == target.dtype and source.device == target.device:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source).mul_(scale)


def _kept(running: Sequence[Tensor], arena: Arena) -> Tensor | None:
    """Return the product of all factors as part of the plan; None when there is none."""
    return arena.take(len(running[-1])).copy_(running[-1]) if running else None


def _shared(folded: Folded, dtype: torch.dtype, device: torch.device) -> tuple[bool, bool]:
    """Whether A, and whether B, can be the published tensor itself."""
    if len(folded.blocks) != 1:
        return False, False
    [block] = folded.blocks
    fits = block.step.a.dtype == dtype and block.step.a.device == device
    return fits and block.keeps_a, fits and block.keeps_b


def _moved(deltas: Mapping[str, LinearDelta], block: Tensor) -> dict[str, LinearDelta]:
    """Return the same parts of another block, which is a copy of the one they were cut from."""

    def there(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return block.as_strided(part.shape, part.stride(), part.storage_offset())

    return {
        module: LinearDelta(
            a=there(delta.a),
            b=there(delta.b),
            input_scale=there(delta.input_scale),
            output_scale=there(delta.output_scale),
            bias_scale=there(delta.bias_scale),
        )
        for module, delta in deltas.items()
    }


def _empty(elements: int, dtype: torch.dtype) -> Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    block = allocate(elements * dtype.itemsize)
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype)
