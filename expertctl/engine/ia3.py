"""IA³ by its plain formula: one learned factor for every input, or every output, of a layer.

Decision 10: on the output ``f <- l_w * f``, bias included as PEFT has it, on the input
``f(x) <- f(l_w * x)``, with ``l_w = 1 + w * (l - 1)``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ia3Tensors:
    """One adapted module: ``vector`` [in] or [out], as published."""

    vector: Tensor
    on_input: bool


def ia3_scale(ia3: Ia3Tensors, weight: float, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``l_w``: what the layer's input or output is multiplied with."""
    vector = ia3.vector.to(dtype)
    return vector if weight == 1.0 else 1 + weight * (vector - 1)
