"""The products of rows with the matrices of the experts that they were routed to.

Rows lie in the order of `sort_kernel`, so an expert's matrix is read once for all of its rows. The
tile is that of every product: a row's bits do not depend on other rows. ``places``, int64
[experts], has the address of each expert's block, 0 where there is none; an expert that has rows
and no place is not read, and ``absent``, int64 [1], is then 1 + its id.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.atomic import write_now
from expertctl.engine.kernels.expert_block import ExpertPart
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.memory import floats_at, longs_at, stack_floats, words
from expertctl.engine.kernels.multiply import BLOCKS_AN_ITEM
from expertctl.engine.kernels.rows import PreparedRows
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kernels.sorting import RoutedOrder
from expertctl.engine.kernels.strips import strips_of

Numbers = np.ndarray[Any, Any]

_ROWS_AT_ONCE = 48
"""Rows of an expert that wait on the stack to be added to those of tokens; whole tiles."""
_WIDE = BLOCKS_AN_ITEM * LANES
_ROOM = _ROWS_AT_ONCE * _WIDE


@cache
def routed_kernel(scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T``, with W of the expert of each row.

    Which experts have rows is known only when it runs. So an item is an even share of all blocks
    that there are then, whatever `routed_items` said. An expert without a place makes zeros.
    ``plain`` keeps to what every processor has, here and below.
    """
    name = f"routed {scheme.value}{' plainly' * plain}"
    return compile_kernel(name, _routed_function(scheme, plain=plain))


def routed_items(part: ExpertPart, *, active: int) -> int:
    """Return how many items it has, where at most so many experts have rows."""
    return active * -(-part.blocks // BLOCKS_AN_ITEM)


def routed_arguments(
    *,
    part: ExpertPart,
    places: Numbers,
    order: RoutedOrder,
    rows: PreparedRows,
    out: Numbers,
    items: Numbers,
    absent: Numbers,
) -> Numbers:
    """Return its arguments; ``out`` is float32 [positions, at least blocks * 16].

    ``items``, int64 [1], is how many items the operation has, read at each run.
    """
    assert out.shape[1] >= part.blocks * LANES
    return words_of(
        *of_experts(part, places, order, rows, absent), *rows_at(out), address(items, np.int64)
    )


@cache
def routed_merge_kernel(scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel of ``out[token] += weight * row W^T``, added expert by expert.

    One item is some blocks of all experts, so no two add to the same numbers. It equals what
    `routed_kernel` and `merge_kernel` do, except for the order of additions.
    """
    name = f"routed merge {scheme.value}{' plainly' * plain}"
    return compile_kernel(name, _routed_merge_function(scheme, plain=plain))


def routed_merge_items(part: ExpertPart) -> int:
    """Return how many items it has."""
    return -(-part.blocks // BLOCKS_AN_ITEM)


def routed_merge_arguments(
    *,
    part: ExpertPart,
    places: Numbers,
    order: RoutedOrder,
    rows: PreparedRows,
    weights: Numbers,
    out: Numbers,
    absent: Numbers,
) -> Numbers:
    """Return its arguments; ``weights`` is float32 [tokens, used].

    ``out`` is float32 [tokens, at least the rows of the part].
    """
    assert weights.flags.c_contiguous
    assert out.shape[1] >= part.rows
    return words_of(
        *of_experts(part, places, order, rows, absent),
        *rows_at(out),
        part.rows,
        address(order.sources, np.int64),
        weights.shape[1],
        address(weights),
    )


def of_experts(
    part: ExpertPart, places: Numbers, order: RoutedOrder, rows: PreparedRows, absent: Numbers
) -> tuple[int, ...]:
    """Return the first fourteen arguments, which all kernels of routed products share."""
    assert len(places) == order.experts
    layout = part.scheme.layout
    return (
        address(places, np.int64),
        part.begin,
        part.scales_begin,
        part.blocks,
        layout.vectors(part.columns),
        layout.groups(part.columns),
        address(order.active, np.int64),
        address(order.actives, np.int64),
        address(order.begins, np.int64),
        address(rows.data, rows.data.dtype),
        rows.data.strides[0],
        address(rows.scales),
        address(rows.sums, np.int32),
        address(absent, np.int64),
    )


def _routed_function(scheme: Scheme, *, plain: bool) -> KernelFunction:
    strips = strips_of(scheme, plain=plain)

    def routed(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            places, data, scales, blocks, vectors, groups, active, actives, begins,
            rows, stride, row_scales, row_sums, absent, out, out_stride, counted,
        ) = words(arguments, 17)  # fmt: skip
        items, wide = words(counted, 1)[0], groups * 4
        each = (blocks + BLOCKS_AN_ITEM - 1) // BLOCKS_AN_ITEM
        units = words(actives, 1)[0] * each
        for unit in range(first * units // items, last * units // items):
            expert = words(active + unit // each * 8, 1)[0]
            begin, end = words(begins + expert * 8, 2)
            block = unit % each * BLOCKS_AN_ITEM
            above = min(block + BLOCKS_AN_ITEM, blocks)
            place, to = words(places + expert * 8, 1)[0], out + begin * out_stride
            if place == 0:
                write_now(absent, expert + 1)
                clear(to + block * VECTOR_BYTES, out_stride, end - begin, above - block)
                continue
            strips(
                place + data, place + scales, block, above, vectors, groups,
                rows + begin * stride, stride, row_scales + begin * wide, row_sums + begin * wide,
                wide, to, out_stride, end - begin, 0,
            )  # fmt: skip

    return routed


@register_jitable
def clear(out: Any, stride: Any, rows: Any, blocks: Any) -> None:  # pragma: no cover - compiled
    """Write zeros into some blocks of rows."""
    for row in range(rows):
        numbers = floats_at(out + row * stride, blocks * LANES)
        for k in range(blocks * LANES):
            numbers[k] = 0


def _routed_merge_function(scheme: Scheme, *, plain: bool) -> KernelFunction:
    strips = strips_of(scheme, plain=plain)

    def merge(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            places, data, scales, blocks, vectors, groups, active, actives, begins,
            rows, stride, row_scales, row_sums, absent, out, out_stride, height,
            sources, used, weights,
        ) = words(arguments, 20)  # fmt: skip
        made, wide = stack_floats(_ROOM), groups * 4
        for item in range(first, last):
            block, above = item * BLOCKS_AN_ITEM, min((item + 1) * BLOCKS_AN_ITEM, blocks)
            columns = min(above * LANES, height) - block * LANES
            for number in range(words(actives, 1)[0]):
                expert = words(active + number * 8, 1)[0]
                begin, end = words(begins + expert * 8, 2)
                place = words(places + expert * 8, 1)[0]
                if place == 0:
                    write_now(absent, expert + 1)
                    continue
                while begin < end:
                    count = min(end - begin, _ROWS_AT_ONCE)
                    strips(
                        place + data, place + scales, block, above, vectors, groups,
                        rows + begin * stride, stride,
                        row_scales + begin * wide, row_sums + begin * wide, wide,
                        made - block * VECTOR_BYTES, _WIDE * 4, count, 0,
                    )  # fmt: skip
                    _add(
                        made, sources + begin * 8, count, used, weights,
                        out + block * VECTOR_BYTES, out_stride, columns,
                    )  # fmt: skip
                    begin += count

    return merge


@register_jitable
def _add(
    made: Any, sources: Any, rows: Any, used: Any, weights: Any, out: Any, stride: Any, columns: Any
) -> None:  # pragma: no cover - compiled
    """Add rows, times their weights, to the rows of their tokens."""
    for row in range(rows):
        src = longs_at(sources, rows)[row]
        weight = floats_at(weights, src + 1)[src]
        numbers = floats_at(made + row * _WIDE * 4, columns)
        token = floats_at(out + src // used * stride, columns)
        for k in range(columns):
            token[k] += weight * numbers[k]
