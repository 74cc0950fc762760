"""The results of experts, added back to the rows of tokens."""

from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.memory import floats_at, longs_at, stack_floats, words
from expertctl.engine.kernels.sorting import RoutedOrder

Numbers = np.ndarray[Any, Any]
_AT_ONCE = 512
"""Columns whose sums wait on the stack."""


@cache
def merge_kernel() -> Kernel:
    """Return the kernel of ``out += sum_j weight_j * row_j``; one item is one token.

    The sum begins at 0 and runs over a token's choices from first to last, each product rounded
    before it is added; where experts were computed changes no bit of it. A choice without an
    expert adds nothing.
    """
    return compile_kernel("merge", _merge)


def merge_arguments(
    *, order: RoutedOrder, weights: Numbers, rows: Numbers, out: Numbers, width: int
) -> Numbers:
    """Return its arguments; ``weights`` is float32 [tokens, used].

    ``rows``, one per position, and ``out``, one row per token, are float32 and at least so wide.
    """
    assert weights.flags.c_contiguous
    assert weights.size <= len(order.inverse)
    return words_of(
        address(order.inverse, np.int64),
        weights.shape[1],
        address(weights),
        *rows_at(rows),
        *rows_at(out),
        width,
    )


def _merge(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    inverses, used, shares, rows, stride, outs, out_stride, width = words(arguments, 8)
    sums = floats_at(stack_floats(_AT_ONCE), _AT_ONCE)
    for token in range(first, last):
        places = longs_at(inverses + token * used * 8, used)
        weights = floats_at(shares + token * used * 4, used)
        for begin in range(0, width, _AT_ONCE):
            count = min(_AT_ONCE, width - begin)
            for k in range(count):
                sums[k] = 0
            for place in range(used):
                if places[place] >= 0:
                    row = floats_at(rows + places[place] * stride + begin * 4, count)
                    for k in range(count):
                        sums[k] += weights[place] * row[k]
            out = floats_at(outs + token * out_stride + begin * 4, count)
            for k in range(count):
                out[k] += sums[k]
