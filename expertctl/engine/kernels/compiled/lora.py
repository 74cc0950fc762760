"""Code of GEMM and LoRA over rows that may belong to different adapter plans.

`expertctl.engine.kernels.lora` describes the tables that it reads.
"""

from typing import Any

from numba.extending import register_jitable

from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.gemm import gemm_blocks_function
from expertctl.engine.kernels.compiled.memory import (
    atomic_fetch_add,
    atomic_load,
    atomic_store,
    load_int64s,
    pause_cpu,
    yield_thread,
)
from expertctl.engine.kernels.compiled.quantisation import quantise_row, round_row
from expertctl.engine.kernels.lora import (
    B_VECTORS_WORD,
    BLOCKS_PER_ITEM,
    ENTRY_BYTES,
    EXPAND_BLOCKS,
    HEADER_BYTES,
    RECORD_BYTES,
)
from expertctl.engine.kernels.packed_format import FLOAT_SCHEMES, GROUP_SIZE, LANES, Scheme


def make_gemm(scheme: Scheme, *, portable: bool = False) -> KernelFunction:
    """Return the function of ``out = rows W^T`` or ``out += rows W^T``."""
    strips = gemm_blocks_function(scheme, portable=portable)

    def multiply(first: int, last: int, arguments: int) -> None:
        (
            weights, scales, rows, row_scales, row_sums, out,
            blocks, vectors, groups, count, rows_stride, out_stride, adds,
        ) = load_int64s(arguments, 13)  # fmt: skip
        strips(
            weights, scales, first * BLOCKS_PER_ITEM, min(last * BLOCKS_PER_ITEM, blocks),
            vectors, groups, rows, rows_stride, row_scales, row_sums, groups * 4,
            out, out_stride, load_int64s(count, 1)[0], adds,
        )  # fmt: skip

    return multiply


@register_jitable
def find_row_plan(batch: Any, row: Any) -> Any:
    """Return the address of the plan table of a row, or 0."""
    for entry in range(load_int64s(batch, 1)[0]):
        plan, begin, count = load_int64s(batch + HEADER_BYTES + entry * ENTRY_BYTES, 3)
        if begin <= row < begin + count:
            return plan
    return 0


_SPINS = 500
"""How often to check whether other workers are done before yielding to other threads."""


def make_lora_shrink(scheme: Scheme, *, portable: bool) -> KernelFunction:
    """Return the function of ``inner = rows A^T``."""
    strips, prepare = gemm_blocks_function(scheme, portable=portable), _make_prepare_inner(scheme)

    def reduce(first: int, last: int, arguments: int) -> None:
        (
            batch, place, modules, height, rows, rows_stride, row_scales, row_sums,
            vectors, groups,
        ) = load_int64s(arguments, 10)  # fmt: skip
        entries, inner, inner_stride, _, _, _, _, _ = load_int64s(batch, 8)
        number = 0
        for entry in range(entries):
            plan, begin, count = load_int64s(batch + HEADER_BYTES + entry * ENTRY_BYTES, 3)
            out = inner + begin * inner_stride
            for module in range(place, place + modules):
                data, scales, blocks, column = load_int64s(plan + module * RECORD_BYTES, 4)
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


def make_lora_expand(scheme: Scheme, *, portable: bool) -> KernelFunction:
    """Return the function of ``out += inner B^T``."""
    add = _make_expand_block(scheme, portable=portable)

    def expand(first: int, last: int, arguments: int) -> None:
        batch, place, modules, outs, out_stride = load_int64s(arguments, 5)
        number = 0
        for entry in range(load_int64s(batch, 1)[0]):
            where = batch + HEADER_BYTES + entry * ENTRY_BYTES
            for module in range(modules):
                record = load_int64s(where, 1)[0] + (place + module) * RECORD_BYTES
                out, blocks = load_int64s(outs + module * 16, 2)
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


def make_fused_lora(base: Scheme, scheme: Scheme, *, portable: bool) -> KernelFunction:
    """Return the function of a GEMM and the LoRA products of all plans."""
    reduce = register_jitable(make_lora_shrink(scheme, portable=portable))
    multiply = register_jitable(make_gemm(base, portable=portable))
    add = _make_expand_block(scheme, portable=portable)

    def adapted(first: int, last: int, arguments: int) -> None:
        reducing, multiplying, expanding, counted, done, others = load_int64s(arguments, 6)
        items = load_int64s(counted, 1)[0]
        if first < items:
            end = min(last, items)
            reduce(first, end, reducing)
            atomic_fetch_add(done, end - first)
        if last <= items:
            return
        first, last = max(first - items, 0), last - items
        multiply(first, last, multiplying)
        if items > 0:
            _wait_for_items(done, items)
            batch, place, modules, outs, out_stride = load_int64s(expanding, 5)
            for entry in range(load_int64s(batch, 1)[0]):
                where = batch + HEADER_BYTES + entry * ENTRY_BYTES
                begin, end = first * BLOCKS_PER_ITEM, last * BLOCKS_PER_ITEM
                for module in range(modules):
                    record = load_int64s(where, 1)[0] + (place + module) * RECORD_BYTES
                    out, blocks = load_int64s(outs + module * 16, 2)
                    low, high = max(begin, 0), min(end, blocks)
                    if _has_b(record) and low < high:
                        add(batch, where, record, low, high, out, out_stride)
                    begin, end = begin - blocks, end - blocks
            if atomic_fetch_add(done, last - first) + last - first == items + others:
                atomic_store(done, 0)

    return adapted


@register_jitable
def _wait_for_items(done: Any, items: Any) -> None:
    spins = 0
    while atomic_load(done) < items:
        if spins < _SPINS:
            pause_cpu()
            spins += 1
        else:
            yield_thread()


@register_jitable
def _has_b(record: Any) -> Any:
    return load_int64s(record + B_VECTORS_WORD * 8, 1)[0] > 0


def _make_expand_block(scheme: Scheme, *, portable: bool) -> Any:
    """Return the function that adds ``inner B^T`` of one entry and module, by blocks of B."""
    strips, size = gemm_blocks_function(scheme, portable=portable), scheme.layout.row_bytes
    ready = scheme not in FLOAT_SCHEMES

    @register_jitable
    def adding(
        batch: Any, entry: Any, record: Any, block: Any, end: Any, out: Any, out_stride: Any
    ) -> None:
        _, rows, stride, ready_rows, ready_stride, scales, sums, wide = load_int64s(batch, 8)
        if ready:
            rows, stride = ready_rows, ready_stride
        _, begin, count = load_int64s(entry, 3)
        _, _, _, column, data, weight_scales, vectors, groups = load_int64s(record, 8)
        group = begin * wide + column // GROUP_SIZE * 4
        strips(
            data, weight_scales, block, end, vectors, groups,
            rows + begin * stride + column * size, stride, scales + group, sums + group, wide,
            out + begin * out_stride, out_stride, count, 1,
        )  # fmt: skip

    return adding


def _make_prepare_inner(scheme: Scheme) -> Any:
    """Return the function that converts rows between A and B to the form that B takes."""
    if scheme in FLOAT_SCHEMES:

        @register_jitable
        def nothing(batch: Any, begin: Any, count: Any, column: Any, columns: Any) -> None:
            pass

        return nothing
    size = scheme.layout.row_bytes
    prepare = round_row if scheme is Scheme.BFLOAT16 else quantise_row

    @register_jitable
    def preparing(batch: Any, begin: Any, count: Any, column: Any, columns: Any) -> None:
        _, inner, stride, ready, ready_stride, scales, sums, wide = load_int64s(batch, 8)
        for row in range(begin, begin + count):
            group = row * wide + column // GROUP_SIZE * 4
            prepare(
                inner + row * stride + column * 4, columns,
                ready + row * ready_stride + column * size, scales + group, sums + group,
            )  # fmt: skip

    return preparing
