"""The operands of a GEMM tile, and the bfloat16 tile for CPUs without 512-bit registers.

Such CPUs have no instruction that multiplies bfloat16 pairs, and widening the activations of a
token for every block takes as long as multiplying them. So `Bf16TileEmitter` widens some columns of
some tokens once for all blocks of a panel, whose sums are kept on the stack meanwhile. Each sum
still runs from the first column to the last.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value, emit_tiles
from expertctl.engine.kernels.packed_format import LANES


@dataclass(frozen=True, slots=True)
class TileOperands:
    """Addresses and strides of a tile, in bytes; all are int64 values.

    Weights ``[blocks][vectors]``, scales ``[blocks][groups][16]`` float32, rows ``[tokens]``, row
    scales and sums ``[tokens][groups]``, out ``[tokens][blocks][16]`` float32.
    """

    weights: Value
    weights_stride: Value
    scales: Value
    scales_stride: Value
    rows: Value
    rows_stride: Value
    row_scales: Value
    """float32: the value of one int8 step of a row."""
    row_sums: Value
    """int32: the sum of a row's int8 values in a group."""
    groups_stride: Value
    out: Value
    out_stride: Value
    vectors: Value
    tokens: Value
    adds: Value
    """If not 0, add to the values in ``out``."""

    def from_block(self, lanes: SimdBuilder, block: Value) -> "TileOperands":
        """Return the operands advanced to a later block."""
        return replace(
            self,
            weights=lanes.offset(self.weights, block, self.weights_stride),
            scales=lanes.offset(self.scales, block, self.scales_stride),
            out=lanes.offset(self.out, block, VECTOR_BYTES),
        )

    def from_token(self, lanes: SimdBuilder, token: Value) -> "TileOperands":
        """Return the operands advanced to a later token."""
        return replace(
            self,
            rows=lanes.offset(self.rows, token, self.rows_stride),
            row_scales=lanes.offset(self.row_scales, token, self.groups_stride),
            row_sums=lanes.offset(self.row_sums, token, self.groups_stride),
            out=lanes.offset(self.out, token, self.out_stride),
        )


HIGH_HALF = 0xFFFF0000
"""The bits of the second bfloat16 of a pair."""
_PAIRS = 256
"""Column pairs widened at once: the part that four blocks need stays in cache."""
_SIDE_BYTES, _ROW_BYTES = _PAIRS * 4, 2 * _PAIRS * 4
"""Bytes of the first halves of a token's pairs, and of both halves."""


@dataclass(frozen=True)
class Bf16TileEmitter:
    """Emits the product of some blocks with some tokens."""

    lanes: SimdBuilder
    blocks: int
    tokens: int
    operands: TileOperands
    accumulates: bool = False
    """Whether sums start from the values in ``out``."""

    @cached_property
    def _rows(self) -> Value:
        """Stack buffer [tokens][first, second][256] float32."""
        return self.lanes.allocate_vectors(self.tokens * _ROW_BYTES // VECTOR_BYTES)

    @cached_property
    def _sums(self) -> Value:
        """Stack buffer [blocks][tokens][16] float32."""
        return self.lanes.allocate_vectors(self.blocks * self.tokens)

    def emit(self) -> None:
        """Emit the whole tile."""
        lanes, at = self.lanes, self.operands
        size = lanes.int_constant(_PAIRS)
        with lanes.loop(lanes.ceil_divide_int(at.vectors, size)) as part:
            first = lanes.multiply_int(part, size)
            count = lanes.min_int(lanes.subtract_int(at.vectors, first), size)
            with lanes.loop(lanes.int_constant(self.tokens)) as token:
                row = lanes.offset(lanes.offset(at.rows, token, at.rows_stride), first, 4)
                self._widen(row, lanes.offset(self._rows, token, _ROW_BYTES), count)
            with lanes.loop(lanes.int_constant(self.blocks)) as block:
                self._add_columns(block, first, count)
        with lanes.loop(lanes.int_constant(self.blocks * self.tokens)) as number:
            tokens = lanes.int_constant(self.tokens)
            block = lanes.divide_int(number, tokens)
            self._write(block, lanes.subtract_int(number, lanes.multiply_int(block, tokens)))

    def _widen(self, row: Value, out: Value, count: Value) -> None:
        """Widen the pairs of a token, sixteen at a time and the rest one by one."""
        lanes = self.lanes
        for begin, size in emit_tiles(lanes, count, (LANES, 1)):
            pairs, place = lanes.offset(row, begin, 4), lanes.offset(out, begin, 4)
            second = lanes.add_int(place, lanes.int_constant(_SIDE_BYTES))
            load = lanes.load_ints if size > 1 else lanes.broadcast_int
            store = lanes.store_floats if size > 1 else lanes.store_first_float
            for numbers, to in zip(self._split_pairs(load(pairs)), (place, second), strict=True):
                store(numbers, to)

    def _split_pairs(self, pairs: Value) -> tuple[Value, Value]:
        """Return the first and the second halves of bfloat16 pairs as float32."""
        lanes = self.lanes
        first = lanes.bitcast_to_floats(lanes.shift_left(pairs, 16))
        return first, lanes.bitcast_to_floats(lanes.mask_ints(pairs, HIGH_HALF))

    def _add_columns(self, block: Value, first: Value, count: Value) -> None:
        lanes, at = self.lanes, self.operands
        tokens = [lanes.int_constant(token) for token in range(self.tokens)]
        places = [self._sum_address(block, token) for token in tokens]
        starts = [self._initial_sum(block, token) for token in tokens]
        begin = [
            lanes.select_int(first, lanes.load_floats(place), start)
            for place, start in zip(places, starts, strict=True)
        ]
        sums = [lanes.create_variable(start) for start in begin]
        for each, start in zip(sums, begin, strict=True):
            lanes.store_variable(start, each)
        weights = lanes.offset(at.weights, block, at.weights_stride)
        weights = lanes.offset(weights, first, VECTOR_BYTES)
        with lanes.loop(count) as vector:
            stored = lanes.load_ints(lanes.offset(weights, vector, VECTOR_BYTES))
            for side, numbers in enumerate(self._split_pairs(stored)):
                for token, total in enumerate(sums):
                    offset = lanes.int_constant(token * _ROW_BYTES + side * _SIDE_BYTES)
                    row = lanes.offset(lanes.add_int(self._rows, offset), vector, 4)
                    number = lanes.broadcast_float(row)
                    value = lanes.fma(numbers, number, lanes.load_variable(total))
                    lanes.store_variable(value, total)
        for place, total in zip(places, sums, strict=True):
            lanes.store_floats(lanes.load_variable(total), place)

    def _initial_sum(self, block: Value, token: Value) -> Value:
        if self.accumulates:
            return self.lanes.load_floats(self._output_address(block, token))
        return self.lanes.zero_floats()

    def _write(self, block: Value, token: Value) -> None:
        lanes, place = self.lanes, self._output_address(block, token)
        total = lanes.load_floats(self._sum_address(block, token))
        if not self.accumulates:
            added = lanes.add_floats(lanes.load_floats(place), total)
            total = lanes.select_int(self.operands.adds, added, total)
        lanes.store_floats(total, place)

    def _output_address(self, block: Value, token: Value) -> Value:
        lanes, at = self.lanes, self.operands
        return lanes.offset(lanes.offset(at.out, token, at.out_stride), block, VECTOR_BYTES)

    def _sum_address(self, block: Value, token: Value) -> Value:
        """Return the address of the buffered sums of a block and a token."""
        lanes = self.lanes
        own = lanes.offset(self._sums, block, self.tokens * VECTOR_BYTES)
        return lanes.offset(own, token, VECTOR_BYTES)
