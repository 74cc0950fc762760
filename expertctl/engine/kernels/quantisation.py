"""Quantisation of activations (bfloat16, int8) and of int4 weights.

int8 is symmetric, with a scale per token and group of 128 columns; the largest of a group is 127
steps. A group that contains NaN or infinity has a NaN scale, so its products are NaN; one whose
largest is below 2^-100 counts as zero.

int4 steps range from -8 to 7, with the scale that fits a group best. The largest of a group is
mapped to -7, ..., -10, and values beyond -8 or 7 are clipped: a finer step for most values may
outweigh a larger error of a few. Of these candidates, each with its best scale, ``sum(x q) / sum(q
q)``, the one with the smallest sum of squared errors wins. So a scale may be negative. The error is
a sixth smaller than with the largest mapped to 7.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.program import array_address, encode_operands, row_address

_CODE = "expertctl.engine.kernels.compiled.quantisation"
"""The module with the code, which is imported only to compile it."""
INT8_MAX = 127
_NUMBERS = {Scheme.BFLOAT16: np.uint16, Scheme.INT8: np.int8, Scheme.INT4: np.int8}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedActivations:
    """The activations of one GEMM, [tokens, columns] in the number format of the scheme.

    int8 also has ``scales`` float32 and ``sums`` int32, both [tokens, groups]; columns are padded
    with zeros to whole vectors.
    """

    data: AnyArray
    scales: AnyArray
    sums: AnyArray

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.data.nbytes + self.scales.nbytes + self.sums.nbytes


def allocate_activations(scheme: Scheme, tokens: int, columns: int) -> PreparedActivations:
    """Return buffers for GEMMs with matrices in bfloat16, int8 or int4."""
    layout = scheme.layout
    wide, groups = layout.count_vectors(columns) * layout.columns, layout.count_groups(columns)
    return PreparedActivations(
        aligned_zeros((tokens, wide), _NUMBERS[scheme]),
        aligned_zeros((tokens, groups), np.float32),
        aligned_zeros((tokens, groups), np.int32),
    )


def wrap_float_activations(rows: AnyArray) -> PreparedActivations:
    """Wrap float32 rows [tokens, columns] for a scheme that takes them unchanged."""
    none = (len(rows), 0)
    return PreparedActivations(rows, aligned_zeros(none, np.float32), aligned_zeros(none, np.int32))


def activation_arguments(
    *,
    rows: AnyArray,
    columns: int,
    prepared: PreparedActivations,
    largest_step: int = INT8_MAX,
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
        largest_step,
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


INT4_SCALE_CANDIDATES = (7.0, 7.6, 8.0, 8.6, 9.2, 10.0)
"""Steps that the largest of a group may map to, never half-way between two steps."""


@cache
def int4_kernel() -> Kernel:
    """Return the kernel that quantises rows to int4; its arguments are `activation_arguments`.

    One item is one row.
    """
    return load_kernel("quantise to int4", _CODE, "quantise_int4_rows")
