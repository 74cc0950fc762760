"""A routed expert in one block of memory: gate and up as one matrix, then down.

Of each matrix the numbers come first, then the scales, and both begin at multiples of 64. So an
expert is one read, and one address says where it is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.scheme import Scheme

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One matrix of an expert: its shape, and the bytes from the start of the block to it."""

    scheme: Scheme
    rows: int
    columns: int
    begin: int

    @property
    def blocks(self) -> int:
        """Blocks of sixteen rows."""
        return -(-self.rows // LANES)

    @property
    def scales_begin(self) -> int:
        """Bytes from the start of the block to its scales."""
        return self.begin + _filled(self._data_bytes)

    @property
    def end(self) -> int:
        """Bytes from the start of the block to what comes after it."""
        return self.scales_begin + _filled(self._scales_bytes)

    def matrix(self, memory: Numbers | memoryview) -> PackedMatrix:
        """Return the matrix that lies in the memory of a block; it can be written if that can."""
        octets, groups = np.frombuffer(memory, np.uint8), self.scheme.layout.groups(self.columns)
        data = octets[self.begin : self.begin + self._data_bytes]
        scales = octets[self.scales_begin : self.scales_begin + self._scales_bytes]
        shape = (self.blocks, groups, LANES)
        return PackedMatrix(
            self.scheme, self.rows, self.columns, data, scales.view(np.float32).reshape(shape)
        )

    @property
    def _data_bytes(self) -> int:
        layout = self.scheme.layout
        return self.blocks * layout.vectors(self.columns) * layout.vector_bytes

    @property
    def _scales_bytes(self) -> int:
        return self.blocks * self.scheme.layout.groups(self.columns) * VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What every routed expert of a base looks like."""

    scheme: Scheme
    hidden: int
    intermediate: int
    compact: int = 0
    """Bytes of the block of a compact expert; 0: experts lie there as they are computed."""

    @property
    def gate_up_part(self) -> ExpertPart:
        """Return its first matrix: the rows of gate, then those of up."""
        return ExpertPart(self.scheme, 2 * self.intermediate, self.hidden, 0)

    @property
    def down_part(self) -> ExpertPart:
        """Return its second matrix."""
        return ExpertPart(self.scheme, self.hidden, self.intermediate, self.gate_up_part.end)

    @property
    def nbytes(self) -> int:
        """Bytes of an expert as it is computed."""
        return self.down_part.end

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.compact or self.nbytes

    def gate_up(self, memory: Numbers | memoryview) -> PackedMatrix:
        """Return the gate and up that lie in the memory of a block."""
        return self.gate_up_part.matrix(memory)

    def down(self, memory: Numbers | memoryview) -> PackedMatrix:
        """Return the down that lies in the memory of a block."""
        return self.down_part.matrix(memory)


def _filled(count: int) -> int:
    return -(-count // VECTOR_BYTES) * VECTOR_BYTES
