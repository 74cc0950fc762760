"""What folding multiplies: the factors of many layers, in float32, by a few calls for all of them.

A plan of ten experts has thousands of small vectors, and a call for each would take longer than
all of its numbers. ``torch._foreach_*`` runs the same loop without Python.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from expertctl.engine.chain import Link
from expertctl.engine.fold import Block, Folded, factor_vector


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


def products(layers: Sequence[Folded]) -> list[Products]:
    """Multiply the factors of several layers."""
    table = _factors(list(chain.from_iterable((*f.inputs, *f.outputs) for f in layers)))

    def along(links: Iterable[Sequence[Link]]) -> list[list[Tensor]]:
        return _cumulative([[table[link] for link in row] for row in links])

    inputs, outputs = along(f.inputs for f in layers), along(f.outputs for f in layers)
    bias = along(f.on_bias for f in layers)
    b_scales = _b_scales([f.blocks for f in layers], outputs)
    return [Products(*each) for each in zip(inputs, outputs, bias, b_scales, strict=True)]


def _factors(links: Sequence[Link]) -> dict[Link, Tensor]:
    """Return ``1 + w * (vector - 1)`` of every link."""
    if not links:
        return {}
    vectors = [factor_vector(link) for link in links]
    sizes = [len(vector) for vector in vectors]
    weights = torch.tensor([link.weight for link in links], device=vectors[0].device)
    each = weights.repeat_interleave(torch.tensor(sizes, device=weights.device))
    together = torch.cat(vectors).to(torch.float32)
    factors = torch.lerp(torch.ones_like(weights[:1]), together, each)  # exact where w is 1
    return dict(zip(links, factors.split_with_sizes(sizes), strict=True))


def _cumulative(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the running products of every row."""
    done = [list(row[:1]) for row in rows]
    for level in range(1, max(map(len, rows), default=0)):
        longer = [i for i, row in enumerate(rows) if len(row) > level]
        new = torch._foreach_mul([done[i][-1] for i in longer], [rows[i][level] for i in longer])
        for i, product in zip(longer, new, strict=True):
            done[i].append(product)
    return done


def _b_scales(
    layers: Sequence[Sequence[Block]], outputs: Sequence[Sequence[Tensor]]
) -> list[list[Tensor | None]]:
    """Multiply what stands after each block, what DoRA multiplies its own with, and its number."""
    blocks = [(b, row) for some, row in zip(layers, outputs, strict=True) for b in some]
    after = [row[b.outputs_after - 1] if b.outputs_after else None for b, row in blocks]
    gains = [block.gain for block, _ in blocks]
    found = _multiplied(after, gains)
    known = [i for i, vector in enumerate(found) if vector is not None]
    if known:
        vectors = [vector for vector in found if vector is not None]
        scaled = torch._foreach_mul(vectors, [blocks[i][0].factor for i in known])
        for i, vector in zip(known, scaled, strict=True):
            found[i] = vector
    rest = iter(found)
    return [[next(rest) for _ in some] for some in layers]


def _multiplied(
    ones: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Multiply pair by pair; None is neutral."""
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if a is not None and b is not None]
    both = torch._foreach_mul([a for a, _ in pairs], [b for _, b in pairs]) if pairs else ()
    rest = iter(both)
    return [
        next(rest) if a is not None and b is not None else (b if a is None else a)
        for a, b in zip(ones, others, strict=True)
    ]
