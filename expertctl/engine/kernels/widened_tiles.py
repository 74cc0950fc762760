"""Products of bfloat16 where registers are narrow and no instruction multiplies pairs.

Widening a token's numbers for every block takes as long as multiplying them. So some columns of
some tokens are widened once, for all blocks of a strip, whose sums wait on the stack meanwhile.
Each sum still runs from the first column to the last.
"""

from dataclasses import dataclass
from functools import cached_property

from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes, Value
from expertctl.engine.kernels.operands import Operands
from expertctl.engine.kernels.stretches import stretches

HIGH_HALF = 0xFFFF0000
"""The bits of the second bfloat16 of a pair."""
_PAIRS = 256
"""Pairs of columns that are widened at once: what four blocks need of them stays in cache."""
_SIDE_BYTES, _ROW_BYTES = _PAIRS * 4, 2 * _PAIRS * 4
"""Bytes of the first numbers of a token's pairs, and of both."""


@dataclass(frozen=True)
class WidenedTiles:
    """Emits the product of some blocks with some tokens."""

    lanes: Lanes
    blocks: int
    tokens: int
    at: Operands
    goes_on: bool = False
    """Whether sums begin with what is in ``out``."""

    @cached_property
    def _rows(self) -> Value:
        """Room for [tokens][first, second][256] float32."""
        return self.lanes.room(self.tokens * _ROW_BYTES // VECTOR_BYTES)

    @cached_property
    def _sums(self) -> Value:
        """Room for [blocks][tokens][16] float32."""
        return self.lanes.room(self.blocks * self.tokens)

    def emit(self) -> None:
        """Emit it all."""
        lanes, at = self.lanes, self.at
        size = lanes.constant(_PAIRS)
        with lanes.count(lanes.parts(at.vectors, size)) as part:
            first = lanes.product(part, size)
            count = lanes.least(lanes.subtract(at.vectors, first), size)
            with lanes.count(lanes.constant(self.tokens)) as token:
                row = lanes.at(lanes.at(at.rows, token, at.rows_stride), first, 4)
                self._widen(row, lanes.at(self._rows, token, _ROW_BYTES), count)
            with lanes.count(lanes.constant(self.blocks)) as block:
                self._add(block, first, count)
        with lanes.count(lanes.constant(self.blocks * self.tokens)) as number:
            tokens = lanes.constant(self.tokens)
            block = lanes.quotient(number, tokens)
            self._write(block, lanes.subtract(number, lanes.product(block, tokens)))

    def _widen(self, row: Value, out: Value, count: Value) -> None:
        """Widen pairs of a token, sixteen at a time and then one by one."""
        lanes = self.lanes
        for begin, size in stretches(lanes, count, (LANES, 1)):
            pairs, place = lanes.at(row, begin, 4), lanes.at(out, begin, 4)
            second = lanes.sum(place, lanes.constant(_SIDE_BYTES))
            load, store = (
                (lanes.ints, lanes.store) if size > 1 else (lanes.every_int, lanes.store_first)
            )
            for numbers, to in zip(self._apart(load(pairs)), (place, second), strict=True):
                store(numbers, to)

    def _apart(self, pairs: Value) -> tuple[Value, Value]:
        """Return the first and the second numbers of pairs as float32."""
        lanes = self.lanes
        return lanes.as_floats(lanes.up(pairs, 16)), lanes.as_floats(lanes.masked(pairs, HIGH_HALF))

    def _add(self, block: Value, first: Value, count: Value) -> None:
        """Add some columns to the sums of a block."""
        lanes, at = self.lanes, self.at
        places = [self._sum(block, lanes.constant(token)) for token in range(self.tokens)]
        starts = [self._first(block, lanes.constant(token)) for token in range(self.tokens)]
        begin = [
            lanes.chosen(first, lanes.floats(place), start)
            for place, start in zip(places, starts, strict=True)
        ]
        sums = [lanes.variable(start) for start in begin]
        for each, start in zip(sums, begin, strict=True):
            lanes.write(start, each)
        weights = lanes.at(lanes.at(at.weights, block, at.weights_stride), first, VECTOR_BYTES)
        with lanes.count(count) as vector:
            stored = lanes.ints(lanes.at(weights, vector, VECTOR_BYTES))
            for side, numbers in enumerate(self._apart(stored)):
                for token, total in enumerate(sums):
                    offset = lanes.constant(token * _ROW_BYTES + side * _SIDE_BYTES)
                    number = lanes.every_float(lanes.at(lanes.sum(self._rows, offset), vector, 4))
                    lanes.write(lanes.fma(numbers, number, lanes.read(total)), total)
        for place, total in zip(places, sums, strict=True):
            lanes.store(lanes.read(total), place)

    def _first(self, block: Value, token: Value) -> Value:
        """Return what a sum begins with."""
        lanes = self.lanes
        return lanes.floats(self._out(block, token)) if self.goes_on else lanes.no_floats()

    def _write(self, block: Value, token: Value) -> None:
        lanes, place = self.lanes, self._out(block, token)
        total = lanes.floats(self._sum(block, token))
        if not self.goes_on:
            added = lanes.add(lanes.floats(place), total)
            total = lanes.chosen(self.at.adds, added, total)
        lanes.store(total, place)

    def _out(self, block: Value, token: Value) -> Value:
        lanes, at = self.lanes, self.at
        return lanes.at(lanes.at(at.out, token, at.out_stride), block, VECTOR_BYTES)

    def _sum(self, block: Value, token: Value) -> Value:
        """Return where the sums of a block and a token wait."""
        lanes = self.lanes
        own = lanes.at(self._sums, block, self.tokens * VECTOR_BYTES)
        return lanes.at(own, token, VECTOR_BYTES)
