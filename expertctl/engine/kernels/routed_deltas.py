"""What plans change in the products of routed experts: each position has what its token's plan has.

Records of routed experts follow one another in a plan's table: those of a layer's experts in the
order of their numbers, each with its gate, its up and its down. A batch table for them points to
the first of all, and has only the plans that change routed experts.

Positions of an expert lie together and their tokens ascend, so rows that share a plan share its
matrices. The tile is that of every product and rows are always taken by groups of columns, so a
row's bits do not depend on other rows. Between A and B everything is on the stack.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.batch import BEGIN_BYTES, ENTRY_BYTES, RECORD_BYTES, VECTORS_AT
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.memory import bytes_at, floats_at, longs_at, stack_floats, words
from expertctl.engine.kernels.per_row import put_row
from expertctl.engine.kernels.rows import quantise_row, round_row
from expertctl.engine.kernels.scheme import FLOATING, GROUP, Scheme
from expertctl.engine.kernels.sorting import RoutedOrder
from expertctl.engine.kernels.strips import spans_of

Numbers = np.ndarray[Any, Any]

MODULES = 3
"""Records of an expert."""
GATE, DOWN = 0, 2
"""Which of them are those of gate and of down; that of up follows gate's."""
_EXPERT_BYTES = MODULES * RECORD_BYTES
_ROWS_AT_ONCE = 24
"""Rows of one expert and plan that are on the stack; whole tiles."""
_ROOM = _ROWS_AT_ONCE * GROUP
_PLACES = 2 * _ROWS_AT_ONCE
"""In float32: room for their addresses."""
_WIDE = GROUP * 4
"""Bytes from one row to the next on the stack."""
_BLOCKS_AT_ONCE = GROUP // LANES


@cache
def routed_delta_kernel(scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel of ``out = d * out + B (A x)``, with what a position's plan has.

    Items are positions; there may be more of them than the order has. ``plain`` keeps to what every
    processor has.
    """
    name = f"routed delta {scheme.value}{' plainly' * plain}"
    return compile_kernel(name, _delta_function(scheme, plain=plain))


def routed_delta_arguments(
    *,
    scheme: Scheme,
    batch: Numbers,
    order: RoutedOrder,
    used: int,
    layer: int,
    first: int,
    modules: int,
    width: int,
    rows: Numbers,
    of_tokens: bool,
    out: Numbers,
) -> Numbers:
    """Return its arguments.

    ``layer`` counts routed layers; so many modules from the ``first`` share rows, and write
    ``width`` columns each, side by side. ``rows`` are float32, one per token or, where not
    ``of_tokens``, one per position; ``out`` is float32 [positions, at least blocks * 16].
    """
    columns = rows.shape[1]
    assert modules == 1 or width % LANES == 0
    assert out.shape[1] >= modules * -(-width // LANES) * LANES
    return words_of(
        *_of_positions(batch, order, used, layer, first),
        modules,
        *rows_at(rows),
        used if of_tokens else 0,
        columns,
        scheme.layout.vectors(columns),
        scheme.layout.groups(columns),
        *rows_at(out),
        width,
    )


@cache
def routed_scale_kernel() -> Kernel:
    """Return the kernel of ``out = u * x``, or of a copy where a plan has no u.

    Items are positions, as above.
    """
    return compile_kernel("routed scale", _scale)


def routed_scale_arguments(
    *,
    batch: Numbers,
    order: RoutedOrder,
    used: int,
    layer: int,
    module: int,
    rows: Numbers,
    out: Numbers,
) -> Numbers:
    """Return its arguments; both are float32 [positions, columns]."""
    assert rows.shape == out.shape
    return words_of(
        *_of_positions(batch, order, used, layer, module),
        *rows_at(rows),
        *rows_at(out),
        out.shape[1],
    )


def _of_positions(
    batch: Numbers, order: RoutedOrder, used: int, layer: int, module: int
) -> tuple[int, ...]:
    """Return the arguments that both kernels have."""
    record = MODULES * layer * order.experts + module
    return (
        address(batch, np.int64),
        address(order.active, np.int64),
        address(order.actives, np.int64),
        address(order.begins, np.int64),
        address(order.sources, np.int64),
        used,
        record * RECORD_BYTES,
    )


def _delta_function(scheme: Scheme, *, plain: bool) -> KernelFunction:
    add = _adding(scheme, plain=plain)

    def delta(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            batch, active, actives, begins, sources, used, records,
            modules, rows, stride, of_tokens, columns, vectors, groups, out, out_stride, width,
        ) = words(arguments, 17)  # fmt: skip
        places = stack_floats(_PLACES)
        for number in range(words(actives, 1)[0]):
            expert = words(active + number * 8, 1)[0]
            begin, end = words(begins + expert * 8, 2)
            begin, end = max(begin, first), min(end, last)
            while begin < end:
                above = min(end, begin + _ROWS_AT_ONCE)
                plan, count = _alike(batch, sources, used, begin, above)
                if plan != 0:
                    _find_rows(places, rows, stride, sources, of_tokens, begin, count)
                    for module in range(modules):
                        add(
                            plan + records + expert * _EXPERT_BYTES + module * RECORD_BYTES,
                            places, count, columns, vectors, groups,
                            out + begin * out_stride + module * width * 4, out_stride, width,
                        )  # fmt: skip
                begin += count

    return delta


def _scale(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    (
        batch, active, actives, begins, sources, used, records,
        rows, stride, out, out_stride, width,
    ) = words(arguments, 12)  # fmt: skip
    for number in range(words(actives, 1)[0]):
        expert = words(active + number * 8, 1)[0]
        begin, end = words(begins + expert * 8, 2)
        for position in range(max(begin, first), min(end, last)):
            plan, _ = _alike(batch, sources, used, position, position + 1)
            factors = 0
            if plan != 0:
                record = plan + records + expert * _EXPERT_BYTES
                factors = words(record + VECTORS_AT, 1)[0]
            put_row(
                floats_at(rows + position * stride, width), factors,
                floats_at(out + position * out_stride, width), 0, width,
            )  # fmt: skip


@register_jitable
def _alike(
    batch: Any, sources: Any, used: Any, begin: Any, end: Any
) -> Any:  # pragma: no cover - compiled
    """Return the plan of a position, or 0, and how many from it on are sure to have the same."""
    found = longs_at(sources, end)
    token = found[begin] // used
    for entry in range(words(batch, 1)[0]):
        plan, low, tokens = words(batch + BEGIN_BYTES + entry * ENTRY_BYTES, 3)
        if low <= token < low + tokens:
            count = 1
            while begin + count < end and found[begin + count] // used < low + tokens:
                count += 1
            return plan, count
    return 0, 1


@register_jitable
def _find_rows(
    places: Any, rows: Any, stride: Any, sources: Any, of_tokens: Any, begin: Any, count: Any
) -> None:  # pragma: no cover - compiled
    """Write where the rows of positions are; ``of_tokens``: how many share a token's row, or 0."""
    found, sourced = longs_at(places, count), longs_at(sources, begin + count)
    for k in range(count):
        row = sourced[begin + k] // of_tokens if of_tokens > 0 else begin + k
        found[k] = rows + row * stride


def _adding(scheme: Scheme, *, plain: bool) -> Any:
    """Return what changes the rows of one module, of positions that share an expert and a plan."""
    spans, take = spans_of(scheme, plain=plain), _taking(scheme)
    layout = scheme.layout
    each, vector_bytes, row_bytes = layout.columns, layout.vector_bytes, layout.row_bytes
    stride = GROUP * row_bytes

    @register_jitable
    def adding(
        record: Any, places: Any, count: Any, columns: Any, vectors: Any, groups: Any,
        out: Any, out_stride: Any, width: Any,
    ) -> None:  # fmt: skip # pragma: no cover - compiled
        (
            a, a_scales, a_blocks, _, b, b_scales, b_vectors, b_groups, _, factors, _,
        ) = words(record, 11)  # fmt: skip
        if factors != 0:
            for k in range(count):
                row = floats_at(out + k * out_stride, width)
                put_row(row, factors, row, 0, width)
        taken, inner = stack_floats(_ROOM), stack_floats(_ROOM)
        scales, sums = stack_floats(_ROWS_AT_ONCE), stack_floats(_ROWS_AT_ONCE)
        for block in range(0, a_blocks, _BLOCKS_AT_ONCE):
            blocks = min(_BLOCKS_AT_ONCE, a_blocks - block)
            for column in range(0, columns, GROUP):
                wide = min(GROUP, columns - column)
                for k in range(count):
                    source = longs_at(places, count)[k] + column * 4
                    take(source, wide, taken + k * stride, scales + k * 4, sums + k * 4)
                    _clear(taken + k * stride + wide * row_bytes, -wide % each * row_bytes)
                spans(
                    a + (block * vectors + column // each) * vector_bytes,
                    vectors * vector_bytes,
                    a_scales + (block * groups + column // GROUP) * VECTOR_BYTES,
                    groups * VECTOR_BYTES,
                    blocks, (wide + each - 1) // each,
                    taken, stride, scales, sums, 4,
                    inner, _WIDE, count, column,
                )  # fmt: skip
            for k in range(count):
                source = inner + k * _WIDE
                take(source, blocks * LANES, taken + k * stride, scales + k * 4, sums + k * 4)
            begin = block * LANES // each
            spans(
                b + begin * vector_bytes, b_vectors * vector_bytes,
                b_scales + block // _BLOCKS_AT_ONCE * VECTOR_BYTES, b_groups * VECTOR_BYTES,
                (width + LANES - 1) // LANES, min(GROUP // each, b_vectors - begin),
                taken, stride, scales, sums, 4,
                out, out_stride, count, 1,
            )  # fmt: skip

    return adding


@register_jitable
def _clear(place: Any, count: Any) -> None:  # pragma: no cover - compiled
    """Write so many bytes of 0, for what fills a vector must not be NaN."""
    for k in range(count):
        bytes_at(place, count)[k] = 0


def _taking(scheme: Scheme) -> Any:
    """Return what turns some columns of a row into the form that matrices of a scheme take."""
    if scheme is Scheme.BFLOAT16:
        return round_row
    return _copy_row if scheme in FLOATING else quantise_row


@register_jitable
def _copy_row(
    row: Any, columns: Any, out: Any, _scales: Any, _sums: Any
) -> None:  # pragma: no cover - compiled
    found, copied = floats_at(row, columns), floats_at(out, columns)
    for k in range(columns):
        copied[k] = found[k]
