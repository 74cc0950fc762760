"""Code that packs matrices in blocks of sixteen rows, and looks up rows of an embedding."""

import numpy as np

from expertctl.engine.kernels.compiled.memory import (
    float32_view,
    half_bits_to_float32,
    int64_view,
    load_int64s,
    uint8_view,
    uint16_view,
    uint32_view,
)
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, SCALES_BYTES


def interleave_words(first: int, last: int, arguments: int) -> None:
    """Interleave rows in words of four bytes."""
    rows, stride, vectors, out = load_int64s(arguments, 4)
    source, target = uint32_view(rows, 1 << 40), uint32_view(out, 1 << 40)
    for block in range(first, last):
        for lane in range(LANES):
            begin = (block * LANES + lane) * (stride // 4)
            end = block * vectors * LANES + lane
            for vector in range(vectors):
                target[end + vector * LANES] = source[begin + vector]


def interleave_halves(first: int, last: int, arguments: int) -> None:
    """Interleave rows in words of two bytes."""
    rows, stride, vectors, out = load_int64s(arguments, 4)
    source, target = uint16_view(rows, 1 << 40), uint16_view(out, 1 << 40)
    for block in range(first, last):
        for lane in range(LANES):
            begin = (block * LANES + lane) * (stride // 2)
            end = block * vectors * LANES + lane
            for vector in range(vectors):
                target[end + vector * LANES] = source[begin + vector]


def embed_float32(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in float32."""
    data, _, columns, vectors, _, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = float32_view(data + token // LANES * vectors * 64, vectors * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            row[k] = block[k * LANES + token % LANES]


def embed_float16(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in float16."""
    data, _, columns, vectors, _, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint16_view(data + token // LANES * vectors * 32, vectors * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            row[k] = half_bits_to_float32(block[k * LANES + token % LANES])


def embed_bfloat16(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in bfloat16."""
    data, _, columns, vectors, _, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint16_view(data + token // LANES * vectors * 64, vectors * 2 * LANES)
        bits = uint32_view(out + item * stride, columns)
        for k in range(columns):
            number = block[(k // 2 * LANES + token % LANES) * 2 + k % 2]
            bits[k] = np.uint32(number) << np.uint32(16)


def embed_int8(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in int8."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 64, vectors * 64)
        scale = uint16_view(scales + token // LANES * groups * SCALES_BYTES, groups * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            step = np.int32(block[(k // 4 * LANES + token % LANES) * 4 + k % 4]) - 128
            bits = np.uint32(scale[k // GROUP_SIZE * LANES + token % LANES]) << np.uint32(16)
            row[k] = np.float32(step) * np.int32(bits).view(np.float32)
