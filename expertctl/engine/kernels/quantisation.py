"""Activations in bfloat16 or int8, and weights in int8, int5 or int4.

Integers have a scale per row and group of 32 columns.

*Activations* in int8 are symmetric, with a float32 scale. A group is rounded twice, so that its
largest is 127 or 124 steps; the scale of each is fitted by least squares, and the one with the
smaller sum of squared errors is used. That removes 6 % of the squared error of one rounding
without a fit. A group that contains NaN or infinity has a NaN scale, so its products are NaN; one
whose largest is below 2^-100 counts as zero.

*Weights in int8* are symmetric, too; their scale is a bfloat16. *Weights in int4 and int5* are
``scale * (q - zero)`` with unsigned q. Scale and zero point share sixteen bits: the scale is a
float of five bits of exponent and four of fraction, the zero point has fractions of a step. Each
group is fitted by least squares: of several ranges, clipped a little more each time, and two
refinements of each, the one with the smallest sum of squared errors is used.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, Scheme
from expertctl.engine.kernels.program import array_address, encode_operands, row_address

_CODE = "expertctl.engine.kernels.compiled.quantisation"
"""The module with the code, which is imported only to compile it."""
INT8_MAX, INT8_ZERO = 127, 128
"""The largest weight or activation in steps, and the byte that stands for 0 in weights."""
ACTIVATION_RANGES = (127, 124)
"""Steps of the largest activation of a group that are tried."""
INT8_SCALES = 16
"""Scales that are tried for a group of weights, neighbouring bfloat16 numbers."""
_NUMBERS = {Scheme.BFLOAT16: np.uint16, Scheme.INT8: np.int8}

ZERO_BITS = 7
"""Bits of a zero point, below those of the scale."""
ZERO_FRACTIONS = {Scheme.INT4: 8, Scheme.INT5: 4}
"""Units of the zero point per step: the zero point is nearly any number that q can be."""
SCALE_SHIFT = 19
"""Bits of a float32 below the five of exponent and four of fraction that are its scale."""
SMALLEST_SCALE = (127 - 20) << 4
LARGEST_SCALE = SMALLEST_SCALE + (1 << 9) - 1
"""The smallest scale, 2^-20, and the largest, 31 * 2^7, as float32 without the bits below."""
RANGE_STEPS, RANGE_SHRINKAGE, REFINEMENTS = 8, 0.03, 2
"""Ranges that are tried for a group, what is clipped in each, and how often each is refined."""


FIXED_ZEROS = {
    Scheme.INT8: INT8_ZERO,
    Scheme.Q8_0: INT8_ZERO,
    Scheme.Q4_0: 8,
    Scheme.Q5_0: 16,
    Scheme.Q6_K: 32,
}
"""The stored number that stands for 0, in schemes whose zero point is not stored."""
MINIMA = {Scheme.Q4_1: 1, Scheme.Q5_1: 1, Scheme.Q4_K: -1, Scheme.Q5_K: -1}
"""Schemes of ``scale * q + minimum``, and the sign with which the minimum is stored."""
SUPER_GROUPS = 8
"""Groups that share the float16 numbers of a super-block, in Q4_K, Q5_K and Q6_K."""


def decode_scales(scheme: Scheme, stored: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return scales and zero points, float32, from the stored uint16 of a scheme of weights.

    In schemes with `MINIMA`, these take the place of the zero points. The two halves of a group in
    Q6_K count as groups.
    """
    if scheme is Scheme.INT8:
        return (stored.astype(np.uint32) << 16).view(np.float32), np.full(1, INT8_ZERO, np.float32)
    if scheme is Scheme.Q6_K:
        return _decode_halves(stored), np.full(1, FIXED_ZEROS[scheme], np.float32)
    if scheme in FIXED_ZEROS:
        zero = np.full(1, FIXED_ZEROS[scheme], np.float32)
        return stored.view(np.float16).astype(np.float32), zero
    if scheme in (Scheme.Q4_1, Scheme.Q5_1):
        both = stored.view(np.float16).astype(np.float32)
        return both[..., :LANES], both[..., LANES:]
    if scheme in (Scheme.Q4_K, Scheme.Q5_K):
        return _decode_super_blocks(stored)
    bits = ((stored.astype(np.uint32) >> ZERO_BITS) + SMALLEST_SCALE) << SCALE_SHIFT
    zeros = (stored & ((1 << ZERO_BITS) - 1)).astype(np.float32)
    return bits.view(np.float32), zeros / np.float32(ZERO_FRACTIONS[scheme])


def _decode_super_blocks(stored: AnyArray) -> tuple[AnyArray, AnyArray]:
    """[blocks, groups, 20] -> scales and minima, both [blocks, groups, 16]."""
    blocks = stored.reshape(len(stored), -1, SUPER_GROUPS + 2, LANES)
    small = blocks[:, :, :SUPER_GROUPS]
    shared = blocks[:, :, SUPER_GROUPS:].view(np.float16).astype(np.float32)
    scales = shared[:, :, :1] * (small & 0xFF).astype(np.float32)
    minima = -shared[:, :, 1:] * (small >> 8).astype(np.float32)
    shape = (len(stored), -1, LANES)
    return scales.reshape(shape), minima.reshape(shape)


def _decode_halves(stored: AnyArray) -> AnyArray:
    """[blocks, groups, 18] -> scales, [blocks, 2 * groups, 16]."""
    blocks = stored.reshape(len(stored), -1, SUPER_GROUPS + 1, LANES)
    small = np.ascontiguousarray(blocks[:, :, :SUPER_GROUPS]).view(np.int8)
    halves = small.reshape(*small.shape[:3], LANES, 2).swapaxes(3, 4).astype(np.float32)
    shared = blocks[:, :, SUPER_GROUPS:].view(np.float16).astype(np.float32)
    return (shared[..., None, :] * halves).reshape(len(stored), -1, LANES)


def encode_scale(scheme: Scheme, scale: float) -> int:
    """Return the stored uint16 of about this scale; random steps have a mean of zero with it."""
    bits = int(np.float32(scale).view(np.uint32))
    if scheme is Scheme.INT8:
        return bits >> 16
    code = (bits >> SCALE_SHIFT) - SMALLEST_SCALE
    middle = ((1 << scheme.layout.bits) - 1) * ZERO_FRACTIONS[scheme] // 2
    return code << ZERO_BITS | middle


@dataclass(frozen=True, slots=True, eq=False)
class PreparedActivations:
    """The activations of one GEMM, [tokens, columns] in the number format of the scheme.

    int8 also has ``scales`` float32 and ``sums`` int32, both [tokens, groups]; columns are padded
    with zeros to whole groups.
    """

    data: AnyArray
    scales: AnyArray
    sums: AnyArray

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.data.nbytes + self.scales.nbytes + self.sums.nbytes


def padded_columns(scheme: Scheme, columns: int) -> int:
    """Return the columns of activations with their padding."""
    unit = GROUP_SIZE if scheme.layout.is_grouped else scheme.layout.columns
    return -(-columns // unit) * unit


def allocate_activations(scheme: Scheme, tokens: int, columns: int) -> PreparedActivations:
    """Return buffers for GEMMs with matrices in bfloat16 or integers."""
    wide, groups = padded_columns(scheme, columns), scheme.layout.count_groups(columns)
    return PreparedActivations(
        aligned_zeros((tokens, wide), _NUMBERS[scheme.activations]),
        aligned_zeros((tokens, groups), np.float32),
        aligned_zeros((tokens, groups), np.int32),
    )


def wrap_float_activations(rows: AnyArray) -> PreparedActivations:
    """Wrap float32 rows [tokens, columns] for a scheme that takes them unchanged."""
    none = (len(rows), 0)
    return PreparedActivations(rows, aligned_zeros(none, np.float32), aligned_zeros(none, np.int32))


def activation_arguments(
    *, rows: AnyArray, columns: int, prepared: PreparedActivations
) -> AnyArray:
    """Return the arguments of either kernel; ``rows`` is float32 [tokens, at least columns]."""
    place, stride = row_address(rows)
    return encode_operands(
        place,
        stride // 4,
        columns,
        array_address(prepared.data, prepared.data.dtype),
        prepared.data.shape[1],
        array_address(prepared.scales),
        array_address(prepared.sums, np.int32),
        prepared.scales.shape[1],
    )


def activation_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that converts activations for a scheme; one item is one token."""
    return _rounding_kernel() if scheme is Scheme.BFLOAT16 else _quantising_kernel()


@cache
def _rounding_kernel() -> Kernel:
    return load_kernel("round to bfloat16", _CODE, "round_rows")


@cache
def _quantising_kernel() -> Kernel:
    return load_kernel("quantise to int8", _CODE, "quantise_rows")


@cache
def weight_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that quantises weights to integers; one item is a block of sixteen rows."""
    name = f"quantise weights to {scheme.value}"
    return load_kernel(name, _CODE, "make_quantise_blocks", scheme=scheme)


def weight_arguments(
    *, rows: AnyArray, columns: int, data: AnyArray, scales: AnyArray, wrong: AnyArray
) -> AnyArray:
    """Return its arguments.

    ``rows`` is float32 [rows, at least columns], of whole blocks; ``data`` and ``scales`` are
    those of a packed matrix. ``wrong``, int64 [1], is set to 1 if there is NaN, infinity, or a
    number that is too large for the scheme.
    """
    place, stride = row_address(rows)
    return encode_operands(
        place,
        stride,
        columns,
        array_address(data, np.uint8),
        array_address(scales, np.uint16),
        array_address(wrong, np.int64),
    )
