"""Compiling folded layers to arrays: A, B and scales, written into one arena.

All are float32: widening a bfloat16 or float16 adapter once is exact, narrowing a fused one would
not be. If a single expert changes a layer, was published in float32 and nothing multiplies it, its
arrays are used in place, without a copy. Several B are stored as rows, [rank, out], which takes
less than half the time for a single token.

Factors are multiplied in float32. A plan of ten experts has thousands of small vectors, and a call
for each would take longer than the arithmetic; so the vectors of alike layers (same kinds of steps,
same weights and dtypes) are concatenated, multiplied together and split again.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np

from expertctl.engine.adapters.fuse import ChainStep, FoldedChain, LowRankBlock, get_factor_vector
from expertctl.engine.adapters.steps import Ia3Tensors, LinearDelta
from expertctl.engine.arrays import (
    AnyArray,
    FloatArray,
    join_rows,
    joining_scratch_bytes,
    split_rows,
    widen,
)
from expertctl.engine.memory.host import allocate

FloatDelta = LinearDelta[FloatArray]
"""The compiled change of one layer, float32."""
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class FactorProducts:
    """For one layer: element n - 1 is the product of the last n factors of the chain.

    ``b_scales`` has an entry for each block: the scale of its B, [out], or None if that is only a
    number.
    """

    inputs: Sequence[AnyArray]
    outputs: Sequence[AnyArray]
    bias: Sequence[AnyArray]
    b_scales: Sequence[AnyArray | None]

    def a_scale(self, block: LowRankBlock) -> AnyArray | None:
        """Return the scale of a block's A, [in]."""
        return self.inputs[block.inputs_after - 1] if block.inputs_after else None


def batch_key(layer: FoldedChain) -> Hashable:
    """Return a key that is equal for layers whose factors can be multiplied together."""
    blocks = [
        (b.factor, b.dora_scale is None, b.inputs_after, b.outputs_after) for b in layer.blocks
    ]
    links = (*layer.inputs, *layer.outputs)
    return (tuple(blocks), tuple(map(_factor_key, links)), len(layer.inputs))


def _factor_key(link: ChainStep) -> Hashable:
    published = link.step.vector.dtype if isinstance(link.step, Ia3Tensors) else None
    return (published, link.weight)


def factor_scratch_bytes(layers: Sequence[FoldedChain]) -> int:
    """Return the maximum bytes of `multiply_factors` for alike layers, including its result."""
    first = layers[0]
    scaled = sum(b.outputs_after > 0 or b.dora_scale is not None for b in first.blocks)
    across = len(first.outputs) + len(first.bias_factors) + scaled
    height, width = sum(map(_output_height, layers)), sum(map(_input_width, layers))
    kept = across * height + len(first.inputs) * width
    published = max(height if across else 0, width)  # one concatenated factor, not yet widened
    return _FLOAT_BYTES * (kept + published)


def multiply_factors(layers: Sequence[FoldedChain]) -> list[FactorProducts]:
    """Multiply the factors of alike layers."""
    widths, heights = list(map(_input_width, layers)), list(map(_output_height, layers))
    inputs = _running_products([layer.inputs for layer in layers])
    outputs = _running_products([layer.outputs for layer in layers])
    bias = _running_products([layer.bias_factors for layer in layers])
    split = (
        _split_layers(inputs, widths),
        _split_layers(outputs, heights),
        _split_layers(bias, heights),
        _split_layers(_b_scales(layers, outputs), heights),
    )
    return [FactorProducts(*each) for each in zip(*split, strict=True)]


def _running_products(rows: Sequence[Sequence[ChainStep]]) -> list[AnyArray]:
    """Return the running products of factors, with all layers concatenated."""
    found: list[AnyArray] = []
    for column in zip(*rows, strict=True):
        factor = _link_factor(column)
        if found:
            np.multiply(factor, found[-1], out=factor)
        found.append(factor)
    return found


def _link_factor(links: Sequence[ChainStep]) -> AnyArray:
    """Return ``1 + w * (vector - 1)`` of steps with one weight, concatenated; exact if w is 1."""
    weight = links[0].weight
    together = widen(np.concatenate([get_factor_vector(link) for link in links]))
    if weight != 1.0:
        together -= 1
        together *= weight
        together += 1
    return together


def _b_scales(layers: Sequence[FoldedChain], outputs: Sequence[AnyArray]) -> list[AnyArray | None]:
    """Multiply, for each block, its number, its DoRA scale if any, and the factors after it."""
    found: list[AnyArray | None] = []
    for place in zip(*(layer.blocks for layer in layers), strict=True):
        block = place[0]
        after = outputs[block.outputs_after - 1] if block.outputs_after else None
        scales = [each.dora_scale for each in place if each.dora_scale is not None]
        if scales:
            together = np.concatenate(scales)
            together *= block.factor
            found.append(together if after is None else np.multiply(together, after, out=together))
        else:
            found.append(None if after is None else after * np.float32(block.factor))
    return found


def _input_width(layer: FoldedChain) -> int:
    """Return the length of a layer's input factors, or 0."""
    return len(get_factor_vector(layer.inputs[0])) if layer.inputs else 0


def _output_height(layer: FoldedChain) -> int:
    """Return the number of outputs of a layer, or 0 if nothing multiplies them."""
    if layer.blocks:
        return len(layer.blocks[0].step.b)
    return len(get_factor_vector(layer.outputs[0])) if layer.outputs else 0


Column = TypeVar("Column", AnyArray, AnyArray | None)


def _split_layers(columns: Sequence[Column], sizes: Sequence[int]) -> list[tuple[Column, ...]]:
    """Split arrays of concatenated layers, or None; return those of each layer."""
    none = [None] * len(sizes)
    split = [none if each is None else split_rows(each, sizes) for each in columns]
    return list(zip(*split, strict=True)) if split else [()] * len(sizes)


_GROUP_LAYERS = 16
"""Layers whose factors are multiplied together."""


@dataclass(frozen=True)
class DeltaCompiler:
    """Folded layers to be compiled to arrays in host memory; the cost is known in advance.

    Without ``in_place`` published arrays are copied too, so a plan is one block of memory.
    """

    layers: Mapping[str, FoldedChain]
    in_place: bool = True

    @cached_property
    def element_counts(self) -> Mapping[str, int]:
        """The number of elements of each layer."""
        in_place = self.in_place
        counts = ((n, count_elements(each, in_place=in_place)) for n, each in self.layers.items())
        return dict(counts)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names of alike layers."""
        return group_alike_layers(self.layers)

    @property
    def nbytes(self) -> int:
        """The bytes that `compile` will allocate."""
        return sum(self.element_counts.values()) * _FLOAT_BYTES

    @property
    def width(self) -> int:
        """Maximum number of columns between A and B; 1 if there are only scales."""
        return max((max(folded.rank, 1) for folded in self.layers.values()), default=0)

    @property
    def shares_adapter_memory(self) -> bool:
        """Whether published arrays are used in place."""
        return self.in_place and any(any(_find_kept_arrays(each)) for each in self.layers.values())

    def scratch_bytes(self, workers: int) -> int:
        """Return the maximum additional bytes of host memory that this many workers need."""
        each = (group_scratch_bytes([self.layers[n] for n in group]) for group in self.groups)
        return sum(sorted(each, reverse=True)[:workers])

    def compile(self, workers: int) -> dict[str, FloatDelta]:
        """Compile each group into new memory."""
        return self.compile_into(allocate_floats(self.nbytes // _FLOAT_BYTES), workers)

    def compile_into(self, memory: AnyArray, workers: int) -> dict[str, FloatDelta]:
        """Compile each group into its part of ``memory``, float32 [nbytes / 4]."""
        sizes = [sum(self.element_counts[name] for name in group) for group in self.groups]
        whole = FloatArena(memory, in_place=self.in_place)
        arenas = [whole.split(size) for size in sizes]
        folded = [[self.layers[name] for name in group] for group in self.groups]
        with ExitStack() as stack:
            # a new thread has cold caches and a new heap: not worth it for a single worker
            each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
            done = list(each(compile_layer_group, folded, arenas))
        names = chain.from_iterable(self.groups)
        found = dict(zip(names, chain.from_iterable(done), strict=True))
        return {module: found[module] for module in self.layers}


class FloatArena:
    """Memory that float32 arrays are allocated from."""

    def __init__(self, data: AnyArray, *, in_place: bool = True) -> None:
        """Allocate from ``data``, [elements]; ``in_place``: published arrays need no memory."""
        self.in_place = in_place
        self._data, self._taken = data, 0

    def allocate(self, *shape: int) -> AnyArray:
        """Return the next array."""
        begin = self._taken
        self._taken += math.prod(shape)
        return self._data[begin : self._taken].reshape(shape)

    def split(self, elements: int) -> "FloatArena":
        """Return an arena for the next elements."""
        return FloatArena(self.allocate(elements), in_place=self.in_place)


def allocate_floats(elements: int) -> AnyArray:
    """Return float32 zeros, [elements]."""
    return np.frombuffer(allocate(_FLOAT_BYTES * elements), np.float32)


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


def count_elements(folded: FoldedChain, *, in_place: bool = True) -> int:
    """Return the number of elements that `compile_layer_group` allocates for a layer."""
    keep_a, keep_b = _find_kept_arrays(folded) if in_place else (False, False)
    a = 0 if keep_a else sum(block.step.a.size for block in folded.blocks)
    b = 0 if keep_b else sum(block.step.b.size for block in folded.blocks)
    return a + b + folded.scale_elements


def group_scratch_bytes(layers: Sequence[FoldedChain]) -> int:
    """Return the maximum bytes of `compile_layer_group` for alike layers, besides its arena."""
    steps = [block.step for layer in layers for block in layer.blocks]
    joining = [joining_scratch_bytes(part) for step in steps for part in (step.a, step.b)]
    return factor_scratch_bytes(layers) + max(joining, default=0)


def compile_layer_group(layers: Sequence[FoldedChain], arena: FloatArena) -> list[FloatDelta]:
    """Compile a few alike layers, so that the vectors being multiplied stay in the caches."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are results, too
        pairs = zip(layers, multiply_factors(layers), strict=True)
        return [_compile_delta(folded, factors, arena) for folded, factors in pairs]


def _compile_delta(folded: FoldedChain, factors: FactorProducts, arena: FloatArena) -> FloatDelta:
    keep_a, keep_b = _find_kept_arrays(folded) if arena.in_place else (False, False)
    first = folded.blocks[0].step if folded.blocks else None
    return LinearDelta(
        a=first.a if first and keep_a else _stack_a(folded.blocks, factors, arena),
        b=first.b if first and keep_b else _stack_b(folded.blocks, factors, arena),
        input_scale=_store_product(factors.inputs, arena),
        output_scale=_store_product(factors.outputs, arena),
        bias_scale=_store_product(factors.bias, arena),
    )


def _stack_a(
    blocks: Sequence[LowRankBlock], factors: FactorProducts, arena: FloatArena
) -> AnyArray | None:
    """Return A, [sum of ranks, in], each block times the input factors after it."""
    if not blocks:
        return None
    ranks = [block.step.rank for block in blocks]
    a = arena.allocate(sum(ranks), blocks[0].step.a.shape[1])
    join_rows(a, [block.step.a for block in blocks])
    for block, part in zip(blocks, split_rows(a, ranks), strict=True):
        if (scale := factors.a_scale(block)) is not None:
            np.multiply(part, scale, out=part)
    return a


def _stack_b(
    blocks: Sequence[LowRankBlock], factors: FactorProducts, arena: FloatArena
) -> AnyArray | None:
    """Return B, [out, sum of ranks], each block times its scale."""
    if not blocks:
        return None
    ranks, out = [block.step.rank for block in blocks], len(blocks[0].step.b)
    if len(blocks) == 1:
        [block], [scale] = blocks, factors.b_scales
        b = arena.allocate(out, *ranks)
        join_rows(b, [block.step.b])
        return np.multiply(b, block.factor if scale is None else scale[:, None], out=b)
    rows = arena.allocate(sum(ranks), out)
    join_rows(rows, [block.step.b.T for block in blocks])
    for block, scale, part in zip(blocks, factors.b_scales, split_rows(rows, ranks), strict=True):
        np.multiply(part, block.factor if scale is None else scale, out=part)
    return rows.T


def _store_product(running: Sequence[AnyArray], arena: FloatArena) -> AnyArray | None:
    """Return the product of all factors, stored in the arena; None if there are no factors."""
    if not running:
        return None
    found = arena.allocate(len(running[-1]))
    found[...] = running[-1]
    return found


def _find_kept_arrays(folded: FoldedChain) -> tuple[bool, bool]:
    """Return whether A, and whether B, can be the published array itself."""
    if len(folded.blocks) != 1:
        return False, False
    [block] = folded.blocks
    a, b = block.step.a.dtype == np.float32, block.step.b.dtype == np.float32
    return a and block.keeps_a, b and block.keeps_b
