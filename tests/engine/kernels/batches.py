"""Batches of rows with plans, and memory in which a write out of bounds is seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.batch import (
    RECORD_WORDS,
    BatchTable,
    ModulePart,
    column_step,
)
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.packed import PackedMatrix, pack
from expertctl.engine.kernels.scheme import Scheme
from tests.engine.kernels.products import random_numbers

Array = np.ndarray[Any, Any]

FIRST = 2
"""The place of the first module of a site; those before it have matrices of nobody."""
_CANARY = np.float32(-12345.678)


@dataclass(frozen=True)
class Guarded:
    """A buffer, float32 [rows, width], within a larger one that nothing may be written to."""

    inside: Array
    _around: Array

    def check_integrity(self) -> None:
        found = self._around.copy()
        rows, width = self.inside.shape
        found[1 : 1 + rows, LANES : LANES + width] = _CANARY
        assert (found == _CANARY).all(), "written out of bounds"


def guarded(rows: int, width: int) -> Guarded:
    """A buffer of canaries, whole vectors wide."""
    assert width % LANES == 0
    around = aligned((rows + 2, width + 2 * LANES), np.float32)
    around[...] = _CANARY
    return Guarded(around[1 : 1 + rows, LANES : LANES + width], around)


def amid_nan(numbers: Array) -> Array:
    """The same rows in a buffer where all else is NaN: what is read out of bounds spoils sums."""
    rows, width = numbers.shape
    around = aligned((rows + 2, -(-width // LANES) * LANES + 2 * LANES), np.float32)
    around[...] = np.nan
    inside = around[1 : 1 + rows, LANES : LANES + width]
    inside[...] = numbers
    return inside


@dataclass(frozen=True)
class Part:
    """What a plan has for one module."""

    a: PackedMatrix
    b: PackedMatrix
    column: int


@dataclass(frozen=True)
class Plan:
    """A part for each module of a site, or None; ``width`` columns lie between A and B."""

    parts: tuple[Part | None, ...]
    table: Array
    width: int


def random_plan(
    scheme: Scheme, ranks: Sequence[int], outs: Sequence[int], columns: int, *, seed: int
) -> Plan:
    """A plan with a rank for each module; 0 where it changes nothing."""
    parts: list[Part | None] = []
    width, step = 0, column_step(scheme)
    for place, (rank, out) in enumerate(zip(ranks, outs, strict=True)):
        if rank == 0:
            parts.append(None)
            continue
        a = pack(random_numbers(100 * seed + place, rank, columns), scheme)
        b = pack(random_numbers(100 * seed + place + 50, out, rank), scheme)
        parts.append(Part(a, b, width))
        width += -(-rank // step) * step
    return Plan(tuple(parts), _table(parts), width)


def _table(parts: Sequence[Part | None]) -> Array:
    table = np.full((FIRST + len(parts), RECORD_WORDS), -1, np.int64)
    for place, part in enumerate(parts, FIRST):
        found = ModulePart() if part is None else ModulePart(a=part.a, b=part.b, column=part.column)
        table[place] = found.record()
    return table


@dataclass(frozen=True)
class Job:
    """Rows of a batch that have a plan."""

    plan: Plan
    first: int
    rows: int

    @property
    def stretch(self) -> slice:
        return slice(self.first, self.first + self.rows)


def jobs_of(plans: Sequence[Plan], counts: Sequence[tuple[int, int]]) -> tuple[list[Job], int]:
    """Jobs in order, each after so many rows without a plan; and how many rows there are.

    After the last job there is one more row without a plan.
    """
    jobs, row = [], 0
    for plan, (gap, rows) in zip(plans, counts, strict=True):
        jobs.append(Job(plan, row + gap, rows))
        row += gap + rows
    return jobs, row + 1


def batch_of(scheme: Scheme, jobs: Sequence[Job], rows: int) -> BatchTable:
    """The table of a batch, with room for more rows and a vector more than plans are wide."""
    batch = BatchTable(scheme, rows=rows + 1)
    width = max((job.plan.width for job in jobs), default=0) + column_step(scheme)
    entries = [(job.plan.table.ctypes.data, job.first, job.rows) for job in jobs]
    batch.set(entries, width=width)
    return batch
