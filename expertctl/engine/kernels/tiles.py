"""The tile of every product: blocks of sixteen rows of a matrix times tokens, kept in registers.

A sum of one row and one token has one accumulator and runs over the columns from first to last,
whatever the tile: its bits do not depend on the rest of the batch. Integers are summed exactly
within a group of columns, then scaled; so the instruction and its substitutes agree bit by bit, and
a token on its own, which waits for memory, has several accumulators within a group.

A strip, the blocks of a tile, is read from memory for the first tokens and from the second cache
for the others. While a strip of floats is computed, each tile prefetches a block of the next one
into that cache, or every strip would begin by waiting for memory; where there are enough tokens,
there are tiles enough for all blocks.

Where registers are narrow, a sum takes two or four of them, and a tile is one block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from expertctl.engine.kernels.cpu import Cpu, host_cpu
from expertctl.engine.kernels.lanes import VECTOR_BYTES, Lanes, Value
from expertctl.engine.kernels.operands import Operands
from expertctl.engine.kernels.scheme import FLOATING, GROUP, Layout, Scheme
from expertctl.engine.kernels.stretches import even_stretches, stretches
from expertctl.engine.kernels.widened_tiles import HIGH_HALF, WidenedTiles

_SCHEMES = tuple(Scheme)
_LOW_NIBBLES, _EVEN_BYTES = 0x0F0F0F0F, 0x00FF00FF
_NARROW_TOKENS = {True: (4, 2, 1), False: (6, 4, 1)}
"""Tokens of tiles where registers are narrow, the largest first: with integers, with floats."""
_LEAST = 3
"""The fewest tokens of a tile that prefetches for the next strip; fewer wait for memory."""
_SPREAD = 4
"""Accumulators of a token on its own within a group, so that no sum waits for the one before."""


def code_of(scheme: Scheme) -> int:
    """Return the constant by which compiled code names a scheme."""
    return _SCHEMES.index(scheme)


OPERANDS = len(Operands.__slots__)


@intrinsic(prefer_literal=True)
def strip(_context: Any, code: Any, plain: Any, blocks: Any, goes_on: Any, *operands: Any) -> Any:
    """Compute some blocks for all tokens; arguments are four constants, then the `Operands`.

    ``plain`` not 0: without the instructions that only some processors have. ``goes_on`` not 0:
    sums of floats begin with what is in ``out``.
    """
    constants = (code, plain, blocks, goes_on)
    if not all(isinstance(each, types.IntegerLiteral) for each in constants):
        raise RequireLiteralValue("the shape of a strip is a constant")
    number, without, high, on = (each.literal_value for each in constants)
    scheme, cpu = _SCHEMES[number], _cpu(bool(without))

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        found = [builder.extract_value(values[4], place) for place in range(OPERANDS)]
        lanes, operands = Lanes(builder), Operands(*found)
        for turn, first, tokens in _tiles(lanes, operands.tokens, high, scheme, cpu):
            shape = _Shape(scheme, high, tokens, cpu, goes_on=bool(on))
            _emit_tokens(lanes, shape, operands.from_token(lanes, first), turn)
        return context.get_dummy_value()

    rest = types.StarArgTuple.from_types((types.int64,) * OPERANDS)
    return types.void(*constants, rest), emit


def _tiles(
    lanes: Lanes, tokens: Value, blocks: int, scheme: Scheme, cpu: Cpu
) -> Iterator[tuple[Value, Value, int]]:
    """Emit each tile in turn; yields its number, its first token, and how many it has.

    Each reads the strip anew, so they are as few as registers allow; and of equal size, for a tile
    of one or two tokens waits for its sums. But where tokens suffice for a tile for each block of
    the next strip, there are as many. Tiles of integers, whose code is longer, have three sizes.
    """
    layout = scheme.layout
    if cpu.wide and not layout.is_grouped:
        each = lanes.constant(blocks)
        enough = lanes.quotient(tokens, lanes.constant(_LEAST * blocks))
        fetching = lanes.chosen(enough, each, lanes.constant(0))
        several = lanes.most(lanes.parts(tokens, lanes.constant(layout.tokens)), fetching)
        yield from even_stretches(lanes, tokens, several=several, most=layout.tokens)
        return
    sizes = (layout.tokens, 2, 1) if cpu.wide else _NARROW_TOKENS[layout.is_grouped]
    for first, size in stretches(lanes, tokens, sizes):
        yield lanes.quotient(first, lanes.constant(size)), first, size


def _ahead(lanes: Lanes, blocks: int, operands: Operands, turn: Value) -> Value:
    """Return where the block of the next strip that a tile prefetches begins; tiles take turns."""
    several = lanes.constant(blocks)
    whole = lanes.product(lanes.quotient(turn, several), several)
    block = lanes.sum(several, lanes.subtract(turn, whole))
    return lanes.at(operands.weights, block, operands.weights_stride)


def _emit_tokens(lanes: Lanes, shape: "_Shape", operands: Operands, turn: Value) -> None:
    """Emit the tile of some tokens, or one block after the other.

    The latter where integers meet one token, for memory is faster when it is read in order than in
    four places at once; and where the sums of more blocks would not stay in registers.
    """
    alone = shape.tokens == 1
    if shape.scheme is Scheme.BFLOAT16 and not (alone or shape.cpu.wide):
        WidenedTiles(lanes, shape.blocks, shape.tokens, operands, shape.goes_on).emit()
        return
    apart = shape.scheme.layout.is_grouped if alone else not shape.cpu.wide
    if apart:
        spread = _SPREAD if alone else 1
        with lanes.count(lanes.constant(shape.blocks)) as block:
            one = replace(shape, blocks=1, spread=spread)
            _Tile(lanes, one, operands.from_block(lanes, block)).emit()
    else:
        fetches = not shape.scheme.layout.is_grouped and shape.tokens >= _LEAST
        ahead = _ahead(lanes, shape.blocks, operands, turn) if fetches else None
        _Tile(lanes, shape, operands, ahead).emit()


def _cpu(plain: bool) -> Cpu:
    return host_cpu().plain() if plain else host_cpu()


@dataclass(frozen=True, slots=True)
class _Shape:
    scheme: Scheme
    blocks: int
    tokens: int
    cpu: Cpu
    spread: int = 1
    """Accumulators of one block and token within a group."""
    goes_on: bool = False
    """Whether sums begin with what is in ``out``."""


class _Tile:
    """Emits one tile."""

    def __init__(
        self, lanes: Lanes, shape: _Shape, operands: Operands, ahead: Value | None = None
    ) -> None:
        self._lanes, self._shape, self._at, self._ahead = lanes, shape, operands, ahead
        self._layout: Layout = shape.scheme.layout
        self._blocks, self._tokens = range(shape.blocks), range(shape.tokens)
        self._parts = self._layout.columns // 4
        self._in_ints = shape.cpu.byte_dot or shape.cpu.short_dot

    def emit(self) -> None:
        lanes = self._lanes
        sums = [[lanes.variable(self._first(b, t)) for t in self._tokens] for b in self._blocks]
        if self._layout.is_grouped:
            self._by_group(sums)
        else:
            with lanes.count(self._at.vectors) as vector:
                self._add_vector(vector, sums)
        self._write(sums)

    def _first(self, block: int, token: int) -> Value:
        """Return what a sum begins with."""
        goes_on, lanes = self._shape.goes_on, self._lanes
        return lanes.floats(self._out(block, token)) if goes_on else lanes.no_floats()

    def _variables(self, start: Callable[[int], Value]) -> list[list[Value]]:
        """Return a variable per block and token."""
        return [[self._lanes.variable(start(t)) for t in self._tokens] for _ in self._blocks]

    def _add_vector(self, vector: Value, sums: list[list[Value]]) -> None:
        lanes, add = self._lanes, self._product()
        load = lanes.every_float if self._shape.scheme in FLOATING else lanes.every_int
        weights = [self._weights(vector, block) for block in self._blocks]
        if self._ahead is not None:
            lanes.fetch(lanes.at(self._ahead, vector, self._layout.vector_bytes), cache=2)
        for token in self._tokens:
            row = load(self._row(vector, token))
            for block in self._blocks:
                place = sums[block][token]
                lanes.write(add(lanes.read(place), weights[block], row), place)

    def _product(self) -> Callable[[Value, Value, Value], Value]:
        if self._shape.scheme in FLOATING:
            return lambda total, weights, row: self._lanes.fma(weights, row, total)
        return self._lanes.bf16_dot if self._shape.cpu.bf16_dot else self._widened

    def _widened(self, total: Value, weights: Value, row: Value) -> Value:
        """Add two products of bfloat16, which are the upper halves of float32."""
        lanes = self._lanes
        for column in (
            lambda pair: lanes.up(pair, 16),
            lambda pair: lanes.masked(pair, HIGH_HALF),
        ):
            total = lanes.fma(lanes.as_floats(column(weights)), lanes.as_floats(column(row)), total)
        return total

    def _by_group(self, sums: list[list[Value]]) -> None:
        lanes, shape = self._lanes, self._shape
        per_group = lanes.constant(GROUP // self._layout.columns)
        none = self._start(lanes.constant(0), 0)
        totals = [self._variables(lambda _: none) for _ in range(shape.spread)]
        at_once = (shape.spread // self._parts, 1) if shape.spread > 1 else (1,)
        with lanes.count(lanes.parts(self._at.vectors, per_group)) as group:
            first = lanes.product(group, per_group)
            self._begin(group, totals)
            left = lanes.subtract(self._at.vectors, first)
            for begin, count in stretches(lanes, lanes.least(per_group, left), at_once):
                for number in range(count):
                    vector = lanes.sum(lanes.sum(first, begin), lanes.constant(number))
                    self._add_bytes(vector, totals[number * self._parts :])
            self._gather(totals)
            self._add_group(group, totals[0], sums)

    def _begin(self, group: Value, totals: list[list[list[Value]]]) -> None:
        lanes = self._lanes
        starts = [self._start(group, token) for token in self._tokens]
        none = lanes.no_ints() if self._in_ints else lanes.no_floats()
        for number, some in enumerate(totals):
            for column in some:
                for token in self._tokens:
                    lanes.write(none if number else starts[token], column[token])

    def _start(self, group: Value, token: int) -> Value:
        """Begin below 0 by what the zero of the weights will add."""
        place = self._of_group(self._at.row_sums, group, token)
        start = self._lanes.times(self._lanes.every_int(place), -self._layout.zero)
        return start if self._in_ints else self._lanes.to_floats(start)

    def _add_bytes(self, vector: Value, totals: list[list[list[Value]]]) -> None:
        """Add one vector of each block: its parts, to the totals in turn."""
        lanes = self._lanes
        add = self._byte_product()
        stored = [self._weights(vector, block) for block in self._blocks]
        for part in range(self._parts):
            places = [self._row(vector, token) for token in self._tokens]
            rows = [lanes.every_int(lanes.sum(p, lanes.constant(4 * part))) for p in places]
            for block in self._blocks:
                weights = self._part(stored[block], part)
                for token in self._tokens:
                    place = totals[part % len(totals)][block][token]
                    lanes.write(add(lanes.read(place), weights, rows[token]), place)

    def _gather(self, totals: list[list[list[Value]]]) -> None:
        """Add the other totals to the first, exactly."""
        lanes = self._lanes
        add = lanes.plus if self._in_ints else lanes.add
        for some in totals[1:]:
            for column, other in zip(totals[0], some, strict=True):
                for place, more in zip(column, other, strict=True):
                    lanes.write(add(lanes.read(place), lanes.read(more)), place)

    def _part(self, stored: Value, part: int) -> Value:
        """Return four columns as bytes: int4 keeps four in the low nibbles, four in the high."""
        if self._shape.scheme is Scheme.INT8:
            return stored
        return self._lanes.masked(self._lanes.down(stored, 4 * part), _LOW_NIBBLES)

    def _byte_product(self) -> Callable[[Value, Value, Value], Value]:
        """Return what adds four products of bytes to each lane: int32, or float32 as exactly."""
        if self._shape.cpu.byte_dot:
            return self._lanes.byte_dot
        if not self._shape.cpu.short_dot:
            return self._by_bytes
        return self._by_shorts if self._shape.scheme is Scheme.INT8 else self._lanes.small_byte_dot

    def _by_shorts(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """Add the products of even bytes, then those of odd ones: pairs may not fit into int16."""
        lanes = self._lanes
        even = lanes.shorts_down(lanes.shorts_up(signed, 8), 8, signed=True)
        odd = lanes.shorts_down(signed, 8, signed=True)
        total = lanes.short_dot(total, lanes.masked(unsigned, _EVEN_BYTES), even)
        return lanes.short_dot(total, lanes.shorts_down(unsigned, 8), odd)

    def _by_bytes(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """Add four products byte by byte, in float32, which holds a group's sum exactly."""
        lanes = self._lanes
        for byte in range(4):
            weight = lanes.masked(lanes.down(unsigned, 8 * byte), 0xFF)
            row = lanes.down(lanes.up(signed, 24 - 8 * byte), 24, signed=True)
            total = lanes.fma(lanes.to_floats(weight), lanes.to_floats(row), total)
        return total

    def _add_group(self, group: Value, totals: list[list[Value]], sums: list[list[Value]]) -> None:
        lanes = self._lanes
        places = [self._of_group(self._at.row_scales, group, token) for token in self._tokens]
        rows = [lanes.every_float(place) for place in places]
        for block in self._blocks:
            scales = lanes.at(self._at.scales, lanes.constant(block), self._at.scales_stride)
            scale = lanes.floats(lanes.at(scales, group, VECTOR_BYTES))
            for token in self._tokens:
                total = lanes.read(totals[block][token])
                exact = lanes.to_floats(total) if self._in_ints else total
                place = sums[block][token]
                worth = lanes.multiply(scale, rows[token])
                lanes.write(lanes.fma(exact, worth, lanes.read(place)), place)

    def _weights(self, vector: Value, block: int) -> Value:
        lanes = self._lanes
        first = lanes.at(self._at.weights, lanes.constant(block), self._at.weights_stride)
        place = lanes.at(first, vector, self._layout.vector_bytes)
        if self._shape.scheme is Scheme.FLOAT16:
            return lanes.halves(place)
        return lanes.floats(place) if self._shape.scheme is Scheme.FLOAT32 else lanes.ints(place)

    def _row(self, vector: Value, token: int) -> Value:
        lanes = self._lanes
        first = lanes.at(self._at.rows, lanes.constant(token), self._at.rows_stride)
        return lanes.at(first, vector, self._layout.columns * self._layout.row_bytes)

    def _of_group(self, numbers: Value, group: Value, token: int) -> Value:
        lanes = self._lanes
        return lanes.at(lanes.at(numbers, lanes.constant(token), self._at.groups_stride), group, 4)

    def _write(self, sums: list[list[Value]]) -> None:
        lanes = self._lanes
        for token in self._tokens:
            for block in self._blocks:
                place, total = self._out(block, token), lanes.read(sums[block][token])
                if not self._shape.goes_on:
                    added = lanes.add(lanes.floats(place), total)
                    total = lanes.chosen(self._at.adds, added, total)
                lanes.store(total, place)

    def _out(self, block: int, token: int) -> Value:
        lanes = self._lanes
        row = lanes.at(self._at.out, lanes.constant(token), self._at.out_stride)
        return lanes.at(row, lanes.constant(block), VECTOR_BYTES)
