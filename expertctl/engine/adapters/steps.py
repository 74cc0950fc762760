"""The steps of adapters on a linear layer, as published, and the form that a plan gives them.

- A plan changes a linear layer to ``y = d * (W (u * x)) + B (A x) + e * b``; every ordered chain of
  adapters has this form (decision 10). ``W`` and ``b`` belong to the base and are read-only; None
  stands for a neutral part.
- LoRA: ``f <- f + w * s * B A x``. The order of LoRAs does not change the result.
- DoRA: ``f <- f + w * (c * (g + s * B A x) - g)`` with g = f without bias and ``c = m / rownorm(W +
  s * B A)``. The norm is that of the base's own W in the dtype in use, whatever precedes DoRA in
  the chain, so c belongs to one expert on one base.
- IA³: on the output ``f <- l_w * f``, bias included as in PEFT, on the input ``f(x) <- f(l_w *
  x)``, with ``l_w = 1 + w * (l - 1)``.

Tensors are stored numbers, see `engine.arrays`; `torch.reference` has the same formulas in torch.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, Never, TypeVar

import numpy as np

from expertctl.engine.arrays import AnyArray, FloatArray, widen
from expertctl.errors import IncompatibleError

ArrayT = TypeVar("ArrayT", bound=Sized)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearDelta(Generic[ArrayT]):
    """The change that a plan makes to one linear layer with ``[out, in]`` weights.

    ``a`` and ``b`` are given together; they are the adapters' blocks, concatenated by rank. Either
    may be row-major or column-major.
    """

    a: ArrayT | None = None  # [rank, in]
    b: ArrayT | None = None  # [out, rank]
    input_scale: ArrayT | None = None  # u, [in]
    output_scale: ArrayT | None = None  # d, [out]
    bias_scale: ArrayT | None = None  # e, [out]

    @property
    def tensors(self) -> tuple[ArrayT, ...]:
        """The parts that are not None."""
        parts = (self.a, self.b, self.input_scale, self.output_scale, self.bias_scale)
        return tuple(part for part in parts if part is not None)

    @property
    def width(self) -> int:
        """Number of columns between A and B; 1 if there are only scales."""
        return 1 if self.a is None else len(self.a)


Deltas = Mapping[str, LinearDelta[FloatArray]]
"""Changes of a plan by module name: ``model.layers.0.self_attn.q_proj``, …, ``lm_head``."""

EMPTY_DELTAS: Mapping[str, Never] = {}
"""The deltas of no plan, in every form."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedFactors:
    """A and B of one expert as PEFT writes them for a stack, of which a LoRA has one matrix."""

    a: FloatArray  # [rank, in]
    b: FloatArray  # [outputs of all matrices, rank]
    place: int
    matrices: int


@dataclass(frozen=True, slots=True, eq=False)
class LoraTensors:
    """The LoRA of one module: ``a`` [rank, in], ``b`` [out, rank], as published."""

    a: FloatArray
    b: FloatArray
    scale: float
    copied: bool = False
    """Whether ``b`` is a copy for one plan, not a view of the adapter's file."""
    stacked: StackedFactors | None = None
    """Of a routed expert: what both are parts of, if the base has its experts as rows."""

    @property
    def rank(self) -> int:
        """Rank of the LoRA."""
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class DoraTensors:
    """The DoRA of one module: ``a`` [rank, in], ``b`` [out, rank] and ``magnitude`` [out]."""

    a: FloatArray
    b: FloatArray
    magnitude: FloatArray
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the LoRA part."""
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the layer that it is for."""
        return len(self.b), int(self.a.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Ia3Tensors:
    """The IA³ of one module: ``vector`` [in] or [out], as published."""

    vector: FloatArray
    on_input: bool


AdapterStep = LoraTensors | DoraTensors | Ia3Tensors
"""The change of one adapter to one linear layer."""


def count_outputs(step: AdapterStep) -> int | None:
    """Return the outputs of the layer that a step is for; None: any number."""
    if isinstance(step, Ia3Tensors):
        return None if step.on_input else len(step.vector)
    return len(step.b)


def take_outputs(step: AdapterStep, blocks: Sequence[slice]) -> AdapterStep:
    """Return the part of a step for some outputs of its layer, exactly.

    A low-rank change has the same A and some rows of B; the magnitudes of DoRA and the factors of
    IA³ belong to outputs, or to inputs, which all outputs share.
    """
    match step:
        case LoraTensors():
            copied = len(blocks) > 1
            return LoraTensors(step.a, _take_rows(step.b, blocks), step.scale, copied)
        case DoraTensors():
            magnitude = _take_rows(step.magnitude, blocks)
            return DoraTensors(step.a, _take_rows(step.b, blocks), magnitude, step.scale)
        case Ia3Tensors(on_input=True):
            return step
        case Ia3Tensors():
            return Ia3Tensors(_take_rows(step.vector, blocks), on_input=False)


def take_columns(step: AdapterStep) -> AdapterStep:
    """Return a step for a base whose stacks of experts hold columns, those of matrices in turn.

    No release of PEFT swaps A and B of such a stack. Other steps are returned as they are.
    """
    if not isinstance(step, LoraTensors) or step.stacked is None:
        return step
    whole = step.stacked
    return LoraTensors(whole.a, whole.b[whole.place :: whole.matrices], step.scale)


def _take_rows(numbers: FloatArray, blocks: Sequence[slice]) -> FloatArray:
    """Return rows, as a view if they follow each other."""
    if len(blocks) == 1:
        return numbers[blocks[0]]
    return np.concatenate([numbers[block] for block in blocks])


def weighted_ia3_vector(ia3: Ia3Tensors, weight: float) -> AnyArray:
    """Return ``l_w``, the factors of the layer's input or output, float32."""
    vector = widen(ia3.vector)
    if weight == 1.0:
        return vector
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are results, too
        return 1 + np.float32(weight) * (vector - 1)


SCRATCH = 2 << 20
"""Bytes of merged rows, and of the widened rows of a narrow base, that are in memory at a time."""
_FLOAT_BYTES = 4


def compute_dora_scales(weight: FloatArray, dora: DoraTensors, *, what: str) -> AnyArray:
    """Return ``c``, float32 [out], merging a few rows at a time (`dora_scale_scratch_bytes`).

    Raises:
        IncompatibleError: when the norm of a merged row is zero or not finite, or its magnitude
            is not finite.
    """
    step, a = _rows_per_step(dora), widen(dora.a)
    merged = np.empty((step, a.shape[1]), np.float32)
    norms = np.empty(len(weight), np.float32)
    with np.errstate(all="ignore"):  # what is not finite is found at the end
        scale = np.float32(dora.scale)
        for begin in range(0, len(weight), step):
            rows = weight[begin : begin + step]
            part = np.matmul(widen(dora.b[begin : begin + step]), a, out=merged[: len(rows)])
            part *= scale
            part += widen(rows)
            np.square(part, out=part)
            np.sum(part, axis=1, out=norms[begin : begin + step])
        np.sqrt(norms, out=norms)
        _check_rows((norms > 0) & np.isfinite(norms), what)
        scales = np.divide(widen(dora.magnitude), norms, out=norms)
    _check_rows(np.isfinite(scales), what)
    return scales


def dora_scale_scratch_bytes(dora: DoraTensors) -> int:
    """Return the maximum bytes that `compute_dora_scales` needs besides its result."""
    rows, rank, (out, inputs) = _rows_per_step(dora), dora.rank, dora.shape
    return _FLOAT_BYTES * (2 * rows * inputs + rank * (inputs + rows) + out)


def _rows_per_step(dora: DoraTensors) -> int:
    out, inputs = dora.shape
    return max(1, min(SCRATCH // (2 * _FLOAT_BYTES * inputs), out))


def _check_rows(valid: AnyArray, what: str) -> None:
    if not valid.all():
        raise IncompatibleError(
            f"{what}: row {valid.argmin()} of the base's matrix with the expert's change cannot be "
            "scaled: its norm is zero, or its norm or its magnitude is not finite",
            hint="the expert was made for another base, or one of the two is damaged",
        )
