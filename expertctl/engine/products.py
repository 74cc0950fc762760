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
    """For one layer: element n - 1 is the product of the n factors from the end of the chain."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    bias: Sequence[Tensor]

    def a_scale(self, block: Block) -> Tensor | None:
        """Return what multiplies A of a block, [in]."""
        return self.inputs[block.inputs_after - 1] if block.inputs_after else None

    def b_scales(self, block: Block) -> list[Tensor]:
        """Return the vectors that multiply B of a block, [out] each."""
        after = [self.outputs[block.outputs_after - 1]] if block.outputs_after else []
        return after if block.gain is None else [*after, block.gain]


def products(layers: Sequence[Folded]) -> list[Products]:
    """Multiply the factors of several layers."""
    table = _factors(list(chain.from_iterable((*f.inputs, *f.outputs) for f in layers)))

    def along(links: Iterable[Sequence[Link]]) -> list[list[Tensor]]:
        return _cumulative([[table[link] for link in row] for row in links])

    inputs, outputs = along(f.inputs for f in layers), along(f.outputs for f in layers)
    bias = along(f.on_bias for f in layers)
    return [Products(*each) for each in zip(inputs, outputs, bias, strict=True)]


def _factors(links: Sequence[Link]) -> dict[Link, Tensor]:
    """Return ``1 - w + w * vector`` of every link."""
    if not links:
        return {}
    vectors = [factor_vector(link) for link in links]
    together = torch.cat(vectors).to(torch.float32)
    factors = together.split_with_sizes([len(vector) for vector in vectors])
    torch._foreach_mul_(factors, [link.weight for link in links])
    torch._foreach_add_(factors, [1 - link.weight for link in links])
    return dict(zip(links, factors, strict=True))


def _cumulative(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the running products of every row."""
    done = [list(row[:1]) for row in rows]
    for level in range(1, max(map(len, rows), default=0)):
        longer = [i for i, row in enumerate(rows) if len(row) > level]
        new = torch._foreach_mul([done[i][-1] for i in longer], [rows[i][level] for i in longer])
        for i, product in zip(longer, new, strict=True):
            done[i].append(product)
    return done
