"""DoRA by its plain formula, and the gains that it has on one base.

Decision 10: ``f <- f + w * (c * (g + s * B A x) - g)`` with g = f without bias and
``c = m / rownorm(W + s * B A)``. The norm is that of the base's own W in the dtype that is used,
whatever stands before DoRA in the chain, so c belongs to one expert on one base.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertctl.engine.lora import LoraTensors, merged_weight
from expertctl.errors import IncompatibleError

SCRATCH = 2 << 20
"""Bytes of merged rows that are in memory at one time."""
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class DoraTensors:
    """One adapted module: ``a`` [rank, in], ``b`` [out, rank] and ``magnitude`` [out]."""

    a: Tensor
    b: Tensor
    magnitude: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The width between A and B."""
        return self.a.shape[0]

    @property
    def lora(self) -> LoraTensors:
        """The part of it that is a LoRA."""
        return LoraTensors(self.a, self.b, self.scale)


def plain_gains(weight: Tensor, dora: DoraTensors) -> Tensor:
    """Return ``c`` by its formula, [out], with a whole merged matrix in memory: for tests."""
    norms: Tensor = torch.linalg.vector_norm(merged_weight(weight, dora.lora), dim=1)
    return dora.magnitude.to(norms.dtype) / norms


def gains(weight: Tensor, dora: DoraTensors, *, what: str) -> Tensor:
    """Return ``c``, float32 [out], merging a few rows at a time in `scratch_bytes`.

    Raises:
        IncompatibleError: when a merged row is all zeros, or something in it is no number.
    """
    step = _rows(dora)
    a = dora.a.to(torch.float32)
    merged = torch.empty(step, a.shape[1])
    norms = torch.empty(len(weight))
    for begin in range(0, len(weight), step):
        part = merged[: min(step, len(weight) - begin)].copy_(weight[begin : begin + step])
        part.addmm_(dora.b[begin : begin + step].to(torch.float32), a, alpha=dora.scale)
        torch.linalg.vector_norm(part, dim=1, out=norms[begin : begin + step])
    return _checked(torch.div(dora.magnitude, norms, out=norms), what)


def scratch_bytes(dora: DoraTensors) -> int:
    """Return what `gains` needs besides its result, at most."""
    rows, rank, inputs = _rows(dora), dora.rank, dora.a.shape[1]
    return _FLOAT_BYTES * (rows * inputs + rank * (inputs + rows))


def _rows(dora: DoraTensors) -> int:
    return max(1, min(SCRATCH // (_FLOAT_BYTES * dora.a.shape[1]), len(dora.b)))


def _checked(found: Tensor, what: str) -> Tensor:
    bad = torch.nonzero(~torch.isfinite(found)).flatten().tolist()
    if bad:
        raise IncompatibleError(
            f"{what}: row {bad[0]} of the base's matrix with the expert's change has no direction: "
            "its norm is zero or no number",
            hint="the expert was made for another base, or one of the two is damaged",
        )
    return found
