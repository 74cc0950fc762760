"""The rows of a packed embedding, as float32."""

from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import (
    float16_value,
    floats_at,
    halves_at,
    longs_at,
    octets_at,
    words,
    words_at,
)
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.scheme import GROUP, Scheme

Numbers = np.ndarray[Any, Any]


@cache
def embed_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel for an embedding of one scheme; one item is one token."""
    function = {
        Scheme.FLOAT32: _float32,
        Scheme.FLOAT16: _float16,
        Scheme.BFLOAT16: _bfloat16,
        Scheme.INT8: _int8,
        Scheme.INT4: _int4,
    }[scheme]
    return compile_kernel(f"embed {scheme.value}", function)


def embed_arguments(*, matrix: PackedMatrix, tokens: Numbers, out: Numbers) -> Numbers:
    """Return the arguments: ``tokens`` int64 [n], ``out`` float32 [n, at least columns]."""
    layout = matrix.scheme.layout
    return words_of(
        address(matrix.data, matrix.data.dtype),
        address(matrix.scales),
        matrix.columns,
        layout.vectors(matrix.columns),
        layout.groups(matrix.columns),
        address(tokens, np.int64),
        *rows_at(out),
    )


def _float32(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    data, _, columns, vectors, _, tokens, out, stride = words(arguments, 8)
    for item in range(first, last):
        token = longs_at(tokens, item + 1)[item]
        block = floats_at(data + token // LANES * vectors * 64, vectors * LANES)
        row = floats_at(out + item * stride, columns)
        for k in range(columns):
            row[k] = block[k * LANES + token % LANES]


def _float16(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    data, _, columns, vectors, _, tokens, out, stride = words(arguments, 8)
    for item in range(first, last):
        token = longs_at(tokens, item + 1)[item]
        block = halves_at(data + token // LANES * vectors * 32, vectors * LANES)
        row = floats_at(out + item * stride, columns)
        for k in range(columns):
            row[k] = float16_value(block[k * LANES + token % LANES])


def _bfloat16(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    data, _, columns, vectors, _, tokens, out, stride = words(arguments, 8)
    for item in range(first, last):
        token = longs_at(tokens, item + 1)[item]
        block = halves_at(data + token // LANES * vectors * 64, vectors * 2 * LANES)
        bits = words_at(out + item * stride, columns)
        for k in range(columns):
            bits[k] = np.uint32(block[(k // 2 * LANES + token % LANES) * 2 + k % 2]) << np.uint32(
                16
            )


def _int8(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    data, scales, columns, vectors, groups, tokens, out, stride = words(arguments, 8)
    for item in range(first, last):
        token = longs_at(tokens, item + 1)[item]
        block = octets_at(data + token // LANES * vectors * 64, vectors * 64)
        scale = floats_at(scales + token // LANES * groups * 64, groups * LANES)
        row = floats_at(out + item * stride, columns)
        for k in range(columns):
            step = np.int32(block[(k // 4 * LANES + token % LANES) * 4 + k % 4]) - 128
            row[k] = np.float32(step) * scale[k // GROUP * LANES + token % LANES]


def _int4(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    data, scales, columns, vectors, groups, tokens, out, stride = words(arguments, 8)
    for item in range(first, last):
        token = longs_at(tokens, item + 1)[item]
        block = octets_at(data + token // LANES * vectors * 64, vectors * 64)
        scale = floats_at(scales + token // LANES * groups * 64, groups * LANES)
        row = floats_at(out + item * stride, columns)
        for k in range(columns):
            pair = block[(k // 8 * LANES + token % LANES) * 4 + k % 4]
            step = np.int32((pair >> np.uint8(4 * (k % 8 // 4))) & np.uint8(15)) - 8
            row[k] = np.float32(step) * scale[k // GROUP * LANES + token % LANES]
