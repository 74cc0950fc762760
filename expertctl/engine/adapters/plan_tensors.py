"""What folding multiplies: the factors of layers that are alike, in float32, as if they were one.

A plan of ten experts has thousands of small vectors, and a call for each would take longer than
all of its numbers. Layers that the same kinds of steps change with the same numbers are laid end
to end, multiplied together and cut apart again.

The tensors of a compiled plan: A, B and factors of folded layers, written into one arena.

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
from functools import cached_property, reduce
from itertools import accumulate, chain
from typing import TypeVar

import torch
from torch import Tensor

from expertctl.engine.adapters.fuse import ChainStep, FoldedChain, LowRankBlock, get_factor_vector
from expertctl.engine.devices import use_torch_threads
from expertctl.engine.memory.host import allocate
from expertctl.engine.model.functional import Ia3Tensors, LinearDelta

T = TypeVar("T")
_FLOAT_BYTES = 4
_PASSING = 3
"""How many vectors of all layers exist for a moment beside those that are kept."""


@dataclass(frozen=True, slots=True)
class FactorProducts:
    """For one layer: element n - 1 is the product of the n factors from the end of the chain.

    ``b_scales`` has an entry for each block: all that multiplies its B, [out]; None where that is
    its number alone.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    bias: Sequence[Tensor]
    b_scales: Sequence[Tensor | None]

    def a_scale(self, block: LowRankBlock) -> Tensor | None:
        """Return what multiplies A of a block, [in]."""
        return self.inputs[block.inputs_after - 1] if block.inputs_after else None


def batch_key(layer: FoldedChain) -> Hashable:
    """Return what layers must have in common to be multiplied together."""
    blocks = [
        (b.factor, b.dora_scale is None, b.inputs_after, b.outputs_after) for b in layer.blocks
    ]
    links = (*layer.inputs, *layer.outputs)
    factors = [(isinstance(link.step, Ia3Tensors), link.weight) for link in links]
    return (tuple(blocks), tuple(factors), len(layer.inputs))


def factor_scratch_bytes(layers: Sequence[FoldedChain]) -> int:
    """Return what `multiply_factors` of layers that are alike takes at most, its result included."""
    first = layers[0]
    scaled = [
        block for block in first.blocks if block.outputs_after or block.dora_scale is not None
    ]
    across = len(first.outputs) + len(first.bias_factors) + len(scaled)
    height = sum(map(_output_height, layers)) if across else 0
    width = sum(map(_input_width, layers))
    return _FLOAT_BYTES * ((across + _PASSING) * height + (len(first.inputs) + _PASSING) * width)


def multiply_factors(layers: Sequence[FoldedChain]) -> list[FactorProducts]:
    """Multiply the factors of layers that are alike."""
    inputs = _running_products([layer.inputs for layer in layers])
    outputs = _running_products([layer.outputs for layer in layers])
    bias = _running_products([layer.bias_factors for layer in layers])
    b_scales = _b_scales(layers, outputs)
    widths = [_input_width(layer) for layer in layers]
    heights = [_output_height(layer) for layer in layers]
    nothing: tuple[None, ...] = (None,) * len(layers)
    return [
        FactorProducts(*each)
        for each in zip(
            _transpose_layers([_split_layers(one, widths) for one in inputs], len(layers)),
            _transpose_layers([_split_layers(one, heights) for one in outputs], len(layers)),
            _transpose_layers([_split_layers(one, heights) for one in bias], len(layers)),
            _transpose_layers(
                [_split_layers(s, heights) if s is not None else nothing for s in b_scales],
                len(layers),
            ),
            strict=True,
        )
    ]


def _running_products(rows: Sequence[Sequence[ChainStep]]) -> list[Tensor]:
    """Return the running products of factors, all layers end to end."""
    return list(accumulate((_link_factor(column) for column in zip(*rows, strict=True)), torch.mul))


def _link_factor(links: Sequence[ChainStep]) -> Tensor:
    """Return ``1 + w * (vector - 1)`` of links with one weight, end to end; exact where w is 1."""
    together = torch.cat([get_factor_vector(link) for link in links]).to(torch.float32)
    one = torch.ones(1, device=together.device)
    return torch.lerp(one, together, links[0].weight)


def _b_scales(layers: Sequence[FoldedChain], outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Multiply, for each block, the factors after it, its gain if it is DoRA, and its number."""
    found: list[Tensor | None] = []
    for place in zip(*(layer.blocks for layer in layers), strict=True):
        block = place[0]
        gains = [each.dora_scale for each in place if each.dora_scale is not None]
        vectors = [outputs[block.outputs_after - 1]] if block.outputs_after else []
        vectors += [torch.cat(gains)] if gains else []
        found.append(reduce(torch.mul, vectors) * block.factor if vectors else None)
    return found


def _input_width(layer: FoldedChain) -> int:
    """Return how many inputs a layer has, as far as anything multiplies them."""
    return len(get_factor_vector(layer.inputs[0])) if layer.inputs else 0


def _output_height(layer: FoldedChain) -> int:
    """Return how many outputs a layer has, as far as anything multiplies them."""
    if layer.blocks:
        return len(layer.blocks[0].step.b)
    return len(get_factor_vector(layer.outputs[0])) if layer.outputs else 0


def _split_layers(together: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return together.split_with_sizes(list(sizes))


def _transpose_layers(columns: Sequence[Sequence[T]], layers: int) -> list[tuple[T, ...]]:
    """Turn what each factor has for all layers into what each layer has of all factors."""
    return list(zip(*columns, strict=True)) if columns else [()] * layers


_GROUP_LAYERS = 16
"""How many layers have their factors multiplied at a time."""


@dataclass(frozen=True)
class DeltaCompiler:
    """Folded layers that are to become tensors; what that costs is known before."""

    layers: Mapping[str, FoldedChain]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def element_counts(self) -> Mapping[str, int]:
        """How many numbers each layer takes."""
        return {
            name: count_elements(each, self.dtype, self.device)
            for name, each in self.layers.items()
        }

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of layers that are alike, some at a time."""
        return group_alike_layers(self.layers)

    @property
    def nbytes(self) -> int:
        """What `compile` will allocate."""
        return sum(self.element_counts.values()) * self.dtype.itemsize

    @property
    def width(self) -> int:
        """How wide rows between A and B are; 1 where there are factors alone."""
        return max((max(folded.rank, 1) for folded in self.layers.values()), default=0)

    @property
    def shares_adapter_memory(self) -> bool:
        """Whether published tensors are used as they lie in memory."""
        return any(
            any(_shares_tensors(each, self.dtype, self.device)) for each in self.layers.values()
        )

    def scratch_bytes(self, workers: int) -> int:
        """Return what so many workers need besides in the machine's memory, at most."""
        each = [
            factor_scratch_bytes([self.layers[name] for name in group]) for group in self.groups
        ]
        staged = 0 if self.device.type == "cpu" else self.nbytes
        return staged + sum(sorted(each, reverse=True)[:workers])

    def compile(self, workers: int) -> dict[str, LinearDelta]:
        """Compile group after group; each copy is small, so torch's own threads stay out of it."""
        sizes = [sum(self.element_counts[name] for name in group) for group in self.groups]
        data = _allocate(sum(sizes), self.dtype)
        arena = TensorArena(data, self.device)
        shares = [arena.split(size) for size in sizes]
        folded = [[self.layers[name] for name in group] for group in self.groups]
        with use_torch_threads(1), ExitStack() as stack:
            # a new thread has its caches to fill and its heap to grow: not worth it for one alone
            each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
            done = list(each(compile_layer_group, folded, shares))
        names = chain.from_iterable(self.groups)
        found = dict(zip(names, chain.from_iterable(done), strict=True))
        if self.device.type != "cpu":
            found = _rebase_deltas(found, data.to(self.device))
        return {module: found[module] for module in self.layers}


class TensorArena:
    """Memory that tensors are cut from."""

    def __init__(self, data: Tensor, device: torch.device | None = None) -> None:
        """Cut from these numbers, [elements]; ``device`` is where they go, if that is elsewhere."""
        self.dtype, self.device = data.dtype, device or data.device
        self._data, self._taken = data, 0

    def allocate(self, *shape: int) -> Tensor:
        """Return the next tensor."""
        begin = self._taken
        self._taken += torch.Size(shape).numel()
        return self._data[begin : self._taken].view(shape)

    def split(self, elements: int) -> "TensorArena":
        """Return an arena of the next numbers."""
        return TensorArena(self.allocate(elements), self.device)


def group_alike_layers(layers: Mapping[str, FoldedChain]) -> tuple[tuple[str, ...], ...]:
    """Return the names of layers that are alike, some at a time."""
    alike: dict[Hashable, list[str]] = {}
    for name, folded in layers.items():
        alike.setdefault(batch_key(folded), []).append(name)
    return tuple(
        tuple(names[i : i + _GROUP_LAYERS])
        for names in alike.values()
        for i in range(0, len(names), _GROUP_LAYERS)
    )


def count_elements(folded: FoldedChain, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many numbers `compile_layer_group` takes for a layer."""
    share_a, share_b = _shares_tensors(folded, dtype, device)
    a = 0 if share_a else sum(block.step.a.numel() for block in folded.blocks)
    b = 0 if share_b else sum(block.step.b.numel() for block in folded.blocks)
    return a + b + folded.scale_elements


@torch.inference_mode()
def compile_layer_group(layers: Sequence[FoldedChain], arena: TensorArena) -> list[LinearDelta]:
    """Compile layers that are alike; few, so that what is multiplied stays in the caches."""
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
    """Return B, [out, sum of ranks], each block times all that multiplies it."""
    if not blocks:
        return None
    ranks, out = [block.step.rank for block in blocks], len(blocks[0].step.b)
    rows = arena.allocate(out, *ranks).T if len(blocks) == 1 else arena.allocate(sum(ranks), out)
    parts = rows.split_with_sizes(ranks)
    for part, block, scale in zip(parts, blocks, factors.b_scales, strict=True):
        _write_product(part, block.step.b.T, block.factor if scale is None else scale)
    return rows.T


def _write_product(target: Tensor, source: Tensor, scale: Tensor | float) -> None:
    """Write the product, multiplied in the type of the target; of one type it takes one pass."""
    if source.dtype == target.dtype and source.device == target.device:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source).mul_(scale)


def _store_product(running: Sequence[Tensor], arena: TensorArena) -> Tensor | None:
    """Return the product of all factors as part of the plan; None when there is none."""
    return arena.allocate(len(running[-1])).copy_(running[-1]) if running else None


def _shares_tensors(
    folded: FoldedChain, dtype: torch.dtype, device: torch.device
) -> tuple[bool, bool]:
    """Whether A, and whether B, can be the published tensor itself."""
    if len(folded.blocks) != 1:
        return False, False
    [block] = folded.blocks
    fits = block.step.a.dtype == dtype and block.step.a.device == device
    return fits and block.keeps_a, fits and block.keeps_b


def _rebase_deltas(deltas: Mapping[str, LinearDelta], block: Tensor) -> dict[str, LinearDelta]:
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


def _allocate(elements: int, dtype: torch.dtype) -> Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    block = allocate(elements * dtype.itemsize)
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype)
