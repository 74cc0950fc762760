"""Kernels of mixture-of-experts layers: routing, permutation, GEMMs, combination.

The selection rule is that of `engine.torch.routed_mlp.route`. Among equal values, the lower id
comes first. NaN ranks before all numbers, so tokens whose logits are NaN get experts that exist,
with weights that may be NaN.

The j-th choice of a token has the index ``src = token * top_k + j``. The permutation assigns it a
position so that the rows of an expert are consecutive; a choice without an expert has no position.
Choices of resident experts may be permuted first and the others appended once those experts are
loaded: both write positions of one list, so the combined result is the same.

GEMMs take rows in the order of `permute_kernel`, so an expert's matrix is read once for all of its
rows. The tile is that of every GEMM: the bits of a row do not depend on other rows.
``block_addresses``, int64 [experts], holds the address of each expert's block, or 0 if it is not in
memory; an expert that has rows but no address is not read, and ``absent``, int64 [1], is set to 1 +
its id.

Compact experts are bfloat16 packed by `exponent_packing`: the panels of gate and up, then those of
down. A panel is unpacked chunk by chunk on the stack and multiplied there, continuing each sum. So
a sum runs over the columns from first to last as in every GEMM, and has the same bits.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.lora import BLOCKS_PER_ITEM
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import ExpertMatrix, ExpertShape
from expertctl.engine.kernels.program import array_address, encode_operands, row_address
from expertctl.engine.kernels.quantisation import PreparedActivations

_CODE = "expertctl.engine.kernels.compiled.moe_layer"
"""The module with the code, which is imported only to compile it."""
Scoring = Literal["softmax", "sigmoid"]
MIN_WEIGHT_SUM = 2.0**-14
"""Lower bound of the sum that weights are divided by."""
NO_EXPERT = -1
"""The id of a choice without an expert."""


@cache
def topk_routing_kernel(scoring: Scoring) -> Kernel:
    """Return the kernel that selects experts by their scores; one item is one token.

    A bias affects the selection but not the weights. Without a bias the logits themselves are
    compared: scores have the same order, and rounding adds no ties.
    """
    return load_kernel(f"route by {scoring}", _CODE, "make_topk_routing", scoring=scoring)


def topk_routing_arguments(
    *,
    logits: AnyArray,
    bias: AnyArray | None,
    scale: AnyArray,
    normalised: bool,
    experts: int,
    selected: AnyArray,
    weights: AnyArray,
) -> AnyArray:
    """Return its arguments; ``logits`` is float32 [tokens, at least experts] and not changed.

    ``bias`` is float32 [experts], ``scale`` float32 [1]; ``selected`` int64 and ``weights``
    float32, both [tokens, top_k], are outputs: best choice first.
    """
    used = selected.shape[1]
    assert weights.shape == selected.shape
    assert selected.flags.c_contiguous
    assert weights.flags.c_contiguous
    assert used <= experts <= logits.shape[1], f"{used} of {experts} experts"
    return encode_operands(
        *row_address(logits),
        array_address(bias),
        array_address(scale),
        normalised,
        experts,
        used,
        array_address(selected, np.int64),
        array_address(weights),
    )


@cache
def drop_experts_kernel() -> Kernel:
    """Return the kernel that drops experts that are not resident; one item is one token.

    The remaining weights are scaled so that their sum is that of all weights. If none remains, all
    are zero.
    """
    return load_kernel("skip", _CODE, "drop_experts")


def drop_experts_arguments(
    *, hits: AnyArray, selected: AnyArray, weights: AnyArray, dropped: AnyArray
) -> AnyArray:
    """Return its arguments; ``hits`` is float32 [experts], 1 for resident experts, else 0.

    ``selected`` and ``weights`` are as `topk_routing_kernel` wrote them and are changed;
    ``dropped``, float32 [tokens], receives the sum of the dropped weights.
    """
    assert weights.shape == selected.shape
    assert selected.flags.c_contiguous
    assert weights.flags.c_contiguous
    return encode_operands(
        array_address(hits),
        selected.shape[1],
        array_address(selected, np.int64),
        array_address(weights),
        array_address(dropped),
    )


NO_POSITION = -1
"""The position of a choice without an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class MoePermutation:
    """The output of `permute_kernel`; all arrays are int64."""

    counts: AnyArray
    """[experts]: rows per expert."""
    offsets: AnyArray
    """[experts + 1]: first position of each expert, and at the end the number of positions."""
    active: AnyArray
    """[experts]: the experts that have rows, in ascending order."""
    active_count: AnyArray
    """[1]: the number of those."""
    sources: AnyArray
    """[tokens * top_k]: the ``src`` at each position, ascending within an expert."""
    inverse: AnyArray
    """[tokens * top_k]: the position of each ``src``."""

    @property
    def expert_count(self) -> int:
        """Number of experts."""
        return len(self.counts)

    @property
    def arrays(self) -> list[AnyArray]:
        """All arrays, in this order."""
        return [getattr(self, each.name) for each in fields(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.arrays)


def allocate_permutation(experts: int, positions: int) -> MoePermutation:
    """Return arrays for at most ``positions`` positions, ``tokens * top_k``."""
    sizes = (experts, experts + 1, experts, 1, positions, positions)
    return MoePermutation(*(aligned_zeros(size, np.int64) for size in sizes))


@cache
def permute_kernel() -> Kernel:
    """Return the kernel that writes the permutation; there is one item.

    A choice whose id is negative or not that of an expert counts as without an expert.
    """
    return load_kernel("sort", _CODE, "permute_choices")


def permute_arguments(
    *,
    selected: AnyArray,
    tokens: AnyArray,
    order: MoePermutation,
    block_addresses: AnyArray | None = None,
    append: bool = False,
) -> AnyArray:
    """Return its arguments; ``selected`` is int64 [tokens, top_k].

    ``tokens``, int64 [1], is read at each run. With ``block_addresses``, int64 [experts], only
    choices of experts whose address is not 0 are permuted. With ``append``, the choices that an
    earlier permutation left out are appended; the permutation then describes those alone, and
    earlier positions stay unchanged.
    """
    assert selected.flags.c_contiguous
    assert selected.size <= min(len(order.sources), len(order.inverse))
    return encode_operands(
        array_address(selected, np.int64),
        selected.shape[1],
        array_address(tokens, np.int64),
        order.expert_count,
        *(array_address(each, np.int64) for each in order.arrays),
        0 if block_addresses is None else array_address(block_addresses, np.int64),
        array_address(order.offsets, np.int64) + order.expert_count * 8 if append else 0,
    )


@cache
def gather_rows_kernel() -> Kernel:
    """Return the kernel that copies to each position the row of its token; items are positions.

    There may be more items than positions: the number of positions is read at each run.
    """
    return load_kernel("gather", _CODE, "gather_rows")


def gather_rows_arguments(
    *, order: MoePermutation, top_k: int, rows: PreparedActivations, gathered: PreparedActivations
) -> AnyArray:
    """Return its arguments; ``gathered`` has the shape of ``rows``, but one row per position."""
    assert gathered.data.dtype == rows.data.dtype
    assert gathered.data.shape[1] == rows.data.shape[1]
    assert gathered.scales.shape[1] == rows.scales.shape[1]
    words_a_row = rows.data.shape[1] * rows.data.itemsize // 4
    kind = rows.data.dtype
    return encode_operands(
        array_address(order.sources, np.int64),
        array_address(order.offsets, np.int64) + order.expert_count * 8,
        top_k,
        words_a_row,
        array_address(rows.data, kind),
        rows.data.strides[0],
        array_address(gathered.data, kind),
        gathered.data.strides[0],
        rows.scales.shape[1],
        array_address(rows.scales),
        array_address(gathered.scales),
        array_address(rows.sums, np.int32),
        array_address(gathered.sums, np.int32),
    )


@cache
def combine_kernel() -> Kernel:
    """Return the kernel of ``out += sum_j weight_j * row_j``; one item is one token.

    The sum starts at 0 and runs over a token's choices from first to last, each product rounded
    before it is added, so where experts were computed does not change the result. A choice without
    an expert adds nothing.
    """
    return load_kernel("merge", _CODE, "combine_rows")


def combine_arguments(
    *, order: MoePermutation, weights: AnyArray, rows: AnyArray, out: AnyArray, width: int
) -> AnyArray:
    """Return its arguments; ``weights`` is float32 [tokens, top_k].

    ``rows``, one per position, and ``out``, one row per token, are float32 with at least ``width``
    columns.
    """
    assert weights.flags.c_contiguous
    assert weights.size <= len(order.inverse)
    return encode_operands(
        array_address(order.inverse, np.int64),
        weights.shape[1],
        array_address(weights),
        *row_address(rows),
        *row_address(out),
        width,
    )


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
