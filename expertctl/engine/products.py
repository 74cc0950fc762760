"""What folding multiplies: the factors of layers that are alike, in float32, as if they were one.

A plan of ten experts has thousands of small vectors, and a call for each would take longer than
all of its numbers. Layers that the same kinds of steps change with the same numbers are laid end
to end, multiplied together and cut apart again.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from expertctl.engine.chain import Link
from expertctl.engine.fold import Block, Folded, factor_vector
from expertctl.engine.ia3 import Ia3Tensors

T = TypeVar("T")
_FLOAT_BYTES = 4
_PASSING = 3
"""How many vectors of all layers exist for a moment beside those that are kept."""


@dataclass(frozen=True, slots=True)
class Products:
    """For one layer: element n - 1 is the product of the n factors from the end of the chain.

    ``b_scales`` has an entry for each block: all that multiplies its B, [out]; None where that is
    its number alone.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    bias: Sequence[Tensor]
    b_scales: Sequence[Tensor | None]

    def a_scale(self, block: Block) -> Tensor | None:
        """Return what multiplies A of a block, [in]."""
        return self.inputs[block.inputs_after - 1] if block.inputs_after else None


def likeness(layer: Folded) -> Hashable:
    """Return what layers must have in common to be multiplied together."""
    blocks = [(b.factor, b.gain is None, b.inputs_after, b.outputs_after) for b in layer.blocks]
    links = (*layer.inputs, *layer.outputs)
    factors = [(isinstance(link.step, Ia3Tensors), link.weight) for link in links]
    return (tuple(blocks), tuple(factors), len(layer.inputs))


def scratch_bytes(layers: Sequence[Folded]) -> int:
    """Return what `products` of layers that are alike takes at most, its result included."""
    first = layers[0]
    scaled = [block for block in first.blocks if block.outputs_after or block.gain is not None]
    across = len(first.outputs) + len(first.on_bias) + len(scaled)
    height = sum(map(_height, layers)) if across else 0
    width = sum(map(_width, layers))
    return _FLOAT_BYTES * ((across + _PASSING) * height + (len(first.inputs) + _PASSING) * width)


def products(layers: Sequence[Folded]) -> list[Products]:
    """Multiply the factors of layers that are alike."""
    inputs = _running([layer.inputs for layer in layers])
    outputs = _running([layer.outputs for layer in layers])
    bias = _running([layer.on_bias for layer in layers])
    b_scales = _b_scales(layers, outputs)
    widths = [_width(layer) for layer in layers]
    heights = [_height(layer) for layer in layers]
    nothing: tuple[None, ...] = (None,) * len(layers)
    return [
        Products(*each)
        for each in zip(
            _by_layer([_apart(one, widths) for one in inputs], len(layers)),
            _by_layer([_apart(one, heights) for one in outputs], len(layers)),
            _by_layer([_apart(one, heights) for one in bias], len(layers)),
            _by_layer(
                [_apart(s, heights) if s is not None else nothing for s in b_scales], len(layers)
            ),
            strict=True,
        )
    ]


def _running(rows: Sequence[Sequence[Link]]) -> list[Tensor]:
    """Return the running products of factors, all layers end to end."""
    return list(accumulate((_factor(column) for column in zip(*rows, strict=True)), torch.mul))


def _factor(links: Sequence[Link]) -> Tensor:
    """Return ``1 + w * (vector - 1)`` of links with one weight, end to end; exact where w is 1."""
    together = torch.cat([factor_vector(link) for link in links]).to(torch.float32)
    one = torch.ones(1, device=together.device)
    return torch.lerp(one, together, links[0].weight)


def _b_scales(layers: Sequence[Folded], outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Multiply, for each block, the factors after it, its gain if it is DoRA, and its number."""
    found: list[Tensor | None] = []
    for place in zip(*(layer.blocks for layer in layers), strict=True):
        block = place[0]
        gains = [each.gain for each in place if each.gain is not None]
        vectors = [outputs[block.outputs_after - 1]] if block.outputs_after else []
        vectors += [torch.cat(gains)] if gains else []
        found.append(reduce(torch.mul, vectors) * block.factor if vectors else None)
    return found


def _width(layer: Folded) -> int:
    """Return how many inputs a layer has, as far as anything multiplies them."""
    return len(factor_vector(layer.inputs[0])) if layer.inputs else 0


def _height(layer: Folded) -> int:
    """Return how many outputs a layer has, as far as anything multiplies them."""
    if layer.blocks:
        return len(layer.blocks[0].step.b)
    return len(factor_vector(layer.outputs[0])) if layer.outputs else 0


def _apart(together: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return together.split_with_sizes(list(sizes))


def _by_layer(columns: Sequence[Sequence[T]], layers: int) -> list[tuple[T, ...]]:
    """Turn what each factor has for all layers into what each layer has of all factors."""
    return list(zip(*columns, strict=True)) if columns else [()] * layers
