"""Products as the kernels do them, and the plain formula in float64 that they are held against.

Batches of rows with plans, and memory in which a write out of bounds is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.arrays import aligned_zeros, widen
from expertctl.engine.kernels.lora import (
    RECORD_WORDS,
    AdapterBatchTable,
    ModuleAdapter,
    gemm_arguments,
    gemm_items,
    gemm_kernel,
    lora_column_step,
)
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix, pack_matrix, unpack_matrix
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    activation_arguments,
    activation_kernel,
    allocate_activations,
    wrap_float_activations,
)

Array = np.ndarray[Any, Any]

FLOATS = (Scheme.FLOAT32, Scheme.FLOAT16)
INTEGERS = (Scheme.INT8, Scheme.INT5, Scheme.INT4)


def make_random_numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def quantise_rows(rows: Array, scheme: Scheme) -> PreparedActivations:
    """What a scheme makes of float32 tokens."""
    if scheme in FLOATS:
        return wrap_float_activations(np.ascontiguousarray(rows))
    room = allocate_activations(scheme, *rows.shape)
    arguments = activation_arguments(rows=rows, columns=rows.shape[1], prepared=room)
    activation_kernel(scheme)(0, len(rows), arguments.ctypes.data)
    return room


def run_gemm(
    matrix: PackedMatrix, rows: Array, *, plain: bool = False, onto: Array | None = None
) -> Array:
    """The kernel's product of tokens with a matrix, [tokens, rows of the matrix]."""
    out = aligned_zeros((len(rows), matrix.blocks * LANES), np.float32)
    out[...] = np.nan
    if onto is not None:
        out[:, : matrix.rows] = onto
    tokens = np.array([len(rows)], np.int64)
    ready = quantise_rows(rows, matrix.scheme)
    arguments = gemm_arguments(
        matrix=matrix, rows=ready, out=out, tokens=tokens, adds=onto is not None
    )
    kernel = gemm_kernel(matrix.scheme, portable=plain)
    kernel(0, gemm_items(matrix), arguments.ctypes.data)
    return out[:, : matrix.rows]


def multiply_exactly(matrix: PackedMatrix, rows: Array) -> tuple[Array, Array]:
    """The product in float64, and how far float32 sums may be from it."""
    weights = unpack_matrix(matrix).astype(np.float64)
    tokens = dequantise_rows(quantise_rows(rows, matrix.scheme), rows)
    reach = np.abs(tokens) @ np.abs(weights).T
    return tokens @ weights.T, (matrix.columns + 4) * 2.0**-23 * reach + 1e-30


def dequantise_rows(ready: PreparedActivations, rows: Array) -> Array:
    """What prepared tokens stand for, [tokens, columns]."""
    columns = rows.shape[1]
    if ready.data.dtype == np.uint16:
        return widen(ready.data[:, :columns]).astype(np.float64)
    if ready.data.dtype == np.int8:
        each = np.repeat(ready.scales.astype(np.float64), GROUP_SIZE, axis=1)[:, :columns]
        return ready.data[:, :columns] * each
    return ready.data[:, :columns].astype(np.float64)


FIRST_COLUMN = 2
"""The place of the first module of a site; those before it have matrices of nobody."""
_CANARY = np.float32(-12345.678)


@dataclass(frozen=True)
class GuardedBuffer:
    """A buffer, float32 [rows, width], within a larger one that nothing may be written to."""

    inside: Array
    _surrounding: Array

    def check_integrity(self) -> None:
        found = self._surrounding.copy()
        rows, width = self.inside.shape
        found[1 : 1 + rows, LANES : LANES + width] = _CANARY
        assert (found == _CANARY).all(), "written out of bounds"


def make_guarded_buffer(rows: int, width: int) -> GuardedBuffer:
    """A buffer of canaries, whole vectors wide."""
    assert width % LANES == 0
    around = aligned_zeros((rows + 2, width + 2 * LANES), np.float32)
    around[...] = _CANARY
    return GuardedBuffer(around[1 : 1 + rows, LANES : LANES + width], around)


def surround_with_nan(numbers: Array) -> Array:
    """The same rows in a buffer where all else is NaN: what is read out of bounds spoils sums."""
    rows, width = numbers.shape
    around = aligned_zeros((rows + 2, -(-width // LANES) * LANES + 2 * LANES), np.float32)
    around[...] = np.nan
    inside = around[1 : 1 + rows, LANES : LANES + width]
    inside[...] = numbers
    return inside


@dataclass(frozen=True)
class LoraPart:
    """What a plan has for one module."""

    a: PackedMatrix
    b: PackedMatrix
    column: int


@dataclass(frozen=True)
class LoraPlan:
    """A part for each module of a site, or None; ``width`` columns lie between A and B."""

    parts: tuple[LoraPart | None, ...]
    table: Array
    width: int


def make_random_plan(
    scheme: Scheme, ranks: Sequence[int], outs: Sequence[int], columns: int, *, seed: int
) -> LoraPlan:
    """A plan with a rank for each module; 0 where it changes nothing."""
    parts: list[LoraPart | None] = []
    width, step = 0, lora_column_step(scheme)
    for place, (rank, out) in enumerate(zip(ranks, outs, strict=True)):
        if rank == 0:
            parts.append(None)
            continue
        a = pack_matrix(make_random_numbers(100 * seed + place, rank, columns), scheme)
        b = pack_matrix(make_random_numbers(100 * seed + place + 50, out, rank), scheme)
        parts.append(LoraPart(a, b, width))
        width += -(-rank // step) * step
    return LoraPlan(tuple(parts), _make_plan_table(parts), width)


def _make_plan_table(parts: Sequence[LoraPart | None]) -> Array:
    table = np.full((FIRST_COLUMN + len(parts), RECORD_WORDS), -1, np.int64)
    for place, part in enumerate(parts, FIRST_COLUMN):
        found = (
            ModuleAdapter()
            if part is None
            else ModuleAdapter(a=part.a, b=part.b, column=part.column)
        )
        table[place] = found.to_record()
    return table


@dataclass(frozen=True)
class PlannedRows:
    """Rows of a batch that have a plan."""

    plan: LoraPlan
    first: int
    rows: int

    @property
    def row_range(self) -> slice:
        return slice(self.first, self.first + self.rows)


def make_jobs(
    plans: Sequence[LoraPlan], counts: Sequence[tuple[int, int]]
) -> tuple[list[PlannedRows], int]:
    """Jobs in order, each after so many rows without a plan; and how many rows there are.

    After the last job there is one more row without a plan.
    """
    jobs, row = [], 0
    for plan, (gap, rows) in zip(plans, counts, strict=True):
        jobs.append(PlannedRows(plan, row + gap, rows))
        row += gap + rows
    return jobs, row + 1


def make_batch_table(scheme: Scheme, jobs: Sequence[PlannedRows], rows: int) -> AdapterBatchTable:
    """The table of a batch, with room for more rows and a vector more than plans are wide."""
    batch = AdapterBatchTable(scheme, rows=rows + 1)
    width = max((job.plan.width for job in jobs), default=0) + lora_column_step(scheme)
    entries = [(job.plan.table.ctypes.data, job.first, job.rows) for job in jobs]
    batch.set_entries(entries, width=width)
    return batch
