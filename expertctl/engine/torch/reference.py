"""The plain formulas of attention, LoRA, DoRA and IA³: what faster paths must equal.

Steps of adapters have stored numbers; everything else is a tensor, and results have the dtype of
the activations. The formulas of adapters are those of `adapters.steps`.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.adapters.fuse import ChainStep
from expertctl.engine.adapters.steps import DoraTensors, Ia3Tensors, LoraTensors
from expertctl.engine.torch.plan import to_tensor

LowRankStep = LoraTensors | DoraTensors
"""A step with ``A``, ``B`` and a scale."""


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
            return apply_chain(x * _weigh_ia3(ia3, share, x.dtype), weight, bias, before)
        case Ia3Tensors() as ia3:
            return _weigh_ia3(ia3, share, x.dtype) * apply_chain(x, weight, bias, before)
        case DoraTensors() as dora:
            f = apply_chain(x, weight, bias, before)
            g = f if bias is None else apply_chain(x, weight, None, before)
            c = reference_dora_scales(weight, dora).to(x.dtype)
            return f + share * (c * (g + compute_lora_delta(x, dora)) - g)


def compute_lora_delta(x: Tensor, lora: LowRankStep) -> Tensor:
    """Return what a LoRA adds to the output of a linear layer, in the dtype of ``x``."""
    a, b = to_tensor(lora.a).to(x.dtype), to_tensor(lora.b).to(x.dtype)
    return (x @ a.T) @ b.T * lora.scale  # [tokens, in] @ [in, rank] @ [rank, out]


def merge_lora_weight(weight: Tensor, lora: LowRankStep) -> Tensor:
    """Return ``W + s * B A`` in float32 or wider: the merged weight of the same layer."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = to_tensor(lora.a).to(dtype), to_tensor(lora.b).to(dtype)
    return weight.to(dtype) + lora.scale * (b @ a)


def reference_dora_scales(weight: Tensor, dora: DoraTensors) -> Tensor:
    """Return ``c`` by its formula, [out], from a whole merged matrix."""
    norms: Tensor = torch.linalg.vector_norm(merge_lora_weight(weight, dora), dim=1)
    return to_tensor(dora.magnitude).to(norms.dtype) / norms


def _weigh_ia3(ia3: Ia3Tensors, weight: float, dtype: torch.dtype) -> Tensor:
    return 1 + weight * (to_tensor(ia3.vector).to(dtype) - 1)


def reference_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, window: int | None
) -> Tensor:
    """Compute attention by the textbook formula; the test oracle."""
    groups, tokens, length = queries.shape[0] // keys.shape[0], queries.shape[1], keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=0) for x in (keys, values))
    scores = torch.matmul(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[2])
    for row, position in enumerate(range(length - tokens, length)):
        scores[:, row, position + 1 :] = -torch.inf
        if window is not None:
            scores[:, row, : max(0, position + 1 - window)] = -torch.inf
    out = scores.softmax(-1) @ values  # [heads, tokens, dim]
    return out.transpose(0, 1).flatten(1)
