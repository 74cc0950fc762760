"""Folding chains of adapter steps on one linear layer (decision 10).

`fold_chain` determines which factor multiplies which block. A step multiplies everything before it:
IA³ on the output and DoRA multiply every earlier block and ``W x``, IA³ on the input multiplies
their input. So a block is multiplied by the factors *after* it; along the chain these are suffixes
of one list, and folding only counts them. `apply_chain` in `torch.reference` applies a chain step
by step; what is folded and compiled is tested against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.engine.adapters.steps import AdapterStep, DoraTensors, Ia3Tensors, LoraTensors
from expertctl.engine.arrays import AnyArray, FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class ChainStep:
    """One step of a chain and the weight of its expert; weight 0 leaves it out.

    ``dora_scale`` is DoRA's ``c`` on the base, [out], if it is already known.
    """

    step: AdapterStep
    weight: float = 1.0
    dora_scale: AnyArray | None = None


@dataclass(frozen=True, slots=True)
class LowRankBlock:
    """A low-rank step, and the number of input and output factors after it."""

    step: LoraTensors | DoraTensors
    factor: float
    """Weight times scale: the number that multiplies B."""
    dora_scale: AnyArray | None
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
        step = self.step
        plain = self.outputs_after == 0 and isinstance(step, LoraTensors) and not step.copied
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


def get_factor_vector(link: ChainStep) -> FloatArray:
    """Return l of IA³ or c of DoRA; with weight w the factor is ``1 + w * (vector - 1)``."""
    vector = link.step.vector if isinstance(link.step, Ia3Tensors) else link.dora_scale
    assert vector is not None, "DoRA scales are computed before the plan"
    return vector
