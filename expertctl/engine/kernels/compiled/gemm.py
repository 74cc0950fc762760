"""The GEMM microkernel: blocks of sixteen rows of a matrix times tokens, accumulated in registers.

The sum of one row and one token has one accumulator and runs over the columns from first to last,
whatever the tile: its bits do not depend on the rest of the batch. Integers are summed exactly
within a group of columns, then scaled, so the dot-product instruction and its substitutes agree bit
by bit, and a single token, which is bound by memory, has two accumulators within a group.

A panel (the blocks of a tile, four if the matrix has as many left) is read from memory for the
first tokens and from the second-level cache for the others. While a panel of floats is computed,
each tile prefetches one block of the next panel into that cache; otherwise every panel would start
by waiting for memory. If there are enough tokens, there are enough tiles for all blocks.

Without 512-bit registers a sum takes two or four registers, and a tile is one block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from numba import types
from numba.extending import intrinsic, register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.bf16_tiles import HIGH_HALF, Bf16TileEmitter, TileOperands
from expertctl.engine.kernels.compiled.compiler import CpuFeatures, get_host_cpu
from expertctl.engine.kernels.compiled.group_scales import (
    emit_group_scales,
    row_sum_factor,
    select_byte_product,
)
from expertctl.engine.kernels.compiled.simd import (
    SimdBuilder,
    Value,
    emit_even_tiles,
    emit_tiles,
    require_literal,
)
from expertctl.engine.kernels.packed_format import (
    FLOAT_SCHEMES,
    GROUP_SIZE,
    PANEL_BLOCKS,
    Scheme,
    VectorLayout,
)
from expertctl.engine.kernels.quantisation import FIXED_ZEROS, MINIMA

_SCHEMES = tuple(Scheme)
_LOW_NIBBLES, _ONES = 0x0F0F0F0F, 0x01010101
_NARROW_TOKENS = {True: (4, 2, 1), False: (6, 4, 1)}
"""Tokens per tile without 512-bit registers, largest first: for integers, for floats."""
_MIN_PREFETCH_TOKENS = 3
"""Minimum tokens of a tile that prefetches the next panel; smaller tiles are bound by memory."""
_ACCUMULATORS = 2
"""Accumulators of a single token within a group, so that no addition waits for the one before."""


def scheme_code(scheme: Scheme) -> int:
    """Return the compile-time constant that stands for a scheme."""
    return _SCHEMES.index(scheme)


def require_scheme(code: Any) -> Scheme:
    """Return the scheme that a compile-time constant stands for."""
    return _SCHEMES[require_literal(code, "the scheme")]


OPERANDS = len(TileOperands.__slots__)


@intrinsic(prefer_literal=True)
def gemm_panel(
    _context: Any, code: Any, portable: Any, blocks: Any, accumulates: Any, *operands: Any
) -> Any:
    """Compute some blocks for all tokens; arguments are four constants, then the `TileOperands`.

    ``portable`` not 0: use no instructions that only some processors have. ``accumulates`` not 0:
    sums of floats start from the values in ``out``.
    """
    constants = (code, portable, blocks, accumulates)
    without, high, on = (require_literal(each, "the shape of a panel") for each in constants[1:])
    scheme, cpu = require_scheme(code), _select_cpu(bool(without))

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        found = [builder.extract_value(values[4], place) for place in range(OPERANDS)]
        lanes, operands = SimdBuilder(builder), TileOperands(*found)
        for turn, first, tokens in _emit_token_tiles(lanes, operands.tokens, high, scheme, cpu):
            shape = _TileShape(scheme, high, tokens, cpu, accumulates=bool(on))
            _emit_tokens(lanes, shape, operands.from_token(lanes, first), turn)
        return context.get_dummy_value()

    rest = types.StarArgTuple.from_types((types.int64,) * OPERANDS)
    return types.void(*constants, rest), emit


def _emit_token_tiles(
    lanes: SimdBuilder, tokens: Value, blocks: int, scheme: Scheme, cpu: CpuFeatures
) -> Iterator[tuple[Value, Value, int]]:
    """Yield the number, the first token and the size of each tile.

    Each tile reads the panel again, so there are as few tiles as registers allow, of equal size,
    because a tile of one or two tokens waits for its sums. If there are enough tokens for one tile
    per block of the next panel, there are that many. Tiles of integers, whose code is longer, have
    three sizes.
    """
    layout = scheme.layout
    if cpu.has_512_bit_registers and not layout.is_grouped:
        each = lanes.int_constant(blocks)
        enough = lanes.divide_int(tokens, lanes.int_constant(_MIN_PREFETCH_TOKENS * blocks))
        fetching = lanes.select_int(enough, each, lanes.int_constant(0))
        fewest = lanes.ceil_divide_int(tokens, lanes.int_constant(layout.tile_tokens))
        several = lanes.max_int(fewest, fetching)
        yield from emit_even_tiles(lanes, tokens, parts=several, largest=layout.tile_tokens)
        return
    wide = cpu.has_512_bit_registers
    sizes = (layout.tile_tokens, 2, 1) if wide else _NARROW_TOKENS[layout.is_grouped]
    for first, size in emit_tiles(lanes, tokens, sizes):
        yield lanes.divide_int(first, lanes.int_constant(size)), first, size


def _next_panel_block(
    lanes: SimdBuilder, blocks: int, operands: TileOperands, turn: Value
) -> Value:
    """Return the address of the block of the next panel to prefetch; tiles take turns."""
    several = lanes.int_constant(blocks)
    whole = lanes.multiply_int(lanes.divide_int(turn, several), several)
    block = lanes.add_int(several, lanes.subtract_int(turn, whole))
    return lanes.offset(operands.weights, block, operands.weights_stride)


def _emit_tokens(
    lanes: SimdBuilder, shape: "_TileShape", operands: TileOperands, turn: Value
) -> None:
    """Emit one tile for some tokens, or one block after another.

    Blocks are separate for a single token with integers, because reading memory in order is faster
    than in four places at once; and where the sums of several blocks would not stay in registers.
    """
    alone = shape.tokens == 1
    if shape.scheme is Scheme.BFLOAT16 and not (alone or shape.cpu.has_512_bit_registers):
        Bf16TileEmitter(lanes, shape.blocks, shape.tokens, operands, shape.accumulates).emit()
        return
    apart = shape.scheme.layout.is_grouped if alone else not shape.cpu.has_512_bit_registers
    if apart:
        spread = _ACCUMULATORS if alone else 1
        with lanes.loop(lanes.int_constant(shape.blocks)) as block:
            one = replace(shape, blocks=1, spread=spread)
            _TileEmitter(lanes, one, operands.from_block(lanes, block)).emit()
    else:
        fetches = not shape.scheme.layout.is_grouped and shape.tokens >= _MIN_PREFETCH_TOKENS
        ahead = _next_panel_block(lanes, shape.blocks, operands, turn) if fetches else None
        _TileEmitter(lanes, shape, operands, ahead).emit()


def _select_cpu(portable: bool) -> CpuFeatures:
    return get_host_cpu().without_dot_instructions() if portable else get_host_cpu()


@dataclass(frozen=True, slots=True)
class _TileShape:
    scheme: Scheme
    blocks: int
    tokens: int
    cpu: CpuFeatures
    spread: int = 1
    """Accumulators of one block and token within a group."""
    accumulates: bool = False
    """Whether sums start from the values in ``out``."""


class _TileEmitter:
    """Emits one tile."""

    def __init__(
        self,
        lanes: SimdBuilder,
        shape: _TileShape,
        operands: TileOperands,
        ahead: Value | None = None,
    ) -> None:
        self._lanes, self._shape, self._at, self._ahead = lanes, shape, operands, ahead
        self._layout: VectorLayout = shape.scheme.layout
        self._blocks, self._tokens = range(shape.blocks), range(shape.tokens)
        self._parts = self._layout.columns // 4
        self._in_ints = shape.cpu.byte_dot or shape.cpu.short_dot
        self._byte_product = select_byte_product(lanes, shape.cpu, is_byte=self._parts == 1)

    def emit(self) -> None:
        lanes = self._lanes
        sums = [
            [lanes.create_variable(self._initial_sum(b, t)) for t in self._tokens]
            for b in self._blocks
        ]
        if self._layout.is_grouped:
            self._sum_groups(sums)
        else:
            with lanes.loop(self._at.vectors) as vector:
                self._add_vector(vector, sums)
        self._store_sums(sums)

    def _initial_sum(self, block: int, token: int) -> Value:
        if self._shape.accumulates:
            return self._lanes.load_floats(self._output_address(block, token))
        return self._lanes.zero_floats()

    def _create_variables(self, start: Callable[[int], Value]) -> list[list[Value]]:
        return [[self._lanes.create_variable(start(t)) for t in self._tokens] for _ in self._blocks]

    def _add_vector(self, vector: Value, sums: list[list[Value]]) -> None:
        lanes, add = self._lanes, self._select_product()
        load = lanes.broadcast_float if self._shape.scheme in FLOAT_SCHEMES else lanes.broadcast_int
        weights = [self._load_weights(vector, block) for block in self._blocks]
        if self._ahead is not None:
            lanes.prefetch(lanes.offset(self._ahead, vector, self._layout.vector_bytes), cache=2)
        for token in self._tokens:
            row = load(self._row_address(vector, token))
            for block in self._blocks:
                place = sums[block][token]
                lanes.store_variable(add(lanes.load_variable(place), weights[block], row), place)

    def _select_product(self) -> Callable[[Value, Value, Value], Value]:
        if self._shape.scheme in FLOAT_SCHEMES:
            return lambda total, weights, row: self._lanes.fma(weights, row, total)
        return self._lanes.bf16_dot if self._shape.cpu.bf16_dot else self._add_bf16_products

    def _add_bf16_products(self, total: Value, weights: Value, row: Value) -> Value:
        """Add two products of bfloat16, which are the upper halves of float32."""
        lanes = self._lanes
        for column in (
            lambda pair: lanes.shift_left(pair, 16),
            lambda pair: lanes.mask_ints(pair, HIGH_HALF),
        ):
            a, b = (lanes.bitcast_to_floats(column(each)) for each in (weights, row))
            total = lanes.fma(a, b, total)
        return total

    def _sum_groups(self, sums: list[list[Value]]) -> None:
        lanes, per_group = self._lanes, GROUP_SIZE // self._layout.columns
        none = lanes.zero_ints() if self._in_ints else lanes.zero_floats()
        totals = [self._create_variables(lambda _: none) for _ in range(self._shape.spread)]
        whole = lanes.divide_int(self._at.vectors, lanes.int_constant(per_group))
        with lanes.loop(whole) as group:
            first = lanes.multiply_int(group, lanes.int_constant(per_group))
            for half in range(self._layout.halves):
                parts = range(per_group)[half * per_group // self._layout.halves :]
                vectors = [
                    lanes.add_int(first, lanes.int_constant(number))
                    for number in parts[: per_group // self._layout.halves]
                ]
                self._reset_totals(group, totals, vectors)
                for number, vector in enumerate(vectors):
                    self._add_bytes(vector, totals, number)
                self._merge_totals(totals)
                self._add_group(group, totals[0], sums, half=half)
        if self._layout.halves > 1:
            return  # columns fill groups
        first = lanes.multiply_int(whole, lanes.int_constant(per_group))
        left = lanes.subtract_int(self._at.vectors, first)
        with lanes.loop(lanes.min_int(left, lanes.int_constant(1))):
            self._reset_totals(whole, totals[:1], ())
            with lanes.loop(left) as number:
                self._add_bytes(lanes.add_int(first, number), totals[:1], 0)
            self._add_group(whole, totals[0], sums)

    def _reset_totals(
        self, group: Value, totals: list[list[list[Value]]], vectors: Sequence[Value]
    ) -> None:
        lanes = self._lanes
        starts = [self._initial_total(group, token, vectors) for token in self._tokens]
        none = lanes.zero_ints() if self._in_ints else lanes.zero_floats()
        for number, some in enumerate(totals):
            for column in some:
                for token in self._tokens:
                    lanes.store_variable(none if number else starts[token], column[token])

    def _initial_total(self, group: Value, token: int, vectors: Sequence[Value]) -> Value:
        """Start below 0 by what a fixed zero point of the weights, stored unsigned, will add."""
        lanes, zero = self._lanes, FIXED_ZEROS.get(self._shape.scheme)
        if zero is None:
            return lanes.zero_ints() if self._in_ints else lanes.zero_floats()
        if self._layout.halves > 1:
            return self._initial_half_total(vectors, token, zero)
        place = self._group_address(self._at.row_sums, group, token)
        start = lanes.scale_ints(lanes.broadcast_int(place), -zero)
        return start if self._in_ints else lanes.convert_to_floats(start)

    def _initial_half_total(self, vectors: Sequence[Value], token: int, zero: int) -> Value:
        """Do so for half a group; its activations are summed here, as only groups have sums."""
        lanes, add, ones = self._lanes, self._byte_product, self._lanes.int_lanes(_ONES)
        total = lanes.zero_ints() if self._in_ints else lanes.zero_floats()
        for vector in vectors:
            place = self._row_address(vector, token)
            for part in range(self._parts):
                address = lanes.add_int(place, lanes.int_constant(4 * part))
                total = add(total, ones, lanes.broadcast_int(address))
        if self._in_ints:
            return lanes.scale_ints(total, -zero)
        return lanes.multiply_floats(total, lanes.float_constant(-float(zero)))

    def _add_bytes(self, vector: Value, totals: list[list[list[Value]]], number: int) -> None:
        """Add one vector of each block, the ``number``-th of a group; totals take turns."""
        lanes = self._lanes
        add = self._byte_product
        stored = [self._load_weights(vector, block) for block in self._blocks]
        for part in range(self._parts):
            places = [self._row_address(vector, token) for token in self._tokens]
            rows = [
                lanes.broadcast_int(lanes.add_int(p, lanes.int_constant(4 * part))) for p in places
            ]
            some = totals[(number * self._parts + part) % len(totals)]
            for block in self._blocks:
                weights = self._extract_bytes(stored[block], vector, block, part)
                for token in self._tokens:
                    place = some[block][token]
                    total = add(lanes.load_variable(place), weights, rows[token])
                    lanes.store_variable(total, place)

    def _merge_totals(self, totals: list[list[list[Value]]]) -> None:
        """Add the other totals to the first, exactly."""
        lanes = self._lanes
        add = lanes.add_int if self._in_ints else lanes.add_floats
        for some in totals[1:]:
            for column, other in zip(totals[0], some, strict=True):
                for place, more in zip(column, other, strict=True):
                    total = add(lanes.load_variable(place), lanes.load_variable(more))
                    lanes.store_variable(total, place)

    def _extract_bytes(self, stored: Value, vector: Value, block: int, part: int) -> Value:
        """Return four columns as bytes; int4 has four in the low nibbles and four in the high.

        Further bits of the four follow the nibbles, one plane after the other.
        """
        lanes = self._lanes
        if self._parts == 1:
            return stored
        found = lanes.mask_ints(lanes.shift_right(stored, 4 * part), _LOW_NIBBLES)
        for plane in range(self._layout.bit_planes):
            begin = self._vector_address(vector, block)
            offset = VECTOR_BYTES + 16 * plane + 8 * part
            bits = lanes.add_int(begin, lanes.int_constant(offset))
            found = lanes.or_ints(found, lanes.load_bits(bits, 16 << plane))
        return found

    def _add_group(
        self, group: Value, totals: list[list[Value]], sums: list[list[Value]], *, half: int = 0
    ) -> None:
        """Scale the sums of a group.

        With a zero point, its product with the sum of the activations is subtracted first; both
        are multiples of a power of two, so the difference is exact, too. A minimum is multiplied
        by that sum and added to the scaled one.
        """
        lanes, factor = self._lanes, row_sum_factor(self._shape.scheme)
        places = [self._group_address(self._at.row_scales, group, token) for token in self._tokens]
        rows = [lanes.broadcast_float(place) for place in places]
        if factor is not None:
            places = [self._group_address(self._at.row_sums, group, t) for t in self._tokens]
            each = (lanes.convert_to_floats(lanes.broadcast_int(place)) for place in places)
            unit = lanes.float_constant(factor)
            row_sums = [lanes.multiply_floats(total, unit) for total in each]
        for block in self._blocks:
            number = lanes.int_constant(block)
            scales = lanes.offset(self._at.scales, number, self._at.scales_stride)
            scale, other = emit_group_scales(lanes, self._shape.scheme, scales, group, half=half)
            for token in self._tokens:
                total = lanes.load_variable(totals[block][token])
                exact = lanes.convert_to_floats(total) if self._in_ints else total
                place = sums[block][token]
                before = lanes.load_variable(place)
                if other is not None and self._shape.scheme in MINIMA:
                    scaled = lanes.multiply_floats(scale, exact)
                    added = lanes.fma(other, row_sums[token], scaled)
                    lanes.store_variable(lanes.fma(added, rows[token], before), place)
                    continue
                if other is not None:
                    exact = lanes.fma(other, row_sums[token], exact)
                worth = lanes.multiply_floats(scale, rows[token])
                lanes.store_variable(lanes.fma(exact, worth, before), place)

    def _load_weights(self, vector: Value, block: int) -> Value:
        lanes, place = self._lanes, self._vector_address(vector, block)
        if self._shape.scheme is Scheme.FLOAT16:
            return lanes.load_halves(place)
        load = lanes.load_floats if self._shape.scheme is Scheme.FLOAT32 else lanes.load_ints
        return load(place)

    def _vector_address(self, vector: Value, block: int) -> Value:
        lanes = self._lanes
        first = lanes.offset(self._at.weights, lanes.int_constant(block), self._at.weights_stride)
        return lanes.offset(first, vector, self._layout.vector_bytes)

    def _row_address(self, vector: Value, token: int) -> Value:
        lanes = self._lanes
        first = lanes.offset(self._at.rows, lanes.int_constant(token), self._at.rows_stride)
        return lanes.offset(first, vector, self._layout.columns * self._layout.row_bytes)

    def _group_address(self, numbers: Value, group: Value, token: int) -> Value:
        lanes = self._lanes
        first = lanes.offset(numbers, lanes.int_constant(token), self._at.groups_stride)
        return lanes.offset(first, group, 4)

    def _store_sums(self, sums: list[list[Value]]) -> None:
        lanes = self._lanes
        for token in self._tokens:
            for block in self._blocks:
                place = self._output_address(block, token)
                total = lanes.load_variable(sums[block][token])
                if not self._shape.accumulates:
                    added = lanes.add_floats(lanes.load_floats(place), total)
                    total = lanes.select_int(self._at.adds, added, total)
                lanes.store_floats(total, place)

    def _output_address(self, block: int, token: int) -> Value:
        lanes = self._lanes
        row = lanes.offset(self._at.out, lanes.int_constant(token), self._at.out_stride)
        return lanes.offset(row, lanes.int_constant(block), VECTOR_BYTES)


@cache
def gemm_blocks_function(scheme: Scheme, *, portable: bool) -> Any:
    """Return the compiled-code function that computes blocks of whole matrices of a scheme.

    ``wide`` is the stride in bytes between the scales of two tokens. If ``adds`` is not 0, it adds
    to the values in ``out``.
    """
    code, simple, vector_bytes = scheme_code(scheme), int(portable), scheme.layout.vector_bytes
    scales_bytes = scheme.layout.scales_bytes

    @register_jitable
    def strips(
        data: Any, scales: Any, block: Any, end: Any, vectors: Any, groups: Any,
        rows: Any, rows_stride: Any, row_scales: Any, row_sums: Any, wide: Any,
        out: Any, out_stride: Any, tokens: Any, adds: Any,
    ) -> None:  # fmt: skip
        high, high_scales = vectors * vector_bytes, groups * scales_bytes
        while block + PANEL_BLOCKS <= end:
            gemm_panel(
                code, simple, PANEL_BLOCKS, 0,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += PANEL_BLOCKS
        while block < end:
            gemm_panel(
                code, simple, 1, 0,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += 1

    return strips


@cache
def gemm_panel_function(scheme: Scheme, *, portable: bool, accumulates: bool = False) -> Any:
    """Return the compiled-code function for the first blocks of a matrix, or some of its columns.

    With ``accumulates``, each sum starts from the value in ``out``, the sum of the columns before.
    ``high`` and ``high_scales`` are the strides between blocks in bytes; ``vectors`` counts those
    of the columns. The other arguments are those of `gemm_blocks_function`.
    """
    code, simple, on = scheme_code(scheme), int(portable), int(accumulates)

    @register_jitable
    def spans(
        data: Any, high: Any, scales: Any, high_scales: Any, blocks: Any, vectors: Any,
        rows: Any, rows_stride: Any, row_scales: Any, row_sums: Any, wide: Any,
        out: Any, out_stride: Any, tokens: Any, adds: Any,
    ) -> None:  # fmt: skip
        block = 0
        while block + PANEL_BLOCKS <= blocks:
            gemm_panel(
                code, simple, PANEL_BLOCKS, on,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += PANEL_BLOCKS
        while block < blocks:
            gemm_panel(
                code, simple, 1, on,
                data + block * high, high, scales + block * high_scales, high_scales,
                rows, rows_stride, row_scales, row_sums, wide,
                out + block * VECTOR_BYTES, out_stride, vectors, tokens, adds,
            )  # fmt: skip
            block += 1

    return spans
