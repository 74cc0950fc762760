"""An ordered, weighted chain of steps on one linear layer, by its plain formula (decision 10).

Expert by expert and in the words of the definition: what every faster path is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812  # the name that torch's own documentation uses
from torch import Tensor

from expertctl.engine.dora import DoraTensors, plain_gains
from expertctl.engine.ia3 import Ia3Tensors, ia3_scale
from expertctl.engine.lora import LoraTensors, lora_delta

Step = LoraTensors | DoraTensors | Ia3Tensors
"""What one adapter does to one linear layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One step of a chain and the weight of its expert; weight 0 leaves it out.

    ``gain`` is DoRA's ``c`` on the base, [out], where it is known already.
    """

    step: Step
    weight: float = 1.0
    gain: Tensor | None = None


def apply_chain(x: Tensor, weight: Tensor, bias: Tensor | None, links: Sequence[Link]) -> Tensor:
    """Return f(x), the output of a linear layer after the last link, in the type of ``x``."""
    if not links:
        y: Tensor = F.linear(x, weight, bias)
        return y
    before, last = links[:-1], links[-1]
    share = last.weight
    if share == 0.0:  # leaving an expert out is exact, 0 * inf is not
        return apply_chain(x, weight, bias, before)
    match last.step:
        case LoraTensors() as lora:
            return apply_chain(x, weight, bias, before) + share * lora_delta(x, lora)
        case Ia3Tensors(on_input=True) as ia3:
            scaled = x * ia3_scale(ia3, share, dtype=x.dtype)
            return apply_chain(scaled, weight, bias, before)
        case Ia3Tensors() as ia3:
            return ia3_scale(ia3, share, dtype=x.dtype) * apply_chain(x, weight, bias, before)
        case DoraTensors() as dora:
            f = apply_chain(x, weight, bias, before)
            g = f if bias is None else apply_chain(x, weight, None, before)
            c = plain_gains(weight, dora).to(x.dtype)
            return f + share * (c * (g + lora_delta(x, dora.lora)) - g)
