"""Some blocks of a matrix times tokens, four at a time as long as there are four."""

from functools import cache
from typing import Any

from numba.extending import register_jitable

from expertctl.engine.kernels.lanes import VECTOR_BYTES
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kernels.tiles import code_of, strip

TOGETHER = 4
"""Blocks whose rows are multiplied at once."""


@cache
def strips_of(scheme: Scheme, *, plain: bool) -> Any:
    """Return what computes blocks of matrices of a scheme, for compiled code.

    ``wide`` is the bytes from the scales of one token to those of the next; ``adds`` not 0: add to
    what is in ``out``.
    """
    code, simple, vector_bytes = code_of(scheme), int(plain), scheme.layout.vector_bytes

    @register_jitable
    def strips(
        data: Any, scales: Any, block: Any, end: Any, vectors: Any, groups: Any,
        rows: Any, rows_stride: Any, row_scales: Any, row_sums: Any, wide: Any,
        out: Any, out_stride: Any, tokens: Any, adds: Any,
    ) -> None:  # fmt: skip # pragma: no cover - compiled
        high, high_scales = vectors * vector_bytes, groups * VECTOR_BYTES
        while block + TOGETHER <= end:
            strip(
                code, simple, TOGETHER, 0,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += TOGETHER
        while block < end:
            strip(
                code, simple, 1, 0,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += 1

    return strips


@cache
def spans_of(scheme: Scheme, *, plain: bool, goes_on: bool = False) -> Any:
    """Return what computes the first blocks of a matrix, or of some columns of it.

    Where it ``goes_on``, each sum begins with what is in ``out``, from the columns before.
    ``high`` and ``high_scales`` are the bytes from a block to the next; ``vectors`` are those of
    the columns. The others are those of `strips_of`.
    """
    code, simple, on = code_of(scheme), int(plain), int(goes_on)

    @register_jitable
    def spans(
        data: Any, high: Any, scales: Any, high_scales: Any, blocks: Any, vectors: Any,
        rows: Any, rows_stride: Any, row_scales: Any, row_sums: Any, wide: Any,
        out: Any, out_stride: Any, tokens: Any, adds: Any,
    ) -> None:  # fmt: skip # pragma: no cover - compiled
        block = 0
        while block + TOGETHER <= blocks:
            strip(
                code, simple, TOGETHER, on,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += TOGETHER
        while block < blocks:
            strip(
                code, simple, 1, on,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += 1

    return spans
