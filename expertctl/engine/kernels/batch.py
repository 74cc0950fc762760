"""Which rows of a batch belong to which plan, as kernels read it: two tables of int64.

A *plan table* has a record for each linear layer of the base: where the plan's matrices and
vectors for it lie. A *batch table* begins with where the rows between A and B lie and goes on with
an entry for each plan: its table, its first row, how many rows. Rows without a plan have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned, words
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.rows import PreparedRows, room_for_rows
from expertctl.engine.kernels.scheme import FLOATING, GROUP, Scheme

Numbers = np.ndarray[Any, Any]

RECORD_WORDS, RECORD_BYTES = 11, 88
A_BLOCKS, B_VECTORS = 2, 6
"""Words of a record: 0 where there is no A, no B."""
VECTORS = slice(8, 11)
"""Words of a record: factors of the input, the output and the bias, each 0 or an address."""
VECTORS_AT = 64
BEGIN_WORDS, BEGIN_BYTES = 8, 64
ENTRY_WORDS, ENTRY_BYTES = 3, 24


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModulePart:
    """What a plan has for one linear layer; ``column`` is where its rows between A and B begin."""

    a: PackedMatrix | None = None
    b: PackedMatrix | None = None
    column: int = 0
    input_scale: Numbers | None = None
    output_scale: Numbers | None = None
    bias_scale: Numbers | None = None

    def record(self) -> list[int]:
        """Return its record."""
        return [
            *((0, 0, 0) if self.a is None else (*_places(self.a), self.a.blocks)),
            self.column,
            *((0, 0, 0, 0) if self.b is None else (*_places(self.b), *_lengths(self.b))),
            *(_place(v) for v in (self.input_scale, self.output_scale, self.bias_scale)),
        ]


def column_step(scheme: Scheme) -> int:
    """Return the multiple at which columns between A and B begin: modules share no group."""
    return GROUP if scheme.layout.is_grouped else LANES


class BatchTable:
    """The table of one batch, and the rows between A and B of adapters in one scheme."""

    def __init__(self, scheme: Scheme, *, rows: int) -> None:
        """Make room for so many rows, each of which may have a plan of its own."""
        self.words = aligned(BEGIN_WORDS + ENTRY_WORDS * rows, np.int64)
        self._scheme, self._rows, self._width = scheme, rows, 0
        self._inner = aligned((rows, 0), np.float32)
        self._ready: PreparedRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of it and of the rows between A and B."""
        return table_bytes(self._scheme, rows=self._rows, width=self._width)

    def set(self, entries: Sequence[tuple[int, int, int]], *, width: int) -> None:
        """Write the entries: the address of a plan's table, its first row, how many rows."""
        if width > self._width:
            self._widen(width)
        self.words[0] = len(entries)
        for number, entry in enumerate(entries):
            begin = BEGIN_WORDS + number * ENTRY_WORDS
            self.words[begin : begin + ENTRY_WORDS] = entry

    def _widen(self, width: int) -> None:
        self._width, self._inner = width, aligned((self._rows, width), np.float32)
        begin = [0, self._inner.ctypes.data, self._inner.strides[0], *[0] * 5]
        if self._scheme not in FLOATING:
            ready = self._ready = room_for_rows(self._scheme, self._rows, width)
            places = (ready.data.ctypes.data, ready.data.strides[0])
            begin[3:] = [*places, *_group_places(ready)]
        self.words[:BEGIN_WORDS] = begin


def table_bytes(scheme: Scheme, *, rows: int, width: int) -> int:
    """Return the bytes of a table whose plans are so wide."""
    layout = scheme.layout
    ready = 0 if scheme in FLOATING else layout.row_bytes * width + 8 * layout.groups(width)
    return 8 * (BEGIN_WORDS + ENTRY_WORDS * rows) + rows * (4 * width + ready)


@register_jitable
def plan_of(batch: Any, row: Any) -> Any:  # pragma: no cover - compiled
    """Return the address of the plan table of a row, or 0."""
    for entry in range(words(batch, 1)[0]):
        plan, begin, count = words(batch + BEGIN_BYTES + entry * ENTRY_BYTES, 3)
        if begin <= row < begin + count:
            return plan
    return 0


def _places(matrix: PackedMatrix) -> tuple[int, int]:
    return matrix.data.ctypes.data, matrix.scales.ctypes.data


def _lengths(matrix: PackedMatrix) -> tuple[int, int]:
    layout = matrix.scheme.layout
    return layout.vectors(matrix.columns), layout.groups(matrix.columns)


def _place(vector: Numbers | None) -> int:
    return 0 if vector is None else vector.ctypes.data


def _group_places(ready: PreparedRows) -> tuple[int, int, int]:
    return ready.scales.ctypes.data, ready.sums.ctypes.data, ready.scales.strides[0]
