"""Packing the blocks of GGUF files into matrices: the numbers stay what they are in the file.

================  ==================================================  =========================
kind              a block of a row in the file                        a weight
================  ==================================================  =========================
Q8_0              float16 d; 32 int8 q                                d * q
Q4_0              float16 d; 32 nibbles q                             d * (q - 8)
Q4_1              float16 d and m; 32 nibbles q                       d * q + m
Q4_K              float16 d and e; for each of 8 groups six bits s    d * s * q - e * t
                  and six bits t; 256 nibbles q
================  ==================================================  =========================

The integers are interleaved as in int8 and int4. The scales are float16 as in the file; in Q4_K a
word has s in its lower byte and t in its upper one, and the two float16 of sixteen rows follow the
words of eight groups. Block formats are those of ggml (``ggml-common.h``).
"""

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.packed_format import BLOCK_SCHEMES, GROUP_SIZE, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.quantisation import SUPER_GROUPS
from expertctl.package.gguf_blocks import read_small_scales
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
    matrix.data[...] = _interleave(scheme, blocks).reshape(-1)
    matrix.scales[...] = _arrange_scales(scheme, blocks, matrix.blocks).reshape(matrix.scales.shape)


def _interleave(scheme: Scheme, blocks: AnyArray) -> AnyArray:
    """[rows, count, bytes] -> the data of a matrix, uint8 [blocks, vectors, 16, 4]."""
    high = len(blocks) // LANES
    if scheme is Scheme.Q8_0:
        octets = blocks[:, :, 2:] ^ np.uint8(0x80)  # from signed to 128 more
        return octets.reshape(high, LANES, -1, 4).transpose(0, 2, 1, 3)
    stored = blocks[:, :, -GROUP_SIZE // 2 * (SUPER_GROUPS if scheme is Scheme.Q4_K else 1) :]
    # each stretch of bytes has one group of columns in the low nibbles, the next in the high ones
    width = GROUP_SIZE if scheme is Scheme.Q4_K else GROUP_SIZE // 2
    stretch = stored.reshape(len(blocks), -1, 1, width // 8, 2, 4)
    halves = np.concatenate((stretch & 15, stretch >> 4), axis=2)  # [rows, n, 2, width/8, 2, 4]
    packed = halves[..., 0, :] | halves[..., 1, :] << 4
    return packed.reshape(high, LANES, -1, 4).transpose(0, 2, 1, 3)


def _arrange_scales(scheme: Scheme, blocks: AnyArray, high: int) -> AnyArray:
    """[rows, count, bytes] -> the scales of a matrix, uint16 [blocks, ..., 16]."""
    count = blocks.shape[1]
    words = np.ascontiguousarray(blocks[:, :, : 2 if scheme in _ONE_SCALE else 4]).view(np.uint16)
    shared = words.reshape(high, LANES, count, -1).transpose(
        0, 2, 3, 1
    )  # [high, count, 1 or 2, 16]
    if scheme is not Scheme.Q4_K:
        return shared
    scales, minima = read_small_scales(blocks.reshape(-1, blocks.shape[2]))
    small = scales.astype(np.uint16) | minima.astype(np.uint16) << 8
    apart = small.reshape(high, LANES, count, SUPER_GROUPS).transpose(0, 2, 3, 1)
    return np.concatenate((apart, shared), axis=2)


_ONE_SCALE = (Scheme.Q8_0, Scheme.Q4_0)
