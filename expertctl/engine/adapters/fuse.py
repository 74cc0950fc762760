"""Chains of adapter steps on one linear layer: the reference formula, and folding (decision 10).

`apply_chain` applies the definition step by step; faster paths are tested against it.

`fold_chain` determines which factor multiplies which block. A step multiplies everything before it:
IA³ on the output and DoRA multiply every earlier block and ``W x``, IA³ on the input multiplies
their input. So a block is multiplied by the factors *after* it; along the chain these are suffixes
of one list, and folding only counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812  # the name that torch's own documentation uses
from torch import Tensor

from expertctl.engine.model.functional import (
    DoraTensors,
    Ia3Tensors,
    LoraTensors,
    compute_lora_delta,
    reference_dora_scales,
    weighted_ia3_vector,
)

AdapterStep = LoraTensors | DoraTensors | Ia3Tensors
"""The change of one adapter to one linear layer."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainStep:
    """One step of a chain and the weight of its expert; weight 0 leaves it out.

    ``dora_scale`` is DoRA's ``c`` on the base, [out], if it is already known.
    """

    step: AdapterStep
    weight: float = 1.0
    dora_scale: Tensor | None = None


def apply_chain(
    x: Tensor, weight: Tensor, bias: Tensor | None, steps: Sequence[ChainStep]
) -> Tensor:
    """Return the output of a linear layer after the last step, in the dtype of ``x``."""
    if not steps:
        y: Tensor = F.linear(x, weight, bias)
        return y
    before, last = steps[:-1], steps[-1]
    share = last.weight
    if share == 0.0:  # leaving an expert out is exact, 0 * inf is not
        return apply_chain(x, weight, bias, before)
    match last.step:
        case LoraTensors() as lora:
            return apply_chain(x, weight, bias, before) + share * compute_lora_delta(x, lora)
        case Ia3Tensors(on_input=True) as ia3:
            scaled = x * weighted_ia3_vector(ia3, share, dtype=x.dtype)
            return apply_chain(scaled, weight, bias, before)
        case Ia3Tensors() as ia3:
            vector = weighted_ia3_vector(ia3, share, dtype=x.dtype)
            return vector * apply_chain(x, weight, bias, before)
        case DoraTensors() as dora:
            f = apply_chain(x, weight, bias, before)
            g = f if bias is None else apply_chain(x, weight, None, before)
            c = reference_dora_scales(weight, dora).to(x.dtype)
            return f + share * (c * (g + compute_lora_delta(x, dora.as_lora)) - g)


@dataclass(frozen=True, slots=True)
class LowRankBlock:
    """A low-rank step, and the number of input and output factors after it."""

    step: LoraTensors | DoraTensors
    factor: float
    """Weight times scale: the number that multiplies B."""
    dora_scale: Tensor | None
    """DoRA's factor for its own B, [out]."""
    inputs_after: int
    outputs_after: int

    @property
    def keeps_a(self) -> bool:
        """Whether nothing multiplies A."""
        return self.inputs_after == 0

    @property
    def keeps_b(self) -> bool:
        """Whether nothing multiplies B."""
        plain = self.outputs_after == 0 and isinstance(self.step, LoraTensors)
        return plain and self.factor == 1.0


@dataclass(frozen=True, slots=True)
class FoldedChain:
    """A folded chain: blocks in plan order, factors from the last step to the first."""

    blocks: tuple[LowRankBlock, ...]
    inputs: tuple[ChainStep, ...]
    outputs: tuple[ChainStep, ...]

    @property
    def bias_factors(self) -> list[ChainStep]:
        """The output factors that also multiply the bias: all except DoRA's."""
        return [link for link in self.outputs if isinstance(link.step, Ia3Tensors)]

    @property
    def rank(self) -> int:
        """The sum of the ranks of all blocks."""
        return sum(block.step.rank for block in self.blocks)

    @property
    def scale_elements(self) -> int:
        """The number of elements of the input, output and bias scales together."""
        lists = (self.inputs, self.outputs, self.bias_factors)
        return sum(len(get_factor_vector(links[0])) for links in lists if links)


def fold_chain(steps: Sequence[ChainStep]) -> FoldedChain:
    """Fold the steps of one layer, given in plan order; none may have weight 0."""
    blocks: list[LowRankBlock] = []
    inputs: list[ChainStep] = []
    outputs: list[ChainStep] = []
    for link in reversed(steps):
        match link.step:
            case Ia3Tensors(on_input=True):
                inputs.append(link)
            case Ia3Tensors():
                outputs.append(link)
            case LoraTensors() as lora:
                factor = link.weight * lora.scale
                blocks.append(LowRankBlock(lora, factor, None, len(inputs), len(outputs)))
            case DoraTensors() as dora:
                factor = link.weight * dora.scale
                after = (len(inputs), len(outputs))
                blocks.append(LowRankBlock(dora, factor, link.dora_scale, *after))
                outputs.append(link)
    return FoldedChain(tuple(reversed(blocks)), tuple(inputs), tuple(outputs))


def get_factor_vector(link: ChainStep) -> Tensor:
    """Return l of IA³ or c of DoRA; with weight w the factor is ``1 + w * (vector - 1)``."""
    vector = link.step.vector if isinstance(link.step, Ia3Tensors) else link.dora_scale
    assert vector is not None, "DoRA scales are computed before the plan"
    return vector
