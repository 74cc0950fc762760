"""The products of rows with compact experts in bfloat16, which are read as they lie in memory.

A compact expert is the stretches of gate and up, then of down (`compact`). A stretch is unpacked
chunk by chunk on the stack and multiplied there; each sum goes on where it was. So a sum runs over
the columns from first to last as in every product, and has the same bits.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.atomic import write_now
from expertctl.engine.kernels.compact import CHUNK_FLOATS, VECTORS, unpack_chunk
from expertctl.engine.kernels.expert_block import ExpertPart, ExpertShape
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.memory import stack_floats, words, words_at
from expertctl.engine.kernels.multiply import BLOCKS_AN_ITEM
from expertctl.engine.kernels.routed import clear, of_experts
from expertctl.engine.kernels.rows import PreparedRows
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kernels.sorting import RoutedOrder
from expertctl.engine.kernels.strips import spans_of

Numbers = np.ndarray[Any, Any]


def stretches_of(shape: ExpertShape) -> Numbers:
    """Return how many blocks each stretch of an expert has, and vectors these: int64 [n, 2]."""
    sizes = [
        (min(BLOCKS_AN_ITEM, part.blocks - block), part.scheme.layout.vectors(part.columns))
        for part in (shape.gate_up_part, shape.down_part)
        for block in range(0, part.blocks, BLOCKS_AN_ITEM)
    ]
    return np.array(sizes, np.int64)


@dataclass(frozen=True, slots=True)
class CompactPart:
    """One matrix of experts that take at most so many bytes: where its stretches begin."""

    part: ExpertPart
    first: int
    bytes: int

    @classmethod
    def of(cls, shape: ExpertShape, *, down: bool) -> "CompactPart":
        """Return the part of gate and up, or that of down."""
        before = -(-shape.gate_up_part.blocks // BLOCKS_AN_ITEM) if down else 0
        part = shape.down_part if down else shape.gate_up_part
        return cls(part, before, shape.compact)


@cache
def routed_compact_kernel(*, plain: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T`` of `routed_kernel`, for experts that are compact.

    An expert whose bytes are malformed makes zeros, as one without a place does.
    """
    name = f"routed compact{' plainly' * plain}"
    return compile_kernel(name, _routed_compact_function(plain=plain))


def routed_compact_arguments(
    *,
    compact: CompactPart,
    places: Numbers,
    order: RoutedOrder,
    rows: PreparedRows,
    out: Numbers,
    items: Numbers,
    absent: Numbers,
) -> Numbers:
    """Return its arguments; all but ``compact`` are those of `routed_arguments`."""
    part = compact.part
    assert out.shape[1] >= part.blocks * LANES
    return words_of(
        *of_experts(part, places, order, rows, absent),
        *rows_at(out),
        address(items, np.int64),
        compact.first,
        compact.bytes,
    )


def _routed_compact_function(*, plain: bool) -> KernelFunction:
    spans = spans_of(Scheme.BFLOAT16, plain=plain, goes_on=True)

    def routed(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            places, _, _, blocks, vectors, _, active, actives, begins,
            rows, stride, _, _, absent, out, out_stride, counted, stretch, size,
        ) = words(arguments, 19)  # fmt: skip
        items, chunk = words(counted, 1)[0], stack_floats(CHUNK_FLOATS)
        each = (blocks + BLOCKS_AN_ITEM - 1) // BLOCKS_AN_ITEM
        units = words(actives, 1)[0] * each
        for unit in range(first * units // items, last * units // items):
            expert = words(active + unit // each * 8, 1)[0]
            begin, end = words(begins + expert * 8, 2)
            block = unit % each * BLOCKS_AN_ITEM
            high = min(BLOCKS_AN_ITEM, blocks - block)
            to = out + begin * out_stride + block * VECTOR_BYTES
            clear(to, out_stride, end - begin, high)
            place = words(places + expert * 8, 1)[0]
            if place == 0:
                write_now(absent, expert + 1)
                continue
            ends = words_at(place + (stretch + unit % each) * 4, 2)
            packed, above = place + ends[0], place + min(ends[1], size)
            for column in range(0, vectors, VECTORS):
                wide = min(VECTORS, vectors - column)
                length = unpack_chunk(packed, above, high * wide * (VECTOR_BYTES // 2), chunk)
                if length == 0:
                    write_now(absent, expert + 1)
                    clear(to, out_stride, end - begin, high)
                    break
                packed += length
                spans(
                    chunk, wide * VECTOR_BYTES, 0, 0, high, wide,
                    rows + begin * stride + column * 4, stride, 0, 0, 0,
                    to, out_stride, end - begin, 0,
                )  # fmt: skip

    return routed
