"""Code that looks up rows of an embedding in the blocks of a GGUF file."""

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.compiled.memory import (
    float32_view,
    half_bits_to_float32,
    int64_view,
    load_int64s,
    uint8_view,
    uint16_view,
)
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES


@register_jitable
def _read_nibble(block, column, lane):  # type: ignore[no-untyped-def]  # compiled
    stored = block[(column // 8 * LANES + lane) * 4 + column % 4]
    return np.int32(stored >> 4) if column % 8 >= 4 else np.int32(stored & 15)


@register_jitable
def _read_super_scales(scale, group, lane):  # type: ignore[no-untyped-def]  # compiled
    """Return the scale and the minimum of a group below those of its super-block."""
    at = group // 8 * 10 * LANES + lane
    small = np.int32(scale[at + group % 8 * LANES])
    shared = half_bits_to_float32(scale[at + 8 * LANES])
    lower = half_bits_to_float32(scale[at + 9 * LANES])
    return shared * np.float32(small & 255), lower * np.float32(small >> 8)


def embed_q8_0(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q8_0."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 64, vectors * 64)
        scale = uint16_view(scales + token // LANES * groups * 32, groups * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            step = np.int32(block[(k // 4 * LANES + token % LANES) * 4 + k % 4]) - 128
            factor = half_bits_to_float32(scale[k // GROUP_SIZE * LANES + token % LANES])
            row[k] = np.float32(step) * factor


def embed_q4_0(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q4_0."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 64, vectors * 64)
        scale = uint16_view(scales + token // LANES * groups * 32, groups * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            factor = half_bits_to_float32(scale[k // GROUP_SIZE * LANES + token % LANES])
            row[k] = np.float32(_read_nibble(block, k, token % LANES) - 8) * factor


def embed_q4_1(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q4_1."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 64, vectors * 64)
        scale = uint16_view(scales + token // LANES * groups * 64, groups * 2 * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            at = k // GROUP_SIZE * 2 * LANES + token % LANES
            factor, least = half_bits_to_float32(scale[at]), half_bits_to_float32(scale[at + LANES])
            row[k] = np.float32(_read_nibble(block, k, token % LANES)) * factor + least


def embed_q4_k(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q4_K."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 64, vectors * 64)
        scale = uint16_view(scales + token // LANES * groups * 40, groups * 20)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            factor, least = _read_super_scales(scale, k // GROUP_SIZE, token % LANES)
            row[k] = np.float32(_read_nibble(block, k, token % LANES)) * factor - least


@register_jitable
def _read_planes(block, column, lane, planes):  # type: ignore[no-untyped-def]  # compiled
    """Return an integer of a nibble and one or two further bits."""
    begin = column // 8 * (64 + 16 * planes)
    place = lane * 4 + column % 4
    part = column % 8 // 4
    step = np.int32(block[begin + place] >> 4 if part else block[begin + place] & 15)
    for plane in range(planes):
        octet = np.int32(block[begin + 64 + 16 * plane + 8 * part + place // 8])
        step |= (octet >> place % 8 & 1) << (4 + plane)
    return step


def embed_q5_0(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q5_0."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 80, vectors * 80)
        scale = uint16_view(scales + token // LANES * groups * 32, groups * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            factor = half_bits_to_float32(scale[k // GROUP_SIZE * LANES + token % LANES])
            row[k] = np.float32(_read_planes(block, k, token % LANES, 1) - 16) * factor


def embed_q5_1(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q5_1."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 80, vectors * 80)
        scale = uint16_view(scales + token // LANES * groups * 64, groups * 2 * LANES)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            at = k // GROUP_SIZE * 2 * LANES + token % LANES
            factor, least = half_bits_to_float32(scale[at]), half_bits_to_float32(scale[at + LANES])
            row[k] = np.float32(_read_planes(block, k, token % LANES, 1)) * factor + least


def embed_q5_k(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q5_K."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 80, vectors * 80)
        scale = uint16_view(scales + token // LANES * groups * 40, groups * 20)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            factor, least = _read_super_scales(scale, k // GROUP_SIZE, token % LANES)
            row[k] = np.float32(_read_planes(block, k, token % LANES, 1)) * factor - least


def embed_q6_k(first: int, last: int, arguments: int) -> None:
    """Look up rows of an embedding in Q6_K."""
    data, scales, columns, vectors, groups, tokens, out, stride = load_int64s(arguments, 8)
    for item in range(first, last):
        token = int64_view(tokens, item + 1)[item]
        block = uint8_view(data + token // LANES * vectors * 96, vectors * 96)
        scale = uint16_view(scales + token // LANES * groups * 36, groups * 18)
        row = float32_view(out + item * stride, columns)
        for k in range(columns):
            group = k // GROUP_SIZE
            at = group // 8 * 9 * LANES + token % LANES
            small = np.int32(scale[at + group % 8 * LANES]) >> (8 if k % GROUP_SIZE >= 16 else 0)
            signed = (small & 255 ^ 128) - 128
            factor = half_bits_to_float32(scale[at + 8 * LANES]) * np.float32(signed)
            row[k] = np.float32(_read_planes(block, k, token % LANES, 2) - 32) * factor
