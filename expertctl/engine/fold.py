"""Folding a chain of steps on one linear layer: which factor reaches which block (decision 10).

A step multiplies what stands before it: IA³ on the output and DoRA multiply every earlier block
and ``W x``, IA³ on the input multiplies their input. So the factors *after* a block reach it, and
along the chain these are the tails of one list: `fold` only counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from expertctl.engine.chain import Link
from expertctl.engine.dora import DoraTensors
from expertctl.engine.ia3 import Ia3Tensors
from expertctl.engine.lora import LoraTensors


@dataclass(frozen=True, slots=True)
class Block:
    """One low-rank part: its step, and how many input and output factors stand after it."""

    step: LoraTensors | DoraTensors
    factor: float
    """Weight times scale: the number that multiplies B."""
    gain: Tensor | None
    """What DoRA multiplies its own B with, [out]."""
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
class Folded:
    """A folded chain: blocks in plan order, factors from the last step to the first."""

    blocks: tuple[Block, ...]
    inputs: tuple[Link, ...]
    outputs: tuple[Link, ...]

    @property
    def on_bias(self) -> list[Link]:
        """The factors of the output that reach the bias too: DoRA leaves it alone."""
        return [link for link in self.outputs if isinstance(link.step, Ia3Tensors)]

    @property
    def rank(self) -> int:
        """The width of all blocks beside each other."""
        return sum(block.step.rank for block in self.blocks)

    @property
    def scale_elements(self) -> int:
        """How many numbers stand in the products for input, output and bias together."""
        lists = (self.inputs, self.outputs, self.on_bias)
        return sum(len(factor_vector(links[0])) for links in lists if links)


def fold(links: Sequence[Link]) -> Folded:
    """Fold the steps of one layer, given in plan order; none may have weight 0."""
    blocks: list[Block] = []
    inputs: list[Link] = []
    outputs: list[Link] = []
    for link in reversed(links):
        match link.step:
            case Ia3Tensors(on_input=True):
                inputs.append(link)
            case Ia3Tensors():
                outputs.append(link)
            case LoraTensors() as lora:
                factor = link.weight * lora.scale
                blocks.append(Block(lora, factor, None, len(inputs), len(outputs)))
            case DoraTensors() as dora:
                factor = link.weight * dora.scale
                blocks.append(Block(dora, factor, link.gain, len(inputs), len(outputs)))
                outputs.append(link)
    return Folded(tuple(reversed(blocks)), tuple(inputs), tuple(outputs))


def factor_vector(link: Link) -> Tensor:
    """Return l of IA³ or c of DoRA; with the weight w the factor is ``1 + w * (vector - 1)``."""
    vector = link.step.vector if isinstance(link.step, Ia3Tensors) else link.gain
    assert vector is not None, "the gains of DoRA come before its plan"
    return vector
