"""Paged-attention microkernels: scores, softmax and weighted values of one chunk of four KV pages.

The sum of one query has one accumulator and runs in the order of the components (scores) or tokens
(values), whatever the tile. Its bits depend neither on how many queries are computed together nor
on whether pages are read in place or gathered first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.extending import intrinsic

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.compiled.layer_operations import emit_cap
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value, emit_tiles, require_literal
from expertctl.engine.kernels.packed_format import LANES

PAGES_PER_CHUNK = 4
"""Pages per chunk; all keys of a chunk share one softmax correction."""
CHUNK_TOKENS = PAGES_PER_CHUNK * LANES
"""Tokens in a chunk."""
CHUNK_BYTES = CHUNK_TOKENS * 4
"""Bytes of the scores of one query: [pages][16] float32."""
MIN_SCORE = -1e30
"""The running maximum of a query that has seen no key yet."""
_MASKED_WEIGHT = -1.0
"""Marks a token that a query must not see; real weights are never negative."""

GATHER_VECTORS = 128
"""Maximum number of vectors of each page that one gather copies."""
GATHER_PAGE_BYTES = GATHER_VECTORS * VECTOR_BYTES
"""Stride between the pages of the gather buffer, in bytes."""

_QUERIES, _BLOCKS = (6, 4, 2, 1), (4, 1)
"""Tile sizes, largest first; the sums of the largest tile stay in registers."""
_NARROW_HEIGHTS = {6: 1, 4: 1, 2: 2, 1: 4}
"""Pages or blocks per tile, by its number of queries, without 512-bit registers: a sum takes two.
"""


@intrinsic(prefer_literal=True)
def emit_page_scores(_context: Any, half: Any, *operands: Any) -> Any:
    """Compute the products of queries with the keys of four pages; see `_ScoreEmitter`.

    ``half`` is a compile-time constant: whether pages hold float16.
    """
    return _make_intrinsic(_ScoreEmitter, half, operands)


@intrinsic(prefer_literal=True)
def emit_page_values(_context: Any, half: Any, *operands: Any) -> Any:
    """Scale the output by corrections and add weighted values of pages; see `_ValueEmitter`."""
    return _make_intrinsic(_ValueEmitter, half, operands)


@intrinsic(prefer_literal=True)
def emit_page_gather(_context: Any, half: Any, *operands: Any) -> Any:
    """Copy some vectors of four pages, widened to float32; see `_GatherEmitter`."""
    return _make_intrinsic(_GatherEmitter, half, operands)


@intrinsic(prefer_literal=True)
def softmax_scores(
    _context: Any, capped: Any, scores: Any, low: Any, high: Any, scale: Any, cap: Any,
    largest: Any, totals: Any,
) -> Any:  # fmt: skip
    """Replace the scores of a chunk with softmax weights; return the correction for earlier sums.

    Only keys ``low`` to ``high`` of the chunk (inclusive) count; the others get `_MASKED_WEIGHT`.
    Scaled scores are limited by ``cap`` if ``capped``, a compile-time constant, is not 0.
    ``largest`` is the address of the running maximum, ``totals`` that of sixteen partial sums of
    weights.
    """
    is_capped = bool(require_literal(capped, "whether scores are capped"))

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _emit_softmax(SimdBuilder(builder), is_capped, *values[1:])

    kind, number = types.int64, types.float32
    return number(capped, kind, kind, kind, number, number, kind, kind), emit


@intrinsic
def vector_sum(_context: Any, address: Any) -> Any:
    """Return the sum of sixteen float32."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = SimdBuilder(builder)
        return lanes.extract_first(lanes.sum_lanes(lanes.load_floats(values[0])))

    return types.float32(types.int64), emit


def _make_intrinsic(part: Any, half: Any, operands: Any) -> Any:
    """Return the signature and the code generator of an intrinsic for one emitter class."""
    is_half = bool(require_literal(half, "whether pages hold float16"))

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        found = (builder.extract_value(values[1], place) for place in range(len(operands)))
        part(SimdBuilder(builder), is_half, *found).emit()
        return context.get_dummy_value()

    rest = types.StarArgTuple.from_types((types.int64,) * len(operands))
    return types.void(half, rest), emit


def _emit_softmax(
    lanes: SimdBuilder,
    is_capped: bool,
    scores: Value,
    low: Value,
    high: Value,
    scale: Value,
    cap: Value,
    largest: Value,
    sums: Value,
) -> Value:
    nothing, factor = lanes.float_constant(MIN_SCORE), lanes.splat_float(scale)
    pages = range(PAGES_PER_CHUNK)
    places = [lanes.offset(scores, lanes.int_constant(page), VECTOR_BYTES) for page in pages]
    seen = [lanes.range_mask(low, high, page * LANES) for page in pages]
    found = [lanes.multiply_floats(lanes.load_floats(place), factor) for place in places]
    if is_capped:
        found = [emit_cap(lanes, each, lanes.splat_float(cap)) for each in found]
    found = [lanes.select_lanes(*each, nothing) for each in zip(seen, found, strict=True)]
    before = lanes.broadcast_float(largest)
    top = lanes.splat_float(lanes.reduce_max_floats(_lanewise_max(lanes, [before, *found])))
    correction = lanes.select_lanes(
        lanes.less_than(nothing, before),
        lanes.exp_floats(lanes.subtract_floats(before, top)),
        lanes.float_constant(0),
    )
    total = lanes.multiply_floats(lanes.load_floats(sums), correction)
    for place, mask, score in zip(places, seen, found, strict=True):
        weight = lanes.exp_floats(lanes.subtract_floats(score, top))
        lanes.store_floats(
            lanes.select_lanes(mask, weight, lanes.float_constant(_MASKED_WEIGHT)), place
        )
        total = lanes.add_floats(total, lanes.select_lanes(mask, weight, lanes.float_constant(0)))
    lanes.store_floats(total, sums)
    lanes.store_first_float(top, largest)
    return lanes.extract_first(correction)


def _lanewise_max(lanes: SimdBuilder, vectors: list[Value]) -> Value:
    """Return the maximum of each lane; NaN is skipped here but becomes the weight of its key."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = lanes.select_lanes(lanes.less_than(result, vector), vector, result)
    return result


@dataclass(frozen=True, slots=True)
class _PageReader:
    """Loads sixteen components of a page at a time, widened to float32."""

    lanes: SimdBuilder
    is_half: bool

    def load(self, start: Value, vector: Value) -> Value:
        lanes = self.lanes
        place = self.at(start, vector)
        return lanes.load_halves(place) if self.is_half else lanes.load_floats(place)

    def at(self, start: Value, vector: Value) -> Value:
        return self.lanes.offset(start, vector, VECTOR_BYTES // 2 if self.is_half else VECTOR_BYTES)


class _Accumulators:
    """The accumulators of a tile, [queries][vectors]."""

    def __init__(self, lanes: SimdBuilder, vectors: int, queries: int) -> None:
        self._lanes = lanes
        self.queries = queries
        self._places = [
            [lanes.create_variable(lanes.zero_floats()) for _ in range(vectors)]
            for _ in range(queries)
        ]

    def initialise(self, start: Callable[[int, int], Value]) -> None:
        for query, column in enumerate(self._places):
            for number, place in enumerate(column):
                self._lanes.store_variable(start(query, number), place)

    def accumulate(self, query: int, vectors: list[Value], factor: Value) -> None:
        lanes = self._lanes
        for vector, place in zip(vectors, self._places[query], strict=True):
            lanes.store_variable(lanes.fma(vector, factor, lanes.load_variable(place)), place)

    def accumulate_masked(self, query: int, vectors: list[Value], factor: Value) -> None:
        """Accumulate, except where a negative factor masks the vectors for this query."""
        lanes = self._lanes
        unseen = lanes.less_than(factor, lanes.zero_floats())
        for vector, place in zip(vectors, self._places[query], strict=True):
            before = lanes.load_variable(place)
            lanes.store_variable(
                lanes.select_lanes(unseen, before, lanes.fma(vector, factor, before)), place
            )

    def store(self, target: Callable[[int, int], Value]) -> None:
        for query, column in enumerate(self._places):
            for number, place in enumerate(column):
                self._lanes.store_floats(self._lanes.load_variable(place), target(query, number))


def _emit_tile_heights(lanes: SimdBuilder, count: int, queries: int) -> Iterator[tuple[Value, int]]:
    """Yield the first index and the size of each tile over ``count`` pages or blocks."""
    high = count if get_host_cpu().has_512_bit_registers else min(_NARROW_HEIGHTS[queries], count)
    with lanes.loop(lanes.int_constant(count // high)) as turn:
        yield lanes.multiply_int(turn, lanes.int_constant(high)), high


@dataclass(frozen=True, slots=True)
class _GatherEmitter:
    """Computes ``out[pages][128][16]``: ``count`` vectors of each of four pages, from ``first`` on.

    ``pages`` is the address of four page addresses, to which ``offset`` is added. The same vectors
    of the four addresses at ``prefetch_pages``, plus ``prefetch_offset``, are prefetched.
    """

    lanes: SimdBuilder
    is_half: bool
    pages: Value
    offset: Value
    prefetch_pages: Value
    prefetch_offset: Value
    out: Value
    first: Value
    count: Value

    def emit(self) -> None:
        lanes, pages = self.lanes, _PageReader(self.lanes, self.is_half)
        with lanes.loop(lanes.int_constant(PAGES_PER_CHUNK)) as page:
            start = lanes.add_int(lanes.load_int64(lanes.offset(self.pages, page, 8)), self.offset)
            near = lanes.add_int(
                lanes.load_int64(lanes.offset(self.prefetch_pages, page, 8)), self.prefetch_offset
            )
            out = lanes.offset(self.out, page, GATHER_PAGE_BYTES)
            with lanes.loop(self.count) as number:
                vector = lanes.add_int(self.first, number)
                loaded = pages.load(start, vector)
                lanes.store_floats(loaded, lanes.offset(out, number, VECTOR_BYTES))
                lanes.prefetch(pages.at(near, vector))


@dataclass(frozen=True, slots=True)
class _ScoreEmitter:
    """Computes ``out[queries][4][16]``: products of float32 queries with the keys of four pages.

    ``pages`` is the address of four page addresses, to which ``offset`` is added. ``dim``
    components are multiplied; the products are added to ``out`` if ``adds`` is not 0. For small
    tiles, the bytes at ``prefetch_distance`` after the keys are prefetched.
    """

    lanes: SimdBuilder
    is_half: bool
    pages: Value
    offset: Value
    prefetch_distance: Value
    rows: Value
    stride: Value
    out: Value
    dim: Value
    queries: Value
    adds: Value

    def emit(self) -> None:
        lanes = self.lanes
        for first, size in emit_tiles(lanes, self.queries, _QUERIES):
            for page, high in _emit_tile_heights(lanes, PAGES_PER_CHUNK, size):
                self._tile(page, high, first, size)

    def _tile(self, page: Value, height: int, first: Value, size: int) -> None:
        lanes = self.lanes
        at = lanes.offset(self.pages, page, 8)
        pages = [
            lanes.load_int64(lanes.offset(at, lanes.int_constant(number), 8))
            for number in range(height)
        ]
        starts = [lanes.add_int(page, self.offset) for page in pages]
        out = lanes.offset(lanes.offset(self.out, first, CHUNK_BYTES), page, VECTOR_BYTES)

        def place(query: int, number: int) -> Value:
            offset = query * CHUNK_BYTES + number * VECTOR_BYTES
            return lanes.add_int(out, lanes.int_constant(offset))

        def before(query: int, number: int) -> Value:
            found = lanes.load_floats(place(query, number))
            return lanes.select_int(self.adds, found, lanes.zero_floats())

        sums = _Accumulators(lanes, height, size)
        sums.initialise(before)
        with lanes.loop(self.dim) as k:
            self._add_column(starts, k, lanes.offset(self.rows, first, self.stride), sums)
        sums.store(place)

    def _add_column(self, starts: list[Value], k: Value, row: Value, sums: _Accumulators) -> None:
        lanes, pages = self.lanes, _PageReader(self.lanes, self.is_half)
        keys = [pages.load(start, k) for start in starts]
        for start in starts if sums.queries < _QUERIES[0] else ():
            lanes.prefetch(lanes.add_int(pages.at(start, k), self.prefetch_distance))
        for query in range(sums.queries):
            place = lanes.offset(lanes.offset(row, lanes.int_constant(query), self.stride), k, 4)
            sums.accumulate(query, keys, lanes.broadcast_float(place))


@dataclass(frozen=True, slots=True)
class _ValueEmitter:
    """Computes ``out[queries][blocks][16] = corrections * out + weights * values`` for pages.

    ``pages`` is the address of page addresses, to which ``offset`` is added; ``weights``
    [queries][4][16] start at the first of these pages; ``corrections`` is float32 [queries]. The
    first query sees the values ``low`` to ``high``, counted from the first of these pages; the
    range of each further query starts ``query_step`` later. Values that a query does not see may be
    anything, even NaN: a page that all queries of a tile see completely is simply accumulated, any
    other skips the masked weights. Nothing at or after ``tokens`` is read. The page addresses of a
    chunk are followed by those of the next chunk, whose keys, ``key_distance`` bytes from its
    values, are prefetched.
    """

    lanes: SimdBuilder
    is_half: bool
    pages: Value
    tokens: Value
    low: Value
    high: Value
    query_step: Value
    offset: Value
    key_distance: Value
    weights: Value
    corrections: Value
    out: Value
    stride: Value
    blocks: Value
    queries: Value

    def emit(self) -> None:
        lanes = self.lanes
        for block, high in emit_tiles(lanes, self.blocks, _BLOCKS):
            for first, size in emit_tiles(lanes, self.queries, _QUERIES):
                for part, most in _emit_tile_heights(lanes, high, size):
                    self._tile(lanes.add_int(block, part), most, first, size)

    def _tile(self, block: Value, height: int, first: Value, size: int) -> None:
        lanes = self.lanes
        out = lanes.offset(lanes.offset(self.out, block, VECTOR_BYTES), first, self.stride)
        corrections = lanes.offset(self.corrections, first, 4)

        def place(query: int, number: int) -> Value:
            row = lanes.offset(out, lanes.int_constant(query), self.stride)
            return lanes.add_int(row, lanes.int_constant(number * VECTOR_BYTES))

        def corrected(query: int, number: int) -> Value:
            factor = lanes.broadcast_float(lanes.offset(corrections, lanes.int_constant(query), 4))
            return lanes.multiply_floats(lanes.load_floats(place(query, number)), factor)

        sums = _Accumulators(lanes, height, size)
        sums.initialise(corrected)
        self._add_values(lanes.multiply_int(block, lanes.int_constant(LANES)), first, sums, height)
        sums.store(place)

    def _add_values(self, vector: Value, first: Value, sums: _Accumulators, height: int) -> None:
        """Add the values of all pages that any query of the tile sees."""
        lanes, pages = self.lanes, _PageReader(self.lanes, self.is_half)
        sixteen = lanes.int_constant(LANES)
        last = lanes.add_int(first, lanes.int_constant(sums.queries - 1))
        seen_by_all = (
            lanes.offset(self.low, last, self.query_step),
            lanes.offset(self.high, first, self.query_step),
        )
        end = lanes.add_int(lanes.offset(self.high, last, self.query_step), lanes.int_constant(1))
        end = lanes.max_int(lanes.min_int(end, self.tokens), lanes.int_constant(0))
        weights = lanes.offset(self.weights, first, CHUNK_BYTES)
        with lanes.loop(lanes.ceil_divide_int(end, sixteen)) as page:
            begin = lanes.multiply_int(page, sixteen)
            count = lanes.min_int(lanes.subtract_int(end, begin), sixteen)
            at = lanes.offset(self.pages, page, 8)
            start = pages.at(lanes.add_int(lanes.load_int64(at), self.offset), vector)
            following = lanes.load_int64(lanes.add_int(at, lanes.int_constant(PAGES_PER_CHUNK * 8)))
            keys = lanes.add_int(lanes.add_int(following, self.offset), self.key_distance)
            keys = pages.at(keys, vector)
            weight = lanes.offset(weights, page, VECTOR_BYTES)
            whole = lanes.is_range_within(begin, lanes.add_int(begin, count), *seen_by_all)
            for add in lanes.emit_branches(whole, sums.accumulate, sums.accumulate_masked):
                with lanes.loop(count) as slot:
                    place = lanes.offset(weight, slot, 4)
                    self._add_value(pages.at(start, slot), height, place, sums, add)
                    self._prefetch_keys(pages.at(keys, slot), height, sums)

    def _add_value(
        self,
        start: Value,
        high: int,
        weight: Value,
        sums: _Accumulators,
        add: Callable[[int, list[Value], Value], None],
    ) -> None:
        lanes, pages = self.lanes, _PageReader(self.lanes, self.is_half)
        values = [pages.load(start, lanes.int_constant(number * LANES)) for number in range(high)]
        for query in range(sums.queries):
            place = lanes.add_int(weight, lanes.int_constant(query * CHUNK_BYTES))
            add(query, values, lanes.broadcast_float(place))

    def _prefetch_keys(self, start: Value, high: int, sums: _Accumulators) -> None:
        """Prefetch keys for small tiles, which are bound by memory."""
        lanes, pages = self.lanes, _PageReader(self.lanes, self.is_half)
        for number in range(high if sums.queries < _QUERIES[0] else 0):
            lanes.prefetch(pages.at(start, lanes.int_constant(number * LANES)))
