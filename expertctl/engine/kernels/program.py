"""Programs of kernels, and the arguments of their operations.

**Program.** A list of operations on preallocated memory: the execution plan of one base, one
adapter plan and one batch size. Running it allocates nothing; runs differ only in the contents of
its inputs.

**Arguments.** int64 words that compiled code reads in order. An array is only an address there, so
a wrong one would go unnoticed; functions that return arguments therefore take arrays by keyword,
and dtypes are checked here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.jit import Kernel, load_kernels


def encode_operands(*words: int) -> AnyArray:
    """Return arguments as int64 [words]."""
    return np.array(words, np.int64)


def array_address(array: AnyArray | None, kind: Any = np.float32) -> int:
    """Return the address of an array with this dtype, or 0 for None."""
    if array is None:
        return 0
    assert array.dtype == kind, f"dtype {array.dtype} instead of {np.dtype(kind)}"
    return array.ctypes.data


def row_address(rows: AnyArray) -> tuple[int, int]:
    """Return the address of float32 [rows, columns], and the stride between rows in bytes."""
    lie_together = rows.strides[1] == rows.itemsize or rows.shape[1] == 1 or rows.size == 0
    assert lie_together, "the columns of a row are not adjacent"
    return array_address(rows), rows.strides[0]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """``table`` int64 [operations, 4]: kernel, arguments, address of the item count, minimum claim.

    The memory that its addresses point to lives as long as this object, so a thread pool takes the
    program, not the table.
    """

    table: AnyArray
    names: tuple[str, ...]
    """The kernel name of each operation, for telemetry."""
    places: tuple[str, ...]
    """The module that each operation belongs to."""
    _kept: tuple[object, ...]
    """The objects that the addresses in the table point into."""

    def slice_operations(self, begin: int, end: int) -> "Program":
        """Return a range of its operations as a program."""
        names, places = self.names[begin:end], self.places[begin:end]
        return Program(self.table[begin:end], names, places, self._kept)


class ProgramBuilder:
    """Collects operations and keeps their operands alive."""

    def __init__(self) -> None:
        """Start with no operations."""
        self._kernels: list[Kernel] = []
        self._rows: list[tuple[int, int, int]] = []
        self._places: list[str] = []
        self._kept: list[object] = []
        self._place = ""

    def set_place(self, place: str) -> None:
        """Set the module that the following operations belong to."""
        self._place = place

    def add(
        self,
        kernel: Kernel,
        arguments: AnyArray,
        items: AnyArray | int,
        *,
        portion: int = 1,
        part: str = "",
    ) -> None:
        """Add an operation; ``items`` may be an int64 [1] that is read at each run.

        ``part`` names the operation within its module.
        """
        counted = np.array([items], np.int64) if isinstance(items, int) else items
        self._kernels.append(kernel)
        self._rows.append((arguments.ctypes.data, counted.ctypes.data, max(portion, 1)))
        self._places.append(f"{self._place}.{part}" if part else self._place)
        self.keep_alive(kernel, arguments, counted)

    def keep_alive(self, *objects: object) -> None:
        """Keep objects that arguments point to alive as long as the program."""
        self._kept.extend(objects)

    def build(self) -> Program:
        """Return the program and start again with no operations.

        Its kernels are loaded now, and those that are missing are compiled at the same time; errors
        as `load_kernels`.
        """
        load_kernels(self._kernels)
        rows = [(k.address, *row) for k, row in zip(self._kernels, self._rows, strict=True)]
        names = tuple(kernel.name for kernel in self._kernels)
        table = np.array(rows, np.int64).reshape(len(rows), 4)
        built = Program(table, names, tuple(self._places), tuple(self._kept))
        self._kernels, self._rows, self._places, self._kept = [], [], [], []
        return built
