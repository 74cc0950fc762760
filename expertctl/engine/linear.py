"""What a plan does to one linear layer: ``y = d * (W (u * x)) + B (A x) + e * b``.

Any ordered chain of experts has this form (decision 10). ``W`` and ``b`` are the base's and are
never written to; a part that is None is neutral. Activations keep their dtype: they are
cast only for a product with a weight of another one, and adapters are cast to theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearDelta:
    """The difference that a plan makes to one linear layer with ``[out, in]`` weights.

    ``a`` and ``b`` come together; they are the adapters' blocks, concatenated by rank. Either may
    lie in memory by rows or by columns.
    """

    a: Tensor | None = None  # [rank, in]
    b: Tensor | None = None  # [out, rank]
    input_scale: Tensor | None = None  # u, [in]
    output_scale: Tensor | None = None  # d, [out]
    bias_scale: Tensor | None = None  # e, [out]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that are there."""
        parts = (self.a, self.b, self.input_scale, self.output_scale, self.bias_scale)
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.tensors)

    def problems(self, *, out_features: int, in_features: int) -> list[str]:
        """Say why this cannot belong to a layer of that shape; empty when it can."""
        rank = self.a.shape[0] if self.a is not None and self.a.ndim else 0
        wanted = {
            "a": (self.a, (rank, in_features)),
            "b": (self.b, (out_features, rank)),
            "input_scale": (self.input_scale, (in_features,)),
            "output_scale": (self.output_scale, (out_features,)),
            "bias_scale": (self.bias_scale, (out_features,)),
        }
        found = [
            f"{name} is {list(part.shape)}, the layer takes {list(shape)}"
            for name, (part, shape) in wanted.items()
            if part is not None and tuple(part.shape) != shape
        ]
        if (self.a is None) != (self.b is None):
            found.append("a and b come together")
        return found


Deltas = Mapping[str, LinearDelta]
"""What a plan changes, by module name: ``model.layers.0.self_attn.q_proj``, …, ``lm_head``."""

NO_DELTAS: Deltas = {}


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """One linear layer: its module name, weights [out, in] and bias [out]."""

    module: str
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, deltas: Deltas) -> Tensor:
        """Apply it, with what a plan changes: [tokens, in] -> [tokens, out]."""
        return linear(x, self.weight, self.bias, deltas.get(self.module))


def linear_of(tensors: Mapping[str, Tensor], module: str) -> Linear:
    """Return a linear layer of a base by its module name."""
    return Linear(module, tensors[f"{module}.weight"], tensors.get(f"{module}.bias"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, delta: LinearDelta | None) -> Tensor:
    """Apply one linear layer with what the plan changes in it: [tokens, in] -> [tokens, out]."""
    if delta is None:
        return _product(x, weight, bias)
    y = _scaled_product(x, weight, bias, delta)
    if delta.a is None or delta.b is None:
        return y
    inner = F.linear(x, delta.a.to(x.dtype))  # [tokens, rank]
    return torch.addmm(y, inner, delta.b.to(x.dtype).T)


def _scaled_product(x: Tensor, weight: Tensor, bias: Tensor | None, delta: LinearDelta) -> Tensor:
    scaled = x if delta.input_scale is None else x * delta.input_scale
    if bias is not None and delta.bias_scale is not None:
        bias = bias * delta.bias_scale
    if delta.output_scale is None:
        return _product(scaled, weight, bias)
    y = _product(scaled, weight, None) * delta.output_scale
    return y if bias is None else y + bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    y = F.linear(x.to(weight.dtype), weight).to(x.dtype)
    return y if bias is None else y + bias
