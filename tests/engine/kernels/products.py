"""Products as the kernels do them, and the plain formula in float64 that they are held against."""

from typing import Any

import numpy as np

from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.multiply import multiply_arguments, multiply_items, multiply_kernel
from expertctl.engine.kernels.packed import PackedMatrix, from_bfloat16, unpack
from expertctl.engine.kernels.rows import (
    PreparedRows,
    prepare_arguments,
    prepare_kernel,
    room_for_rows,
    rows_as_they_are,
)
from expertctl.engine.kernels.scheme import GROUP, Scheme

Array = np.ndarray[Any, Any]

FLOATS = (Scheme.FLOAT32, Scheme.FLOAT16)
INTEGERS = (Scheme.INT8, Scheme.INT4)


def random_numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def prepared(rows: Array, scheme: Scheme) -> PreparedRows:
    """What a scheme makes of float32 tokens."""
    if scheme in FLOATS:
        return rows_as_they_are(np.ascontiguousarray(rows))
    room = room_for_rows(scheme, *rows.shape)
    arguments = prepare_arguments(rows=rows, columns=rows.shape[1], prepared=room)
    prepare_kernel(scheme)(0, len(rows), arguments.ctypes.data)
    return room


def multiply(
    matrix: PackedMatrix, rows: Array, *, plain: bool = False, onto: Array | None = None
) -> Array:
    """The kernel's product of tokens with a matrix, [tokens, rows of the matrix]."""
    out = aligned((len(rows), matrix.blocks * LANES), np.float32)
    out[...] = np.nan
    if onto is not None:
        out[:, : matrix.rows] = onto
    tokens = np.array([len(rows)], np.int64)
    ready = prepared(rows, matrix.scheme)
    arguments = multiply_arguments(
        matrix=matrix, rows=ready, out=out, tokens=tokens, adds=onto is not None
    )
    kernel = multiply_kernel(matrix.scheme, plain=plain)
    kernel(0, multiply_items(matrix), arguments.ctypes.data)
    return out[:, : matrix.rows]


def formula(matrix: PackedMatrix, rows: Array) -> tuple[Array, Array]:
    """The product in float64, and how far float32 sums may be from it."""
    weights = unpack(matrix).astype(np.float64)
    tokens = as_numbers(prepared(rows, matrix.scheme), rows)
    reach = np.abs(tokens) @ np.abs(weights).T
    return tokens @ weights.T, (matrix.columns + 4) * 2.0**-23 * reach + 1e-30


def as_numbers(ready: PreparedRows, rows: Array) -> Array:
    """What prepared tokens stand for, [tokens, columns]."""
    columns = rows.shape[1]
    if ready.data.dtype == np.uint16:
        return from_bfloat16(ready.data[:, :columns]).astype(np.float64)
    if ready.data.dtype == np.int8:
        each = np.repeat(ready.scales.astype(np.float64), GROUP, axis=1)[:, :columns]
        return ready.data[:, :columns] * each
    return ready.data[:, :columns].astype(np.float64)
