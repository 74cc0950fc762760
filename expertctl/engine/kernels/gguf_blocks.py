"""Packing the blocks of GGUF files into matrices: the numbers stay what they are in the file.

============  ==================================================  ====================
kind          a block of a row in the file                        a weight
============  ==================================================  ====================
Q8_0          float16 d; 32 int8 q                                d * q
Q4_0, Q5_0    float16 d; 32 integers q of four or five bits       d * (q - 8 or 16)
Q4_1, Q5_1    float16 d and m; 32 integers q                      d * q + m
Q4_K, Q5_K    float16 d and e; for each of 8 groups six bits s    d * s * q - e * t
              and six bits t; 256 integers q
Q6_K          float16 d; for each of 16 half groups int8 s;       d * s * (q - 32)
              256 integers q of six bits
============  ==================================================  ====================

The integers are interleaved as in int8, int4 and int5; the sixth bits follow the fifth. The scales
are float16 as in the file; in Q4_K and Q5_K a word has s in its lower byte and t in its upper one,
in Q6_K the s of both halves, and the float16 of sixteen rows follow the words of eight groups.
Block formats are those of ggml (``ggml-common.h``).
"""

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.packed_format import BLOCK_SCHEMES, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.quantisation import MINIMA, SUPER_GROUPS
from expertctl.package.gguf_blocks import read_small_scales, read_steps
from expertctl.package.gguf_file import BLOCK_KINDS

_KINDS = {kind.name: kind for kind in BLOCK_KINDS.values()}
BLOCK_BYTES = {scheme: _KINDS[scheme.name].size for scheme in BLOCK_SCHEMES}
"""Bytes of a block in the file."""
BLOCK_COLUMNS = {scheme: _KINDS[scheme.name].numbers for scheme in BLOCK_SCHEMES}
"""Columns of a block."""


def pack_blocks(matrix: PackedMatrix, rows: AnyArray) -> None:
    """Pack rows of blocks as they are in a file, uint8 [rows, bytes], into a matrix or a slice.

    ``columns`` of the matrix must fill blocks.
    """
    scheme = matrix.scheme
    count, left = divmod(matrix.columns, BLOCK_COLUMNS[scheme])
    assert not left, "rows consist of whole blocks"
    assert rows.shape == (matrix.rows, count * BLOCK_BYTES[scheme])
    missing = -matrix.rows % LANES
    filled = np.pad(rows, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(rows)
    blocks = filled.reshape(len(filled), count, -1)
    matrix.data[...] = _interleave(scheme, blocks, matrix.blocks).reshape(-1)
    matrix.scales[...] = _arrange_scales(scheme, blocks, matrix.blocks).reshape(matrix.scales.shape)


def _interleave(scheme: Scheme, blocks: AnyArray, high: int) -> AnyArray:
    """[rows, count, bytes] -> the data of a matrix, uint8 [blocks, vectors, bytes of a vector]."""
    if scheme is Scheme.Q8_0:
        octets = blocks[:, :, 2:] ^ np.uint8(0x80)  # from signed to 128 more
        return octets.reshape(high, LANES, -1, 4).transpose(0, 2, 1, 3)
    steps = read_steps(_KINDS[scheme.name], blocks.reshape(-1, blocks.shape[2]))
    numbers = steps.reshape(high, LANES, -1, 2, 4).transpose(0, 2, 3, 1, 4)  # [high, n, 2, 16, 4]
    packed = numbers[:, :, 0] & 15 | numbers[:, :, 1] << 4
    planes: list[AnyArray] = [packed.reshape(*packed.shape[:2], -1)]
    for plane in range(scheme.layout.bit_planes):
        bits = (numbers >> 4 + plane & 1).reshape(*numbers.shape[:2], -1)
        planes.append(np.packbits(bits, axis=2, bitorder="little"))
    return np.concatenate(planes, axis=2)


def _arrange_scales(scheme: Scheme, blocks: AnyArray, high: int) -> AnyArray:
    """[rows, count, bytes] -> the scales of a matrix, uint16 [blocks, ..., 16]."""
    count = blocks.shape[1]
    begin = 208 if scheme is Scheme.Q6_K else 0
    end = begin + (4 if scheme in MINIMA else 2)
    words = np.ascontiguousarray(blocks[:, :, begin:end]).view(np.uint16)
    shared = _arrange_words(words, high)
    match scheme:
        case Scheme.Q4_K | Scheme.Q5_K:
            scales, minima = read_small_scales(blocks.reshape(-1, blocks.shape[2]))
            small = scales.astype(np.uint16) | minima.astype(np.uint16) << 8
        case Scheme.Q6_K:
            small = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.uint16)
        case _:
            return shared
    apart = _arrange_words(small.reshape(-1, count, SUPER_GROUPS), high)
    return np.concatenate((apart, shared), axis=2)


def _arrange_words(words: AnyArray, high: int) -> AnyArray:
    """[rows, count, n] -> [blocks, count, n, 16]."""
    return words.reshape(high, LANES, words.shape[1], -1).transpose(0, 2, 3, 1)
