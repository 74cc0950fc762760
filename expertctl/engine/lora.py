"""LoRA by its plain formula, expert by expert: what every faster path is compared with.

Decision 10: ``f <- f + w * s * B A x``. The order of LoRAs does not change the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name that torch's own documentation uses
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """One adapted module: ``a`` [rank, in], ``b`` [out, rank], as published."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The width between A and B."""
        return self.a.shape[0]


def lora_delta(x: Tensor, lora: LoraTensors) -> Tensor:
    """Return what one LoRA adds to the output of a linear layer, in the type of ``x``."""
    a, b = lora.a.to(x.dtype), lora.b.to(x.dtype)
    return (x @ a.T) @ b.T * lora.scale  # [tokens, in] @ [in, rank] @ [rank, out]


def apply_loras(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loras: Iterable[tuple[LoraTensors, float]],
) -> Tensor:
    """Return a linear layer's output with weighted LoRAs applied one after the other."""
    y: Tensor = F.linear(x, weight, bias)
    for lora, share in loras:
        if share != 0.0:  # leaving an expert out is exact, 0 * inf is not
            y = y + share * lora_delta(x, lora)
    return y


def merged_weight(weight: Tensor, lora: LoraTensors) -> Tensor:
    """Return ``W + s * B A`` in float32: the same layer written another way, for tests."""
    return weight.to(torch.float32) + lora.scale * (lora.b.float() @ lora.a.float())
