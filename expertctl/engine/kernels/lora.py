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
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.gemm import PANEL_BLOCKS, gemm_blocks_function
from expertctl.engine.kernels.jit import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.memory import (
    array_address,
    atomic_fetch_add,
    atomic_load,
    atomic_store,
    encode_operands,
    load_int64s,
    pause_cpu,
    row_address,
    yield_thread,
)
from expertctl.engine.kernels.packed_format import FLOAT_SCHEMES, GROUP_SIZE, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    allocate_activations,
    quantise_row,
    round_row,
)

BLOCKS_PER_ITEM = PANEL_BLOCKS


@cache
def gemm_kernel(scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel for matrices of one scheme; ``portable``: baseline instructions only."""
    function = gemm_function(scheme, portable=portable)
    return compile_kernel(f"multiply {scheme.value}{' plainly' * portable}", function)


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
        array_address(matrix.scales),
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


def gemm_function(scheme: Scheme, *, portable: bool = False) -> KernelFunction:
    """Return the uncompiled function, for kernels that extend it."""
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


@register_jitable
def find_row_plan(batch: Any, row: Any) -> Any:
    """Return the address of the plan table of a row, or 0."""
    for entry in range(load_int64s(batch, 1)[0]):
        plan, begin, count = load_int64s(batch + HEADER_BYTES + entry * ENTRY_BYTES, 3)
        if begin <= row < begin + count:
            return plan
    return 0


def _matrix_addresses(matrix: PackedMatrix | None) -> tuple[int, int]:
    return (0, 0) if matrix is None else (matrix.data.ctypes.data, matrix.scales.ctypes.data)


EXPAND_BLOCKS = 8
"""Blocks of B per item."""
_SPINS = 500
"""How often to check whether other workers are done before yielding to other threads."""


def shrink_blocks(scheme: Scheme, *, single_sequence: bool) -> int:
    """Return the blocks of A per item; few for single tokens.

    If rows between A and B are int8 in groups of 128, an item has whole groups.
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
    return compile_kernel(name, _shrink_function(scheme, portable=portable))


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
    return compile_kernel(name, _expand_function(scheme, portable=portable))


@cache
def fused_lora_kernel(base: Scheme, scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel of ``out = rows W^T`` (or ``+=``) plus the LoRA products of all plans.

    Its items are those of `lora_shrink_kernel`, then those of `gemm_kernel`, each of which adds to
    its own blocks what `lora_expand_kernel` would. A worker that arrives before all shrink items
    are done waits for them: they were claimed earlier, by workers that do not wait.
    """
    name = f"multiply {base.value}, adapted {scheme.value}{' plainly' * portable}"
    return compile_kernel(name, _fused_function(base, scheme, portable=portable))


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


def _shrink_function(scheme: Scheme, *, portable: bool) -> KernelFunction:
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


def _expand_function(scheme: Scheme, *, portable: bool) -> KernelFunction:
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


def _fused_function(base: Scheme, scheme: Scheme, *, portable: bool) -> KernelFunction:
    reduce = register_jitable(_shrink_function(scheme, portable=portable))
    multiply = register_jitable(gemm_function(base, portable=portable))
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
