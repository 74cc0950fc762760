"""Code of GEMMs of rows with the matrices of the routed experts they were assigned to."""

from typing import Any

from numba.extending import register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.exponent_packing import CHUNK_FLOATS, unpack_chunk
from expertctl.engine.kernels.compiled.gemm import gemm_blocks_function, gemm_panel_function
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    atomic_store,
    float32_view,
    load_int64s,
    uint32_view,
)
from expertctl.engine.kernels.lora import BLOCKS_PER_ITEM
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import CHUNK_VECTORS


def make_moe_gemm(scheme: Scheme, *, portable: bool) -> KernelFunction:
    """Return the function of ``out = rows W^T`` with the W of the expert of each row."""
    strips = gemm_blocks_function(scheme, portable=portable)

    def routed(first: int, last: int, arguments: int) -> None:
        (
            places, data, scales, blocks, vectors, groups, active, actives, begins,
            rows, stride, row_scales, row_sums, absent, out, out_stride, counted,
        ) = load_int64s(arguments, 17)  # fmt: skip
        items, wide = load_int64s(counted, 1)[0], groups * 4
        each = (blocks + BLOCKS_PER_ITEM - 1) // BLOCKS_PER_ITEM
        units = load_int64s(actives, 1)[0] * each
        for unit in range(first * units // items, last * units // items):
            expert = load_int64s(active + unit // each * 8, 1)[0]
            begin, end = load_int64s(begins + expert * 8, 2)
            block = unit % each * BLOCKS_PER_ITEM
            above = min(block + BLOCKS_PER_ITEM, blocks)
            place, to = load_int64s(places + expert * 8, 1)[0], out + begin * out_stride
            if place == 0:
                atomic_store(absent, expert + 1)
                zero_blocks(to + block * VECTOR_BYTES, out_stride, end - begin, above - block)
                continue
            strips(
                place + data, place + scales, block, above, vectors, groups,
                rows + begin * stride, stride, row_scales + begin * wide, row_sums + begin * wide,
                wide, to, out_stride, end - begin, 0,
            )  # fmt: skip

    return routed


@register_jitable
def zero_blocks(out: Any, stride: Any, rows: Any, blocks: Any) -> None:
    """Write zeros into some blocks of rows."""
    for row in range(rows):
        numbers = float32_view(out + row * stride, blocks * LANES)
        for k in range(blocks * LANES):
            numbers[k] = 0


def make_compact_moe_gemm(*, portable: bool) -> KernelFunction:
    """Return the same for compact experts."""
    spans = gemm_panel_function(Scheme.BFLOAT16, portable=portable, accumulates=True)

    def routed(first: int, last: int, arguments: int) -> None:
        (
            places, _, _, blocks, vectors, _, active, actives, begins,
            rows, stride, _, _, absent, out, out_stride, counted, stretch, size,
        ) = load_int64s(arguments, 19)  # fmt: skip
        items, chunk = load_int64s(counted, 1)[0], allocate_stack_floats(CHUNK_FLOATS)
        each = (blocks + BLOCKS_PER_ITEM - 1) // BLOCKS_PER_ITEM
        units = load_int64s(actives, 1)[0] * each
        for unit in range(first * units // items, last * units // items):
            expert = load_int64s(active + unit // each * 8, 1)[0]
            begin, end = load_int64s(begins + expert * 8, 2)
            block = unit % each * BLOCKS_PER_ITEM
            high = min(BLOCKS_PER_ITEM, blocks - block)
            to = out + begin * out_stride + block * VECTOR_BYTES
            zero_blocks(to, out_stride, end - begin, high)
            place = load_int64s(places + expert * 8, 1)[0]
            if place == 0:
                atomic_store(absent, expert + 1)
                continue
            ends = uint32_view(place + (stretch + unit % each) * 4, 2)
            packed, above = place + ends[0], place + min(ends[1], size)
            for column in range(0, vectors, CHUNK_VECTORS):
                wide = min(CHUNK_VECTORS, vectors - column)
                length = unpack_chunk(packed, above, high * wide * (VECTOR_BYTES // 2), chunk)
                if length == 0:
                    atomic_store(absent, expert + 1)
                    zero_blocks(to, out_stride, end - begin, high)
                    break
                packed += length
                spans(
                    chunk, wide * VECTOR_BYTES, 0, 0, high, wide,
                    rows + begin * stride + column * 4, stride, 0, 0, 0,
                    to, out_stride, end - begin, 0,
                )  # fmt: skip

    return routed
