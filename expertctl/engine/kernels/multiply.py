"""The product of tokens with a packed matrix: ``out = rows W^T`` or ``out += rows W^T``.

One item is four blocks of sixteen rows, which are read once for all tokens.
"""

from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import words
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.rows import PreparedRows
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kernels.strips import TOGETHER, strips_of

BLOCKS_AN_ITEM = TOGETHER

Numbers = np.ndarray[Any, Any]


@cache
def multiply_kernel(scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel for matrices of one scheme; ``plain`` keeps to what every processor has."""
    function = multiply_function(scheme, plain=plain)
    return compile_kernel(f"multiply {scheme.value}{' plainly' * plain}", function)


def multiply_items(matrix: PackedMatrix) -> int:
    """Return how many items the product with a matrix has."""
    return -(-matrix.blocks // BLOCKS_AN_ITEM)


def multiply_arguments(
    *,
    matrix: PackedMatrix,
    rows: PreparedRows,
    out: Numbers,
    tokens: Numbers,
    adds: bool = False,
) -> Numbers:
    """Return the arguments of one product.

    ``out`` is float32 [tokens, at least blocks * 16]; ``tokens``, int64 [1], is read at each run.
    """
    assert out.shape[1] >= matrix.blocks * LANES
    layout = matrix.scheme.layout
    place, stride = rows_at(out)
    return words_of(
        address(matrix.data, matrix.data.dtype),
        address(matrix.scales),
        address(rows.data, rows.data.dtype),
        address(rows.scales),
        address(rows.sums, np.int32),
        place,
        matrix.blocks,
        layout.vectors(matrix.columns),
        layout.groups(matrix.columns),
        address(tokens, np.int64),
        rows.data.strides[0],
        stride,
        adds,
    )


def multiply_function(scheme: Scheme, *, plain: bool = False) -> KernelFunction:
    """Return what is compiled, for kernels that do more with the same items."""
    strips = strips_of(scheme, plain=plain)

    def multiply(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            weights, scales, rows, row_scales, row_sums, out,
            blocks, vectors, groups, count, rows_stride, out_stride, adds,
        ) = words(arguments, 13)  # fmt: skip
        strips(
            weights, scales, first * BLOCKS_AN_ITEM, min(last * BLOCKS_AN_ITEM, blocks),
            vectors, groups, rows, rows_stride, row_scales, row_sums, groups * 4,
            out, out_stride, words(count, 1)[0], adds,
        )  # fmt: skip

    return multiply
