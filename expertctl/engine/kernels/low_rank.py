"""The low-rank products of all plans of a batch, in two operations for layers that share an input.

``inner = rows A^T``, then ``out += inner B^T``: the rows of a plan are multiplied with its own
matrices, which are read once for all of them. However many plans there are, the items of an
operation are the blocks of all of them. The tile is that of every product, so a row's bits do not
depend on other rows.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, words_of
from expertctl.engine.kernels.atomic import add_now, breathe, give_way, read_now, write_now
from expertctl.engine.kernels.batch import (
    B_VECTORS,
    BEGIN_BYTES,
    ENTRY_BYTES,
    RECORD_BYTES,
)
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import words
from expertctl.engine.kernels.multiply import BLOCKS_AN_ITEM, multiply_function
from expertctl.engine.kernels.rows import PreparedRows, quantise_row, round_row
from expertctl.engine.kernels.scheme import FLOATING, GROUP, Scheme
from expertctl.engine.kernels.strips import TOGETHER, strips_of

Numbers = np.ndarray[Any, Any]

EXPAND_BLOCKS = 8
"""Blocks of B in an item."""
_SPINS = 500
"""How often to look whether other workers are done before giving way to other threads."""


def reduce_blocks(scheme: Scheme, *, together: bool) -> int:
    """Return how many blocks of A an item has; few where single tokens are read.

    Where rows between A and B are int8 by groups of 128, an item has whole groups.
    """
    if scheme.layout.is_grouped:
        return GROUP // LANES
    return TOGETHER if together else 1


@cache
def reduce_kernel(scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel of ``inner = rows A^T``, which writes inner in the form that B takes.

    Items are blocks of the A of all modules of all plans; `reduce_blocks` of them make one.
    ``plain`` keeps to what every processor has, here and below.
    """
    name = f"reduce {scheme.value}{' plainly' * plain}"
    return compile_kernel(name, _reduce_function(scheme, plain=plain))


def reduce_arguments(
    *,
    batch: Numbers,
    first_module: int,
    modules: int,
    blocks: int,
    rows: PreparedRows,
    vectors: int,
    groups: int,
) -> Numbers:
    """Return its arguments; ``rows`` are those of the batch, ``vectors`` those of a row of A."""
    return words_of(
        address(batch, np.int64),
        first_module,
        modules,
        blocks,
        address(rows.data, rows.data.dtype),
        rows.data.strides[0],
        address(rows.scales),
        address(rows.sums, np.int32),
        vectors,
        groups,
    )


@cache
def expand_kernel(scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel of ``out += inner B^T``; items are blocks of the B of all modules."""
    name = f"expand {scheme.value}{' plainly' * plain}"
    return compile_kernel(name, _expand_function(scheme, plain=plain))


@cache
def adapted_kernel(base: Scheme, scheme: Scheme, *, plain: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T``, or ``+=``, and all that plans add to it.

    Items are those of `reduce_kernel`, then those of `multiply_kernel`, each of which adds to its
    own blocks what `expand_kernel` would. A worker that gets there before all of the former are
    done waits: they were claimed before, by workers that do not wait.
    """
    name = f"multiply {base.value}, adapted {scheme.value}{' plainly' * plain}"
    return compile_kernel(name, _adapted_function(base, scheme, plain=plain))


def adapted_arguments(
    *,
    reduce: Numbers,
    multiply: Numbers,
    multiply_items: int,
    expand: Numbers,
    reduce_items: Numbers,
    done: Numbers,
) -> Numbers:
    """Return its arguments: those of the three, and how many items the former two have.

    ``done``, int64 [1], begins with 0; the worker that finishes last in a run sets it to 0 again.
    """
    parts = (reduce, multiply, expand, reduce_items, done)
    return words_of(*(address(part, np.int64) for part in parts), multiply_items)


def expand_arguments(
    *, batch: Numbers, first_module: int, outs: Numbers, out_stride: int
) -> Numbers:
    """Return its arguments; ``outs`` int64 [modules, 2]: where a module's output is, its blocks."""
    return words_of(
        address(batch, np.int64), first_module, len(outs), address(outs, np.int64), out_stride
    )


def _reduce_function(scheme: Scheme, *, plain: bool) -> KernelFunction:
    strips, prepare = strips_of(scheme, plain=plain), _preparing(scheme)

    def reduce(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            batch, place, modules, height, rows, rows_stride, row_scales, row_sums,
            vectors, groups,
        ) = words(arguments, 10)  # fmt: skip
        entries, inner, inner_stride, _, _, _, _, _ = words(batch, 8)
        number = 0
        for entry in range(entries):
            plan, begin, count = words(batch + BEGIN_BYTES + entry * ENTRY_BYTES, 3)
            out = inner + begin * inner_stride
            for module in range(place, place + modules):
                data, scales, blocks, column = words(plan + module * RECORD_BYTES, 4)
                items = (blocks + height - 1) // height
                for item in range(max(first - number, 0), min(last - number, items)):
                    block, end = item * height, min((item + 1) * height, blocks)
                    strips(
                        data, scales, block, end, vectors, groups,
                        rows + begin * rows_stride, rows_stride,
                        row_scales + begin * groups * 4, row_sums + begin * groups * 4, groups * 4,
                        out + column * 4, inner_stride, count, 0,
                    )  # fmt: skip
                    prepare(batch, begin, count, column + block * LANES, (end - block) * LANES)
                number += items
            if number >= last:
                return

    return reduce


def _expand_function(scheme: Scheme, *, plain: bool) -> KernelFunction:
    add = _adding(scheme, plain=plain)

    def expand(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        batch, place, modules, outs, out_stride = words(arguments, 5)
        number = 0
        for entry in range(words(batch, 1)[0]):
            where = batch + BEGIN_BYTES + entry * ENTRY_BYTES
            for module in range(modules):
                record = words(where, 1)[0] + (place + module) * RECORD_BYTES
                out, blocks = words(outs + module * 16, 2)
                items = (blocks + EXPAND_BLOCKS - 1) // EXPAND_BLOCKS if _has_b(record) else 0
                begin, end = max(first - number, 0), min(last - number, items)
                if begin < end:
                    add(
                        batch, where, record, begin * EXPAND_BLOCKS,
                        min(end * EXPAND_BLOCKS, blocks), out, out_stride,
                    )  # fmt: skip
                number += items
            if number >= last:
                return

    return expand


def _adapted_function(base: Scheme, scheme: Scheme, *, plain: bool) -> KernelFunction:
    reduce = register_jitable(_reduce_function(scheme, plain=plain))
    multiply = register_jitable(multiply_function(base, plain=plain))
    add = _adding(scheme, plain=plain)

    def adapted(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        reducing, multiplying, expanding, counted, done, others = words(arguments, 6)
        items = words(counted, 1)[0]
        if first < items:
            end = min(last, items)
            reduce(first, end, reducing)
            add_now(done, end - first)
        if last <= items:
            return
        first, last = max(first - items, 0), last - items
        multiply(first, last, multiplying)
        if items > 0:
            _wait(done, items)
            batch, place, modules, outs, out_stride = words(expanding, 5)
            for entry in range(words(batch, 1)[0]):
                where = batch + BEGIN_BYTES + entry * ENTRY_BYTES
                begin, end = first * BLOCKS_AN_ITEM, last * BLOCKS_AN_ITEM
                for module in range(modules):
                    record = words(where, 1)[0] + (place + module) * RECORD_BYTES
                    out, blocks = words(outs + module * 16, 2)
                    low, high = max(begin, 0), min(end, blocks)
                    if _has_b(record) and low < high:
                        add(batch, where, record, low, high, out, out_stride)
                    begin, end = begin - blocks, end - blocks
            if add_now(done, last - first) + last - first == items + others:
                write_now(done, 0)

    return adapted


@register_jitable
def _wait(done: Any, items: Any) -> None:  # pragma: no cover - compiled
    """Wait until so many items are done."""
    spins = 0
    while read_now(done) < items:
        if spins < _SPINS:
            breathe()
            spins += 1
        else:
            give_way()


@register_jitable
def _has_b(record: Any) -> Any:  # pragma: no cover - compiled
    return words(record + B_VECTORS * 8, 1)[0] > 0


def _adding(scheme: Scheme, *, plain: bool) -> Any:
    """Return what adds ``inner B^T`` of one entry and one module, for some blocks of B."""
    strips, size = strips_of(scheme, plain=plain), scheme.layout.row_bytes
    ready = scheme not in FLOATING

    @register_jitable
    def adding(
        batch: Any, entry: Any, record: Any, block: Any, end: Any, out: Any, out_stride: Any
    ) -> None:  # pragma: no cover - compiled
        _, rows, stride, ready_rows, ready_stride, scales, sums, wide = words(batch, 8)
        if ready:
            rows, stride = ready_rows, ready_stride
        _, begin, count = words(entry, 3)
        _, _, _, column, data, weight_scales, vectors, groups = words(record, 8)
        group = begin * wide + column // GROUP * 4
        strips(
            data, weight_scales, block, end, vectors, groups,
            rows + begin * stride + column * size, stride, scales + group, sums + group, wide,
            out + begin * out_stride, out_stride, count, 1,
        )  # fmt: skip

    return adding


def _preparing(scheme: Scheme) -> Any:
    """Return what turns some columns of rows between A and B into the form that B takes."""
    if scheme in FLOATING:

        @register_jitable
        def nothing(
            batch: Any, begin: Any, count: Any, column: Any, columns: Any
        ) -> None:  # pragma: no cover - compiled
            pass

        return nothing
    size = scheme.layout.row_bytes
    prepare = round_row if scheme is Scheme.BFLOAT16 else quantise_row

    @register_jitable
    def preparing(
        batch: Any, begin: Any, count: Any, column: Any, columns: Any
    ) -> None:  # pragma: no cover - compiled
        _, inner, stride, ready, ready_stride, scales, sums, wide = words(batch, 8)
        for row in range(begin, begin + count):
            group = row * wide + column // GROUP * 4
            prepare(
                inner + row * stride + column * 4, columns,
                ready + row * ready_stride + column * size, scales + group, sums + group,
            )  # fmt: skip

    return preparing
