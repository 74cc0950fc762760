"""GEMM and LoRA kernels over a batch in which rows may belong to different adapter plans.

`gemm_kernel` computes ``out = rows W^T`` or ``out += rows W^T``; one item is four blocks of sixteen
rows, which are read once for all tokens.

A *plan table* (int64) has a record for each linear layer of the base: the addresses of the plan's
matrices and vectors for it. A *batch table* (int64) starts with the addresses of the rows between A
and B, followed by an entry per plan: the address of its table, its first row and its number of
rows. Rows without a plan have no entry.

LoRA takes two operations for all layers that share an input: shrink, ``inner = rows A^T``, and
expand, ``out += inner B^T``. The rows of a plan are multiplied with its own matrices, which are
read once for all of them; the items of an operation are the blocks of all plans. All use the GEMM
tile, so the bits of a row do not depend on other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.packed_format import (
    FLOAT_SCHEMES,
    GROUP_SIZE,
    LANES,
    PANEL_BLOCKS,
    Scheme,
)
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.program import array_address, encode_operands, row_address
from expertctl.engine.kernels.quantisation import PreparedActivations, allocate_activations

_CODE = "expertctl.engine.kernels.compiled.lora"
"""The module with the code, which is imported only to compile it."""
BLOCKS_PER_ITEM = PANEL_BLOCKS


@cache
def gemm_kernel(scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel for matrices of one scheme; ``portable``: baseline instructions only."""
    name = f"multiply {scheme.value}{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_gemm", scheme=scheme, portable=portable)


def gemm_items(matrix: PackedMatrix) -> int:
    """Return the number of items of the product with a matrix."""
    return -(-matrix.blocks // BLOCKS_PER_ITEM)


def gemm_arguments(
    *,
    matrix: PackedMatrix,
    rows: PreparedActivations,
    out: AnyArray,
    tokens: AnyArray,
    adds: bool = False,
) -> AnyArray:
    """Return the arguments of one product.

    ``out`` is float32 [tokens, at least blocks * 16]; ``tokens``, int64 [1], is read at each run.
    """
    assert out.shape[1] >= matrix.blocks * LANES
    layout = matrix.scheme.layout
    place, stride = row_address(out)
    return encode_operands(
        array_address(matrix.data, matrix.data.dtype),
        array_address(matrix.scales, np.uint16),
        array_address(rows.data, rows.data.dtype),
        array_address(rows.scales),
        array_address(rows.sums, np.int32),
        place,
        matrix.blocks,
        layout.count_vectors(matrix.columns),
        layout.count_groups(matrix.columns),
        array_address(tokens, np.int64),
        rows.data.strides[0],
        stride,
        adds,
    )


RECORD_WORDS, RECORD_BYTES = 11, 88
A_BLOCKS_WORD, B_VECTORS_WORD = 2, 6
"""Words of a record that are 0 if there is no A, or no B."""
SCALE_WORDS = slice(8, 11)
"""Words of a record: input, output and bias scales, each an address or 0."""
SCALES_OFFSET = 64
HEADER_WORDS, HEADER_BYTES = 8, 64
ENTRY_WORDS, ENTRY_BYTES = 3, 24


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModuleAdapter:
    """A plan's tensors for one linear layer; ``column`` is the first one between A and B."""

    a: PackedMatrix | None = None
    b: PackedMatrix | None = None
    column: int = 0
    input_scale: AnyArray | None = None
    output_scale: AnyArray | None = None
    bias_scale: AnyArray | None = None

    def to_record(self) -> list[int]:
        """Return the record of a plan table."""
        a, b, b_sizes = self.a, self.b, (0, 0)
        if b is not None:
            layout = b.scheme.layout
            b_sizes = layout.count_vectors(b.columns), layout.count_groups(b.columns)
        vectors = (self.input_scale, self.output_scale, self.bias_scale)
        return [
            *_matrix_addresses(a), 0 if a is None else a.blocks, self.column,
            *_matrix_addresses(b), *b_sizes, *map(array_address, vectors),
        ]  # fmt: skip


def lora_column_step(scheme: Scheme) -> int:
    """Return the alignment of ``column``, so that modules share no quantisation group."""
    return GROUP_SIZE if scheme.layout.is_grouped else LANES


class AdapterBatchTable:
    """The batch table, and the rows between A and B of adapters in one scheme."""

    def __init__(self, scheme: Scheme, *, rows: int) -> None:
        """Allocate for a maximum number of rows, each of which may have its own plan."""
        self.words = aligned_zeros(HEADER_WORDS + ENTRY_WORDS * rows, np.int64)
        self._scheme, self._rows, self._width = scheme, rows, 0
        self._inner = aligned_zeros((rows, 0), np.float32)
        self._ready: PreparedActivations | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of the rows between A and B."""
        return batch_table_bytes(self._scheme, rows=self._rows, width=self._width)

    def set_entries(self, entries: Sequence[tuple[int, int, int]], *, width: int) -> None:
        """Write the entries: the address of a plan's table, its first row, its row count."""
        if width > self._width:
            self._grow_width(width)
        self.words[0] = len(entries)
        for number, entry in enumerate(entries):
            begin = HEADER_WORDS + number * ENTRY_WORDS
            self.words[begin : begin + ENTRY_WORDS] = entry

    def _grow_width(self, width: int) -> None:
        self._width, self._inner = width, aligned_zeros((self._rows, width), np.float32)
        begin = [0, self._inner.ctypes.data, self._inner.strides[0], *[0] * 5]
        if self._scheme not in FLOAT_SCHEMES:
            ready = self._ready = allocate_activations(self._scheme, self._rows, width)
            groups = (ready.scales.ctypes.data, ready.sums.ctypes.data, ready.scales.strides[0])
            begin[3:] = [ready.data.ctypes.data, ready.data.strides[0], *groups]
        self.words[:HEADER_WORDS] = begin


def batch_table_bytes(scheme: Scheme, *, rows: int, width: int) -> int:
    """Return the bytes of a table for plans of this width."""
    layout, ready = scheme.layout, 0
    if scheme not in FLOAT_SCHEMES:
        ready = layout.row_bytes * width + 8 * layout.count_groups(width)
    return 8 * (HEADER_WORDS + ENTRY_WORDS * rows) + rows * (4 * width + ready)


def _matrix_addresses(matrix: PackedMatrix | None) -> tuple[int, int]:
    return (0, 0) if matrix is None else (matrix.data.ctypes.data, matrix.scales.ctypes.data)


EXPAND_BLOCKS = 8
"""Blocks of B per item."""


def shrink_blocks(scheme: Scheme, *, single_sequence: bool) -> int:
    """Return the blocks of A per item; few for single tokens.

    If rows between A and B are int8 in groups of 32, an item has whole groups.
    """
    if scheme.layout.is_grouped:
        return GROUP_SIZE // LANES
    return PANEL_BLOCKS if single_sequence else 1


@cache
def lora_shrink_kernel(scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel of ``inner = rows A^T``, which writes inner in the form that B takes.

    An item is `shrink_blocks` blocks of the A of any module of any plan. Here and below,
    ``portable`` uses baseline instructions only.
    """
    name = f"reduce {scheme.value}{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_lora_shrink", scheme=scheme, portable=portable)


def lora_shrink_arguments(
    *,
    batch: AnyArray,
    first_module: int,
    modules: int,
    blocks: int,
    rows: PreparedActivations,
    vectors: int,
    groups: int,
) -> AnyArray:
    """Return its arguments; ``rows`` are those of the batch, ``vectors`` those of a row of A."""
    return encode_operands(
        array_address(batch, np.int64),
        first_module,
        modules,
        blocks,
        array_address(rows.data, rows.data.dtype),
        rows.data.strides[0],
        array_address(rows.scales),
        array_address(rows.sums, np.int32),
        vectors,
        groups,
    )


@cache
def lora_expand_kernel(scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel of ``out += inner B^T``; items are blocks of the B of all modules."""
    name = f"expand {scheme.value}{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_lora_expand", scheme=scheme, portable=portable)


@cache
def fused_lora_kernel(base: Scheme, scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T`` (or ``+=``) plus the LoRA products of all plans.

    Its items are those of `lora_shrink_kernel`, then those of `gemm_kernel`, each of which adds to
    its own blocks what `lora_expand_kernel` would. A worker that arrives before all shrink items
    are done waits for them: they were claimed earlier, by workers that do not wait.
    """
    name = f"multiply {base.value}, adapted {scheme.value}{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_fused_lora", base=base, scheme=scheme, portable=portable)


def fused_lora_arguments(
    *,
    reduce: AnyArray,
    multiply: AnyArray,
    multiply_items: int,
    expand: AnyArray,
    reduce_items: AnyArray,
    done: AnyArray,
) -> AnyArray:
    """Return its arguments: those of the three kernels, and the item counts of the first two.

    ``done``, int64 [1], starts at 0; the worker that finishes last in a run resets it to 0.
    """
    parts = (reduce, multiply, expand, reduce_items, done)
    return encode_operands(*(array_address(part, np.int64) for part in parts), multiply_items)


def lora_expand_arguments(
    *, batch: AnyArray, first_module: int, outs: AnyArray, out_stride: int
) -> AnyArray:
    """Return its arguments; ``outs`` int64 [modules, 2]: address and blocks of each output."""
    return encode_operands(
        array_address(batch, np.int64),
        first_module,
        len(outs),
        array_address(outs, np.int64),
        out_stride,
    )
