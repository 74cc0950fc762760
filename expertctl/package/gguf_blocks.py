"""Decoding the blocks of GGUF tensors into float32, vectorised and without torch.

Each function takes blocks as bytes [blocks, size of one] and returns their numbers [blocks,
numbers of one], equal to the last bit to those of the ``gguf`` package. The layouts are those of
``ggml-quants``: a block of 32 has one scale (and in the ``_1`` kinds one minimum) in float16;
a block of 256 has scales of its own for parts of 16 or 32 numbers, themselves in few bits.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from expertctl.package.gguf_file import BlockKind

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]
_SUPER = 256
"""The numbers of a block with scales for its parts."""


def decode_blocks(kind: BlockKind, data: bytes | bytearray) -> _Floats:
    """Return the numbers of whole blocks, float32 [numbers]."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, kind.size)
    return _DECODERS[kind.name](blocks).reshape(-1)


def _decode_f32(blocks: _Bytes) -> _Floats:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: _Bytes) -> _Floats:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: _Bytes) -> _Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q8_0(blocks: _Bytes) -> _Floats:
    return _read_half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _decode_scaled(steps: _Bytes, blocks: _Bytes, *, offset: int) -> _Floats:
    return _read_half(blocks, 0) * (steps.astype(np.float32) - np.float32(offset))


def _decode_least(steps: _Bytes, blocks: _Bytes) -> _Floats:
    return _read_half(blocks, 0) * steps.astype(np.float32) + _read_half(blocks, 2)


def _decode_super(steps: _Bytes, blocks: _Bytes) -> _Floats:
    scales, minimums = _read_k_scales(blocks)
    numbers = steps.reshape(-1, 8, 32).astype(np.float32)
    return (scales * numbers - minimums).reshape(-1, _SUPER)


def _decode_q6_k(blocks: _Bytes) -> _Floats:
    numbers = _read_steps_q6_k(blocks).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    parts = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales = _read_half(blocks, 208) * parts
    return (scales[:, :, None] * numbers).reshape(-1, _SUPER)


_DECODERS: Mapping[str, Callable[[_Bytes], _Floats]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q8_0": _decode_q8_0,
    "Q4_0": lambda blocks: _decode_scaled(_read_nibbles(blocks), blocks, offset=8),
    "Q4_1": lambda blocks: _decode_least(_read_nibbles(blocks), blocks),
    "Q5_0": lambda blocks: _decode_scaled(_read_steps_q5(blocks), blocks, offset=16),
    "Q5_1": lambda blocks: _decode_least(_read_steps_q5(blocks), blocks),
    "Q4_K": lambda blocks: _decode_super(_read_steps_q4_k(blocks), blocks),
    "Q5_K": lambda blocks: _decode_super(_read_steps_q5_k(blocks), blocks),
    "Q6_K": _decode_q6_k,
}


def read_steps(kind: BlockKind, blocks: _Bytes) -> _Bytes:
    """Return the integers of blocks in four, five or six bits, unsigned, [blocks, numbers]."""
    return _STEPS[kind.name](blocks)


def _read_nibbles(blocks: _Bytes) -> _Bytes:
    """Return 32 numbers of the last 16 bytes: first all low halves, then all high ones."""
    data = blocks[:, -16:]
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=1)


def _read_steps_q5(blocks: _Bytes) -> _Bytes:
    """Return those with the bits before the nibbles as fifth ones."""
    fifth = np.ascontiguousarray(blocks[:, -20:-16])
    return _read_nibbles(blocks) | np.unpackbits(fifth, axis=1, bitorder="little") << np.uint8(4)


def _read_steps_q4_k(blocks: _Bytes) -> _Bytes:
    """Return the numbers of 8 parts; 32 bytes hold two parts, in low and high halves."""
    shifts = np.array([[0], [4]], np.uint8)
    data = blocks[:, -128:].reshape(-1, 4, 1, 32)
    return ((data >> shifts) & np.uint8(15)).reshape(-1, _SUPER)


def _read_steps_q5_k(blocks: _Bytes) -> _Bytes:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & np.uint8(1)
    return _read_steps_q4_k(blocks) | high.reshape(-1, _SUPER) << np.uint8(4)


def _read_steps_q6_k(blocks: _Bytes) -> _Bytes:
    """Read two halves of 128 numbers, each from 64 bytes of low and 32 of high bits."""
    count = len(blocks)
    low = blocks[:, :128].reshape(count, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    shifts = np.array([[0], [2], [4], [6]], np.uint8)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts & np.uint8(3)
    return (low.reshape(count, 2, 4, 32) | high << np.uint8(4)).reshape(count, _SUPER)


_STEPS: Mapping[str, Callable[[_Bytes], _Bytes]] = {
    "Q4_0": _read_nibbles,
    "Q4_1": _read_nibbles,
    "Q5_0": _read_steps_q5,
    "Q5_1": _read_steps_q5,
    "Q4_K": _read_steps_q4_k,
    "Q5_K": _read_steps_q5_k,
    "Q6_K": _read_steps_q6_k,
}


def _read_half(blocks: _Bytes, begin: int) -> _Floats:
    """Return one float16 of each block as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2").astype(np.float32)


def read_small_scales(blocks: _Bytes) -> tuple[_Bytes, _Bytes]:
    """Return the scales and minimums of six bits of the 8 parts of each block, [blocks, 8] each.

    Twelve bytes, the fifth on, hold four of each in the low bits of bytes, the others in halves of
    the last four bytes and the top bits of the first eight.
    """
    first, second, third = (blocks[:, n : n + 4] for n in (4, 8, 12))
    scales = [first & 63, (third & 15) | (first >> 2 & 48)]
    minimums = [second & 63, (third >> 4) | (second >> 2 & 48)]
    return np.concatenate(scales, axis=1), np.concatenate(minimums, axis=1)


def _read_k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Return scales and minimums of the 8 parts of each block, [blocks, 8, 1] each."""
    factors = (_read_half(blocks, 0), _read_half(blocks, 2))
    parts = [part.astype(np.float32) for part in read_small_scales(blocks)]
    return (factors[0] * parts[0])[:, :, None], (factors[1] * parts[1])[:, :, None]


def restore_row_order(data: bytes, *, row_bytes: int, head_dim: int) -> bytes:
    """Return the rows of whole heads in the order of Hugging Face files.

    In files of the llama architecture, llama.cpp rotates neighbouring rows of a head, where others
    rotate a row of the first half with one of the second.
    """
    pairs = np.frombuffer(data, np.uint8).reshape(-1, head_dim // 2, 2, row_bytes)
    return pairs.swapaxes(1, 2).tobytes()


def transpose_rows(parts: Iterable[_Floats]) -> _Floats:
    """Return rows that come in several parts as columns."""
    return np.ascontiguousarray(np.concatenate(list(parts)).T)


def narrow_floats(numbers: _Floats, dtype: str) -> bytes:
    """Return the bytes of numbers in a float type, rounded towards zero in ``BF16``."""
    if dtype == "F32":
        return numbers.astype("<f4").tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return numbers.astype("<f2").tobytes()
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def is_exact_in(numbers: _Floats, dtype: str) -> bool:
    """Tell whether all numbers can be held in ``F16`` or ``BF16`` without rounding."""
    decode = _decode_f16 if dtype == "F16" else _decode_bf16
    blocks = np.frombuffer(narrow_floats(numbers, dtype), np.uint8).reshape(-1, 2)
    return bool(np.array_equal(decode(blocks).reshape(-1), numbers.reshape(-1)))
