"""GEMMs of rows with the matrices of the routed experts they were assigned to.

Rows are in the order of `permute_kernel`, so an expert's matrix is read once for all of its rows.
The tile is that of every GEMM: the bits of a row do not depend on other rows. ``block_addresses``,
int64 [experts], holds the address of each expert's block, or 0 if it is not in memory; an expert
that has rows but no address is not read, and ``absent``, int64 [1], is set to 1 + its id.

Compact experts are bfloat16 packed by `exponent_packing`: the panels of gate and up, then those of
down. A panel is unpacked chunk by chunk on the stack and multiplied there, continuing each sum. So
a sum runs over the columns from first to last as in every GEMM, and has the same bits.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.lora import BLOCKS_PER_ITEM
from expertctl.engine.kernels.moe_routing import MoePermutation
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import ExpertMatrix, ExpertShape
from expertctl.engine.kernels.program import array_address, encode_operands, row_address
from expertctl.engine.kernels.quantisation import PreparedActivations

_CODE = "expertctl.engine.kernels.compiled.moe_gemm"
"""The module with the code, which is imported only to compile it."""


@cache
def moe_gemm_kernel(scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T``, with the W of the expert of each row.

    Which experts have rows is known only at run time. So an item is an even share of all blocks
    there are then, whatever `moe_gemm_items` returned. An expert without an address produces zeros.
    Here and below, ``portable`` uses baseline instructions only.
    """
    name = f"routed {scheme.value}{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_moe_gemm", scheme=scheme, portable=portable)


def moe_gemm_items(part: ExpertMatrix, *, active: int) -> int:
    """Return the number of items if at most ``active`` experts have rows."""
    return active * -(-part.blocks // BLOCKS_PER_ITEM)


def moe_gemm_arguments(
    *,
    part: ExpertMatrix,
    block_addresses: AnyArray,
    order: MoePermutation,
    rows: PreparedActivations,
    out: AnyArray,
    items: AnyArray,
    absent: AnyArray,
) -> AnyArray:
    """Return its arguments; ``out`` is float32 [positions, at least blocks * 16].

    ``items``, int64 [1], is the item count of the operation, read at each run.
    """
    assert out.shape[1] >= part.blocks * LANES
    return encode_operands(
        *list_expert_operands(part, block_addresses, order, rows, absent),
        *row_address(out),
        array_address(items, np.int64),
    )


def list_expert_operands(
    part: ExpertMatrix,
    block_addresses: AnyArray,
    order: MoePermutation,
    rows: PreparedActivations,
    absent: AnyArray,
) -> tuple[int, ...]:
    """Return the first fourteen arguments, which all routed GEMM kernels share."""
    assert len(block_addresses) == order.expert_count
    layout = part.scheme.layout
    return (
        array_address(block_addresses, np.int64),
        part.offset,
        part.scales_offset,
        part.blocks,
        layout.count_vectors(part.columns),
        layout.count_groups(part.columns),
        array_address(order.active, np.int64),
        array_address(order.active_count, np.int64),
        array_address(order.offsets, np.int64),
        array_address(rows.data, rows.data.dtype),
        rows.data.strides[0],
        array_address(rows.scales),
        array_address(rows.sums, np.int32),
        array_address(absent, np.int64),
    )


def compact_chunk_sizes(shape: ExpertShape) -> AnyArray:
    """Return the blocks of each panel of an expert, and the vectors of each block: int64 [n, 2]."""
    sizes = [
        (min(BLOCKS_PER_ITEM, part.blocks - block), part.scheme.layout.count_vectors(part.columns))
        for part in (shape.gate_up_matrix, shape.down_matrix)
        for block in range(0, part.blocks, BLOCKS_PER_ITEM)
    ]
    return np.array(sizes, np.int64)


@dataclass(frozen=True, slots=True)
class CompactMatrix:
    """One matrix of compact experts: the index of its first panel, and bytes per expert."""

    matrix: ExpertMatrix
    first: int
    bytes: int

    @classmethod
    def create(cls, shape: ExpertShape, *, down: bool) -> "CompactMatrix":
        """Return the matrix of gate and up, or that of down."""
        before = -(-shape.gate_up_matrix.blocks // BLOCKS_PER_ITEM) if down else 0
        part = shape.down_matrix if down else shape.gate_up_matrix
        return cls(part, before, shape.compact_bytes)


@cache
def moe_gemm_compact_kernel(*, portable: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T`` of `moe_gemm_kernel`, for compact experts.

    An expert whose bytes are malformed produces zeros, as one without an address does.
    """
    name = f"routed compact{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_compact_moe_gemm", portable=portable)


def moe_gemm_compact_arguments(
    *,
    compact: CompactMatrix,
    block_addresses: AnyArray,
    order: MoePermutation,
    rows: PreparedActivations,
    out: AnyArray,
    items: AnyArray,
    absent: AnyArray,
) -> AnyArray:
    """Return its arguments; all except ``compact`` are those of `moe_gemm_arguments`."""
    part = compact.matrix
    assert out.shape[1] >= part.blocks * LANES
    return encode_operands(
        *list_expert_operands(part, block_addresses, order, rows, absent),
        *row_address(out),
        array_address(items, np.int64),
        compact.first,
        compact.bytes,
    )
