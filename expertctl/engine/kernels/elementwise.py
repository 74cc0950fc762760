"""What happens to each token on its own between two products; one item is one token."""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.exponential import exponential
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes
from expertctl.engine.kernels.memory import floats_at, words

Numbers = np.ndarray[Any, Any]


@cache
def norm_kernel() -> Kernel:
    """Return the kernel of RMSNorm: ``out = x / sqrt(mean(x^2) + eps) * weight``."""
    return compile_kernel("norm", _norm)


def norm_arguments(*, rows: Numbers, weight: Numbers, out: Numbers, eps: Numbers) -> Numbers:
    """Return its arguments, all float32.

    ``weight`` is [width], ``eps`` [1], the rest [tokens, at least width].
    """
    return words_of(*rows_at(rows), address(weight), len(weight), *rows_at(out), address(eps))


def _norm(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, weight, width, out, out_stride, eps = words(arguments, 7)
    for token in range(first, last):
        row = floats_at(rows + token * stride, width)
        normed = floats_at(out + token * out_stride, width)
        normalise(row, floats_at(weight, width), normed, floats_at(eps, 1)[0])


@numba.njit(fastmath={"reassoc", "contract"})  # the sum in lanes; NaN stays NaN
def normalise(row: Any, weight: Any, out: Any, eps: Any) -> None:  # pragma: no cover - compiled
    """RMSNorm of one row, in compiled code."""
    total = np.float32(0)
    for k in range(len(row)):
        total += row[k] * row[k]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
    for k in range(len(row)):
        out[k] = row[k] * factor * weight[k]


@cache
def gate_kernel() -> Kernel:
    """Return the kernel of SwiGLU: ``out = gate * sigmoid(gate) * up``."""
    return compile_kernel("gate", _gate)


def gate_arguments(*, gate: Numbers, up: Numbers, out: Numbers, width: int) -> Numbers:
    """Return its arguments; all are float32 [tokens, at least width], ``out`` may be ``gate``."""
    return words_of(*rows_at(gate), *rows_at(up), *rows_at(out), width)


def _gate(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    gates, stride, ups, up_stride, outs, out_stride, width = words(arguments, 7)
    for token in range(first, last):
        gate, up, out = gates + token * stride, ups + token * up_stride, outs + token * out_stride
        whole = width // LANES * LANES
        gate_lanes(gate, up, out, width // LANES)
        _gate_each(
            floats_at(gate, width)[whole:], floats_at(up, width)[whole:],
            floats_at(out, width)[whole:],
        )  # fmt: skip


@intrinsic
def gate_lanes(_context: Any, gate: Any, up: Any, out: Any, vectors: Any) -> Any:
    """Do what `_gate_each` does, with the same bits, for so many vectors at these addresses."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (gates, ups, outs, count) = Lanes(builder), values
        with lanes.count(count) as vector:
            gate, up, out = (lanes.at(row, vector, VECTOR_BYTES) for row in (gates, ups, outs))
            numbers = lanes.floats(gate)
            minus = lanes.exponential(lanes.less_by(lanes.every(0), numbers))
            share = lanes.divide(numbers, lanes.add(lanes.every(1), minus))
            lanes.store(lanes.multiply(share, lanes.floats(up)), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@numba.njit
def _gate_each(gate: Any, up: Any, out: Any) -> None:  # pragma: no cover - compiled
    for k in range(len(gate)):
        out[k] = gate[k] / (np.float32(1) + exponential(-gate[k])) * up[k]


@cache
def affine_kernel() -> Kernel:
    """Return the kernel of ``out = x * scale + shift``."""
    return compile_kernel("affine", _affine)


def affine_arguments(
    *, rows: Numbers, scale: Numbers | None, shift: Numbers | None, out: Numbers, width: int
) -> Numbers:
    """Return its arguments; ``out`` may be ``rows``, scale and shift are float32 [width]."""
    return words_of(*rows_at(rows), address(scale), address(shift), *rows_at(out), width)


def _affine(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, scales, shifts, outs, out_stride, width = words(arguments, 7)
    for token in range(first, last):
        row = floats_at(rows + token * stride, width)
        out = floats_at(outs + token * out_stride, width)
        if scales != 0:
            scale = floats_at(scales, width)
            for k in range(width):
                out[k] = row[k] * scale[k]
        elif rows != outs:
            for k in range(width):
                out[k] = row[k]
        if shifts != 0:
            shift = floats_at(shifts, width)
            for k in range(width):
                out[k] += shift[k]


@cache
def add_kernel() -> Kernel:
    """Return the kernel of ``out += x``."""
    return compile_kernel("add", _add)


def add_arguments(*, rows: Numbers, out: Numbers, width: int) -> Numbers:
    """Return its arguments; both are float32 [tokens, at least width]."""
    return words_of(*rows_at(rows), *rows_at(out), width)


def _add(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, outs, out_stride, width = words(arguments, 5)
    for token in range(first, last):
        row = floats_at(rows + token * stride, width)
        out = floats_at(outs + token * out_stride, width)
        for k in range(width):
            out[k] += row[k]


@cache
def share_kernel() -> Kernel:
    """Return the kernel of ``out += sigmoid(share) * x``, one share for each token."""
    return compile_kernel("share", _share)


def share_arguments(*, shares: Numbers, rows: Numbers, out: Numbers, width: int) -> Numbers:
    """Return its arguments, all float32; of ``shares`` the first column counts."""
    return words_of(*rows_at(shares), *rows_at(rows), *rows_at(out), width)


def _share(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    shares, share_stride, rows, stride, outs, out_stride, width = words(arguments, 7)
    for token in range(first, last):
        logit = floats_at(shares + token * share_stride, 1)[0]
        share = np.float32(1) / (np.float32(1) + exponential(-logit))
        row = floats_at(rows + token * stride, width)
        out = floats_at(outs + token * out_stride, width)
        for k in range(width):
            out[k] += share * row[k]
