"""Factors of inputs, outputs and biases, where each row of a batch has those of its own plan."""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.batch import RECORD_BYTES, VECTORS_AT, plan_of
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.memory import floats_at, words

Numbers = np.ndarray[Any, Any]


@cache
def scale_kernel() -> Kernel:
    """Return the kernel of ``out = u * x``, or of a copy where a plan has no u; items are rows."""
    return compile_kernel("scale", _scale)


def scale_arguments(*, batch: Numbers, module: int, rows: Numbers, out: Numbers) -> Numbers:
    """Return its arguments; ``out`` is float32 [rows, columns], ``rows`` as wide at least."""
    return words_of(address(batch, np.int64), module, *rows_at(rows), *rows_at(out), out.shape[1])


def _scale(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    batch, module, rows, stride, outs, out_stride, width = words(arguments, 7)
    for item in range(first, last):
        row = floats_at(rows + item * stride, width)
        out = floats_at(outs + item * out_stride, width)
        plan = plan_of(batch, item)
        factors = 0
        if plan != 0:
            factors = words(plan + module * RECORD_BYTES + VECTORS_AT, 3)[0]
        put_row(row, factors, out, 0, width)


@register_jitable
def put_row(
    row: Any, factors: Any, out: Any, adds: Any, width: Any
) -> None:  # pragma: no cover - compiled
    """Write, or add, a row times its factors if there are any, in compiled code."""
    if factors != 0:
        scale = floats_at(factors, width)
        if adds != 0:
            for k in range(width):
                out[k] += row[k] * scale[k]
        else:
            for k in range(width):
                out[k] = row[k] * scale[k]
    elif adds != 0:
        for k in range(width):
            out[k] += row[k]
    else:
        for k in range(width):
            out[k] = row[k]


@cache
def settle_kernel() -> Kernel:
    """Return the kernel of ``out = d * x + e * b`` or ``out += d * x``, ``+= e * b``.

    Items are rows. What a plan does not have is neutral, and b may be missing.
    """
    return compile_kernel("settle", _settle)


def settle_arguments(
    *,
    batch: Numbers,
    module: int,
    rows: Numbers,
    bias: Numbers | None,
    out: Numbers,
    width: int,
    adds: bool,
) -> Numbers:
    """Return its arguments; both are float32 [rows, at least width], ``out`` may be ``rows``."""
    return words_of(
        address(batch, np.int64),
        module,
        *rows_at(rows),
        address(bias),
        *rows_at(out),
        width,
        adds,
    )


def _settle(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    batch, module, rows, stride, biases, outs, out_stride, width, adds = words(arguments, 9)
    for item in range(first, last):
        row = floats_at(rows + item * stride, width)
        out = floats_at(outs + item * out_stride, width)
        plan = plan_of(batch, item)
        scales, shares = 0, 0
        if plan != 0:
            _, scales, shares = words(plan + module * RECORD_BYTES + VECTORS_AT, 3)
        put_row(row, scales, out, adds, width)
        if biases != 0:
            put_row(floats_at(biases, width), shares, out, 1, width)
