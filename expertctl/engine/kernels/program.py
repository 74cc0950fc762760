"""A program: what is computed, in order, on memory that is there before and stays after.

It is the execution plan of one base, one plan of experts and one size of batch. Running it
allocates nothing; runs differ only in the contents of its inputs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.kernel import Kernel

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """``table`` int64 [operations, 4]: kernel, arguments, address of the items, portion.

    What its addresses point to lives as long as this, so a crew is given this, not the table.
    """

    table: Numbers
    names: tuple[str, ...]
    """What each operation is called, for telemetry."""
    places: tuple[str, ...]
    """What each operation is a part of."""
    _kept: tuple[object, ...]
    """What the addresses in the table point into."""

    def part(self, begin: int, end: int) -> "Program":
        """Return some of its operations as a program."""
        names, places = self.names[begin:end], self.places[begin:end]
        return Program(self.table[begin:end], names, places, self._kept)


class ProgramBuilder:
    """Collects operations and keeps alive what they point to."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rows: list[tuple[int, int, int, int]] = []
        self._names: list[str] = []
        self._places: list[str] = []
        self._kept: list[object] = []
        self._place = ""

    def begin(self, place: str) -> None:
        """Say what the operations that follow are a part of."""
        self._place = place

    def add(
        self,
        kernel: Kernel,
        arguments: Numbers,
        items: Numbers | int,
        *,
        portion: int = 1,
        part: str = "",
    ) -> None:
        """Add an operation; ``items`` may be an int64 [1] that is read at each run.

        ``part`` says what it is in the place where it stands.
        """
        counted = np.array([items], np.int64) if isinstance(items, int) else items
        self._rows.append(
            (kernel.address, arguments.ctypes.data, counted.ctypes.data, max(portion, 1))
        )
        self._names.append(kernel.name)
        self._places.append(f"{self._place}.{part}" if part else self._place)
        self.keep(kernel, arguments, counted)

    def keep(self, *objects: object) -> None:
        """Keep what arguments point to, as long as the program."""
        self._kept.extend(objects)

    def build(self) -> Program:
        """Return the program, and begin another with nothing."""
        table = np.array(self._rows, np.int64).reshape(len(self._rows), 4)
        built = Program(table, tuple(self._names), tuple(self._places), tuple(self._kept))
        self._rows, self._names, self._places, self._kept = [], [], [], []
        return built
