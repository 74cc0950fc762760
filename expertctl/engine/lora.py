"""LoRA by its plain formula.

Decision 10: ``f <- f + w * s * B A x``. The order of LoRAs does not change the result.
"""

from dataclasses import dataclass

import torch
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


def merged_weight(weight: Tensor, lora: LoraTensors) -> Tensor:
    """Return ``W + s * B A``, in float32 at least: the same layer written another way."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype) + lora.scale * (lora.b.to(dtype) @ lora.a.to(dtype))
