"""Compiling folded layers to tensors: A, B and scales, written into one arena.

Blocks have the dtype of the activations: widening a bfloat16 or float16 adapter once is exact,
narrowing a fused one would not be. If a single expert changes a layer, has that dtype and nothing
multiplies it, its published tensors are used in place, without a copy. Several B are stored as
rows, [rank, out], which takes less than half the time for a single token. A plan for another device
is compiled in host memory and moved as one block.

Factors are multiplied in float32. A plan of ten experts has thousands of small vectors, and a call
for each would take longer than the arithmetic; so the vectors of alike layers (same kinds of steps,
same weights) are concatenated, multiplied together and split again.
"""

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.adapters.fuse import ChainStep, FoldedChain, LowRankBlock, get_factor_vector
from expertctl.engine.devices import use_torch_threads
from expertctl.engine.memory.host import allocate
from expertctl.engine.model.functional import Ia3Tensors, LinearDelta

_FLOAT_BYTES = 4
_PASSING = 3
"""Temporary vectors of all layers, on top of those that are kept."""


@dataclass(frozen=True, slots=True)
class FactorProducts:
    """For one layer: element n - 1 is the product of the last n factors of the chain.

    ``b_scales`` has an entry for each block: the scale of its B, [out], or None if that is only a
    number.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    bias: Sequence[Tensor]
    b_scales: Sequence[Tensor | None]

    def a_scale(self, block: LowRankBlock) -> Tensor | None:
        """Return the scale of a block's A, [in]."""
        return self.inputs[block.inputs_after - 1] if block.inputs_after else None


def batch_key(layer: FoldedChain) -> Hashable:
    """Return a key that is equal for layers whose factors can be multiplied together."""
    blocks = [
        (b.factor, b.dora_scale is None, b.inputs_after, b.outputs_after) for b in layer.blocks
    ]
    links = (*layer.inputs, *layer.outputs)
    factors = [(isinstance(link.step, Ia3Tensors), link.weight) for link in links]
    return (tuple(blocks), tuple(factors), len(layer.inputs))


def factor_scratch_bytes(layers: Sequence[FoldedChain]) -> int:
    """Return the maximum bytes of `multiply_factors` for alike layers, including its result."""
    first = layers[0]
    scaled = sum(b.outputs_after > 0 or b.dora_scale is not None for b in first.blocks)
    across = len(first.outputs) + len(first.bias_factors) + scaled
    height = sum(map(_output_height, layers)) if across else 0
    width = sum(map(_input_width, layers))
    return _FLOAT_BYTES * ((across + _PASSING) * height + (len(first.inputs) + _PASSING) * width)


def multiply_factors(layers: Sequence[FoldedChain]) -> list[FactorProducts]:
    """Multiply the factors of alike layers."""
    widths, heights = list(map(_input_width, layers)), list(map(_output_height, layers))
    outputs = _running_products([layer.outputs for layer in layers])
    return [
        FactorProducts(*each)
        for each in zip(
            _split_layers(_running_products([layer.inputs for layer in layers]), widths),
            _split_layers(outputs, heights),
            _split_layers(_running_products([layer.bias_factors for layer in layers]), heights),
            _split_layers(_b_scales(layers, outputs), heights),
            strict=True,
        )
    ]


def _running_products(rows: Sequence[Sequence[ChainStep]]) -> list[Tensor]:
    """Return the running products of factors, with all layers concatenated."""
    return list(accumulate((_link_factor(column) for column in zip(*rows, strict=True)), torch.mul))


def _link_factor(links: Sequence[ChainStep]) -> Tensor:
    """Return ``1 + w * (vector - 1)`` of steps with one weight, concatenated; exact if w is 1."""
    together = torch.cat([get_factor_vector(link) for link in links]).to(torch.float32)
    one = torch.ones(1, device=together.device)
    return torch.lerp(one, together, links[0].weight)


def _b_scales(layers: Sequence[FoldedChain], outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Multiply, for each block, the factors after it, its DoRA scale if any, and its number."""
    found: list[Tensor | None] = []
    for place in zip(*(layer.blocks for layer in layers), strict=True):
        block = place[0]
        scales = [each.dora_scale for each in place if each.dora_scale is not None]
        vectors = [outputs[block.outputs_after - 1]] if block.outputs_after else []
        vectors += [torch.cat(scales)] if scales else []
        found.append(reduce(torch.mul, vectors) * block.factor if vectors else None)
    return found


def _input_width(layer: FoldedChain) -> int:
    """Return the length of a layer's input factors, or 0."""
    return len(get_factor_vector(layer.inputs[0])) if layer.inputs else 0


def _output_height(layer: FoldedChain) -> int:
    """Return the number of outputs of a layer, or 0 if nothing multiplies them."""
    if layer.blocks:
        return len(layer.blocks[0].step.b)
    return len(get_factor_vector(layer.outputs[0])) if layer.outputs else 0


def _split_layers(columns: Sequence[Any], sizes: list[int]) -> list[tuple[Any, ...]]:
    """Split tensors of concatenated layers, or None; return those of each layer."""
    none = (None,) * len(sizes)
    split = [none if each is None else each.split_with_sizes(sizes) for each in columns]
    return list(zip(*split, strict=True)) if split else [()] * len(sizes)


_GROUP_LAYERS = 16
"""Layers whose factors are multiplied together."""


@dataclass(frozen=True)
class DeltaCompiler:
    """Folded layers to be compiled to tensors; the cost is known in advance."""

    layers: Mapping[str, FoldedChain]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def element_counts(self) -> Mapping[str, int]:
        """The number of elements of each layer."""
        dtype, device = self.dtype, self.device
        return {name: count_elements(each, dtype, device) for name, each in self.layers.items()}

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names of alike layers."""
        return group_alike_layers(self.layers)

    @property
    def nbytes(self) -> int:
        """The bytes that `compile` will allocate."""
        return sum(self.element_counts.values()) * self.dtype.itemsize

    @property
    def width(self) -> int:
        """Maximum number of columns between A and B; 1 if there are only scales."""
        return max((max(folded.rank, 1) for folded in self.layers.values()), default=0)

    @property
    def shares_adapter_memory(self) -> bool:
        """Whether published tensors are used in place."""
        layers, dtype, device = self.layers.values(), self.dtype, self.device
        return any(any(_shares_tensors(each, dtype, device)) for each in layers)

    def scratch_bytes(self, workers: int) -> int:
        """Return the maximum additional bytes of host memory that this many workers need."""
        groups = ([self.layers[name] for name in group] for group in self.groups)
        each = map(factor_scratch_bytes, groups)
        staged = 0 if self.device.type == "cpu" else self.nbytes
        return staged + sum(sorted(each, reverse=True)[:workers])

    def compile(self, workers: int) -> dict[str, LinearDelta]:
        """Compile each group; torch's own threads are off, because each copy is small."""
        sizes = [sum(self.element_counts[name] for name in group) for group in self.groups]
        data = _allocate(sum(sizes), self.dtype)
        arena = TensorArena(data, self.device)
        shares = [arena.split(size) for size in sizes]
        folded = [[self.layers[name] for name in group] for group in self.groups]
        with use_torch_threads(1), ExitStack() as stack:
            # a new thread has cold caches and a new heap: not worth it for a single worker
            each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
            done = list(each(compile_layer_group, folded, shares))
        names = chain.from_iterable(self.groups)
        found = dict(zip(names, chain.from_iterable(done), strict=True))
        if self.device.type != "cpu":
            found = _rebase_deltas(found, data.to(self.device))
        return {module: found[module] for module in self.layers}


class TensorArena:
    """Memory that tensors are allocated from."""

    def __init__(self, data: Tensor, device: torch.device | None = None) -> None:
        """Allocate from ``data``, [elements]; ``device`` is the final device if it differs."""
        self.dtype, self.device = data.dtype, device or data.device
        self._data, self._taken = data, 0

    def allocate(self, *shape: int) -> Tensor:
        """Return the next tensor."""
        begin = self._taken
        self._taken += torch.Size(shape).numel()
        return self._data[begin : self._taken].view(shape)

    def split(self, elements: int) -> "TensorArena":
        """Return an arena for the next elements."""
        return TensorArena(self.allocate(elements), self.device)


def group_alike_layers(layers: Mapping[str, FoldedChain]) -> tuple[tuple[str, ...], ...]:
    """Return groups of names of alike layers, at most `_GROUP_LAYERS` each."""
    alike: dict[Hashable, list[str]] = {}
    for name, folded in layers.items():
        alike.setdefault(batch_key(folded), []).append(name)
    return tuple(
        tuple(names[i : i + _GROUP_LAYERS])
        for names in alike.values()
        for i in range(0, len(names), _GROUP_LAYERS)
    )


def count_elements(folded: FoldedChain, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of elements that `compile_layer_group` allocates for a layer."""
    share_a, share_b = _shares_tensors(folded, dtype, device)
    a = 0 if share_a else sum(block.step.a.numel() for block in folded.blocks)
    b = 0 if share_b else sum(block.step.b.numel() for block in folded.blocks)
    return a + b + folded.scale_elements


@torch.inference_mode()
def compile_layer_group(layers: Sequence[FoldedChain], arena: TensorArena) -> list[LinearDelta]:
    """Compile a few alike layers, so that the vectors being multiplied stay in the caches."""
    pairs = zip(layers, multiply_factors(layers), strict=True)
    return [_compile_delta(folded, factors, arena) for folded, factors in pairs]


def _compile_delta(folded: FoldedChain, factors: FactorProducts, arena: TensorArena) -> LinearDelta:
    share_a, share_b = _shares_tensors(folded, arena.dtype, arena.device)
    first = folded.blocks[0].step if folded.blocks else None
    return LinearDelta(
        a=first.a if first and share_a else _stack_a(folded.blocks, factors, arena),
        b=first.b if first and share_b else _stack_b(folded.blocks, factors, arena),
        input_scale=_store_product(factors.inputs, arena),
        output_scale=_store_product(factors.outputs, arena),
        bias_scale=_store_product(factors.bias, arena),
    )


def _stack_a(
    blocks: Sequence[LowRankBlock], factors: FactorProducts, arena: TensorArena
) -> Tensor | None:
    """Return A, [sum of ranks, in], each block times the input factors after it."""
    if not blocks:
        return None
    ranks = [block.step.rank for block in blocks]
    a = arena.allocate(sum(ranks), blocks[0].step.a.shape[1])
    parts = a.split_with_sizes(ranks)
    torch._foreach_copy_(parts, [block.step.a for block in blocks])
    for part, block in zip(parts, blocks, strict=True):
        if (scale := factors.a_scale(block)) is not None:
            part.mul_(scale)
    return a


def _stack_b(
    blocks: Sequence[LowRankBlock], factors: FactorProducts, arena: TensorArena
) -> Tensor | None:
    """Return B, [out, sum of ranks], each block times its scale."""
    if not blocks:
        return None
    ranks, out = [block.step.rank for block in blocks], len(blocks[0].step.b)
    rows = arena.allocate(out, *ranks).T if len(blocks) == 1 else arena.allocate(sum(ranks), out)
    parts = rows.split_with_sizes(ranks)
    for part, block, scale in zip(parts, blocks, factors.b_scales, strict=True):
        _write_product(part, block.step.b.T, block.factor if scale is None else scale)
    return rows.T


def _write_product(target: Tensor, source: Tensor, scale: Tensor | float) -> None:
    """Write the product in the dtype of the target; if the dtypes are equal this is one pass."""
    if source.dtype == target.dtype and source.device == target.device:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source).mul_(scale)


def _store_product(running: Sequence[Tensor], arena: TensorArena) -> Tensor | None:
    """Return the product of all factors, stored in the arena; None if there are no factors."""
    return arena.allocate(len(running[-1])).copy_(running[-1]) if running else None


def _shares_tensors(
    folded: FoldedChain, dtype: torch.dtype, device: torch.device
) -> tuple[bool, bool]:
    """Return whether A, and whether B, can be the published tensor itself."""
    if len(folded.blocks) != 1:
        return False, False
    [block] = folded.blocks
    fits = block.step.a.dtype == dtype and block.step.a.device == device
    return fits and block.keeps_a, fits and block.keeps_b


def _rebase_deltas(deltas: Mapping[str, LinearDelta], block: Tensor) -> dict[str, LinearDelta]:
    """Return the same tensors in a copy of the block that they were allocated from."""

    def there(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return block.as_strided(part.shape, part.stride(), part.storage_offset())

    names = [each.name for each in fields(LinearDelta)]
    return {
        module: LinearDelta(**{name: there(getattr(delta, name)) for name in names})
        for module, delta in deltas.items()
    }


def _allocate(elements: int, dtype: torch.dtype) -> Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    block = allocate(elements * dtype.itemsize)
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype)
