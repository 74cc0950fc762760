"""What attention does with four pages: scores of their keys, softmax, and the sum of values.

A sum of one query has one accumulator and runs in the order of its numbers or tokens, whatever the
tile: its bits do not depend on how many queries are computed together, nor on whether pages are
read where they are or gathered before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from expertctl.engine.kernels.cpu import host_cpu
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes, Value
from expertctl.engine.kernels.stretches import stretches

TOGETHER = 4
"""Pages of a chunk, whose keys share a correction of the softmax."""
CHUNK = TOGETHER * LANES
"""Tokens in a chunk."""
CHUNK_BYTES = CHUNK * 4
"""Bytes of the scores of one query: [pages][16] float32."""
NOTHING = -1e30
"""The largest score of a query that has seen no key."""
_UNSEEN = -1.0
"""The weight of a token that a query does not see; weights of seen ones are never negative."""

GATHERED = 128
"""Vectors of each page that are gathered at once, at most."""
GATHERED_BYTES = GATHERED * VECTOR_BYTES
"""Bytes from what is gathered of one page to that of the next."""

_QUERIES, _BLOCKS = (6, 4, 2, 1), (4, 1)
"""Sizes of tiles; the largest sums stay in registers."""
_NARROW_HEIGHTS = {6: 1, 4: 1, 2: 2, 1: 4}
"""Pages or blocks of a tile, by its queries, where registers are narrow: a sum takes two."""


@intrinsic(prefer_literal=True)
def score_pages(_context: Any, half: Any, *operands: Any) -> Any:
    """Write the products of queries with the keys of four pages; see `_Scoring`.

    ``half`` is a constant: whether pages hold float16.
    """
    return _emitted(_Scoring, half, operands)


@intrinsic(prefer_literal=True)
def add_pages(_context: Any, half: Any, *operands: Any) -> Any:
    """Multiply sums by their corrections and add weighted values of pages; see `_Adding`."""
    return _emitted(_Adding, half, operands)


@intrinsic(prefer_literal=True)
def gather_pages(_context: Any, half: Any, *operands: Any) -> Any:
    """Copy some vectors of four pages, widened to float32; see `_Gathering`."""
    return _emitted(_Gathering, half, operands)


@intrinsic
def weigh_scores(
    _context: Any, scores: Any, low: Any, high: Any, scale: Any, largest: Any, totals: Any
) -> Any:
    """Turn the scores of a chunk into weights; return what earlier weights are worth now.

    Only keys from ``low`` to ``high`` of the chunk count, the others are marked. ``largest`` is the
    address of the largest score so far, ``totals`` that of sixteen sums of weights.
    """

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _weigh(Lanes(builder), *values)

    kind = types.int64
    return types.float32(kind, kind, kind, types.float32, kind, kind), emit


@intrinsic
def total_at(_context: Any, address: Any) -> Any:
    """Return the sum of sixteen float32."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = Lanes(builder)
        return lanes.across_sum(lanes.floats(values[0]))

    return types.float32(types.int64), emit


def _emitted(part: Any, half: Any, operands: Any) -> Any:
    """Return what an intrinsic of a part of attention consists of: its types and its emitter."""
    is_half = _constant(half)

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        found = (builder.extract_value(values[1], place) for place in range(len(operands)))
        part(Lanes(builder), is_half, *found).emit()
        return context.get_dummy_value()

    return types.void(half, _integers(len(operands))), emit


def _constant(half: Any) -> bool:
    if not isinstance(half, types.IntegerLiteral):
        raise RequireLiteralValue("the numbers of pages are a constant")
    return bool(half.literal_value)


def _integers(count: int) -> Any:
    return types.StarArgTuple.from_types((types.int64,) * count)


def _weigh(
    lanes: Lanes, scores: Value, low: Value, high: Value, scale: Value, largest: Value, sums: Value
) -> Value:
    nothing, factor = lanes.every(NOTHING), lanes.splat(scale)
    places = [lanes.at(scores, lanes.constant(page), VECTOR_BYTES) for page in range(TOGETHER)]
    seen = [lanes.between(low, high, page * LANES) for page in range(TOGETHER)]
    found = [lanes.multiply(lanes.floats(place), factor) for place in places]
    found = [lanes.where(mask, score, nothing) for mask, score in zip(seen, found, strict=True)]
    before = lanes.every_float(largest)
    top = lanes.splat(lanes.across_largest(_largest(lanes, [before, *found])))
    correction = lanes.where(
        lanes.less(nothing, before), lanes.exponential(lanes.less_by(before, top)), lanes.every(0)
    )
    total = lanes.multiply(lanes.floats(sums), correction)
    for place, mask, score in zip(places, seen, found, strict=True):
        weight = lanes.exponential(lanes.less_by(score, top))
        lanes.store(lanes.where(mask, weight, lanes.every(_UNSEEN)), place)
        total = lanes.add(total, lanes.where(mask, weight, lanes.every(0)))
    lanes.store(total, sums)
    lanes.store_first(top, largest)
    return lanes.first(correction)


def _largest(lanes: Lanes, vectors: list[Value]) -> Value:
    """Return the largest of each lane; NaN is skipped, but becomes the weight of its key."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = lanes.where(lanes.less(result, vector), vector, result)
    return result


@dataclass(frozen=True, slots=True)
class _Pages:
    """Some numbers of pages, sixteen of them at a time, widened to float32."""

    lanes: Lanes
    is_half: bool

    def load(self, start: Value, vector: Value) -> Value:
        lanes = self.lanes
        place = self.at(start, vector)
        return lanes.halves(place) if self.is_half else lanes.floats(place)

    def at(self, start: Value, vector: Value) -> Value:
        return self.lanes.at(start, vector, VECTOR_BYTES // 2 if self.is_half else VECTOR_BYTES)


class _Sums:
    """Accumulators of a tile: some vectors by some queries."""

    def __init__(self, lanes: Lanes, high: int, wide: int) -> None:
        self._lanes = lanes
        self.queries = wide
        self._places = [
            [lanes.variable(lanes.no_floats()) for _ in range(high)] for _ in range(wide)
        ]

    def begin(self, start: Callable[[int, int], Value]) -> None:
        for query, column in enumerate(self._places):
            for number, place in enumerate(column):
                self._lanes.write(start(query, number), place)

    def add(self, query: int, vectors: list[Value], factor: Value) -> None:
        lanes = self._lanes
        for vector, place in zip(vectors, self._places[query], strict=True):
            lanes.write(lanes.fma(vector, factor, lanes.read(place)), place)

    def add_seen(self, query: int, vectors: list[Value], factor: Value) -> None:
        """Add, except where the factor says that the query must not see the vectors."""
        lanes = self._lanes
        unseen = lanes.less(factor, lanes.no_floats())
        for vector, place in zip(vectors, self._places[query], strict=True):
            before = lanes.read(place)
            lanes.write(lanes.where(unseen, before, lanes.fma(vector, factor, before)), place)

    def store(self, target: Callable[[int, int], Value]) -> None:
        for query, column in enumerate(self._places):
            for number, place in enumerate(column):
                self._lanes.store(self._lanes.read(place), target(query, number))


def _heights(lanes: Lanes, count: int, queries: int) -> Iterator[tuple[Value, int]]:
    """Emit what the caller emits for ``count`` pages or blocks, so many of them at a time."""
    high = count if host_cpu().wide else min(_NARROW_HEIGHTS[queries], count)
    with lanes.count(lanes.constant(count // high)) as turn:
        yield lanes.product(turn, lanes.constant(high)), high


@dataclass(frozen=True, slots=True)
class _Gathering:
    """``out`` [pages][128][16] = ``count`` vectors of each of four pages, from ``first`` on.

    ``pages`` is the address of four addresses, to which ``offset`` is added. The same vectors of
    the four addresses at ``near``, with ``near_offset`` added, are prefetched.
    """

    lanes: Lanes
    is_half: bool
    pages: Value
    offset: Value
    near: Value
    near_offset: Value
    out: Value
    first: Value
    count: Value

    def emit(self) -> None:
        lanes, pages = self.lanes, _Pages(self.lanes, self.is_half)
        with lanes.count(lanes.constant(TOGETHER)) as page:
            start = lanes.sum(lanes.word(lanes.at(self.pages, page, 8)), self.offset)
            near = lanes.sum(lanes.word(lanes.at(self.near, page, 8)), self.near_offset)
            out = lanes.at(self.out, page, GATHERED_BYTES)
            with lanes.count(self.count) as number:
                vector = lanes.sum(self.first, number)
                lanes.store(pages.load(start, vector), lanes.at(out, number, VECTOR_BYTES))
                lanes.fetch(pages.at(near, vector))


@dataclass(frozen=True, slots=True)
class _Scoring:
    """``out`` [queries][4][16] = products of float32 queries with the keys of four pages.

    ``pages`` is the address of four addresses, to which ``offset`` is added; ``dim`` numbers of
    queries and keys are multiplied, and added to what is in ``out`` where ``adds`` is not 0. Where
    queries are few, what lies ``ahead`` bytes after the keys is prefetched meanwhile.
    """

    lanes: Lanes
    is_half: bool
    pages: Value
    offset: Value
    ahead: Value
    rows: Value
    stride: Value
    out: Value
    dim: Value
    queries: Value
    adds: Value

    def emit(self) -> None:
        lanes = self.lanes
        for first, size in stretches(lanes, self.queries, _QUERIES):
            for page, high in _heights(lanes, TOGETHER, size):
                self._tile(page, high, first, size)

    def _tile(self, page: Value, high: int, first: Value, size: int) -> None:
        lanes = self.lanes
        at = lanes.at(self.pages, page, 8)
        pages = [lanes.word(lanes.at(at, lanes.constant(number), 8)) for number in range(high)]
        starts = [lanes.sum(page, self.offset) for page in pages]
        out = lanes.at(lanes.at(self.out, first, CHUNK_BYTES), page, VECTOR_BYTES)

        def place(query: int, number: int) -> Value:
            return lanes.sum(out, lanes.constant(query * CHUNK_BYTES + number * VECTOR_BYTES))

        def before(query: int, number: int) -> Value:
            found = lanes.floats(place(query, number))
            return lanes.chosen(self.adds, found, lanes.no_floats())

        sums = _Sums(lanes, high, size)
        sums.begin(before)
        with lanes.count(self.dim) as k:
            self._add(starts, k, lanes.at(self.rows, first, self.stride), sums)
        sums.store(place)

    def _add(self, starts: list[Value], k: Value, row: Value, sums: _Sums) -> None:
        lanes, pages = self.lanes, _Pages(self.lanes, self.is_half)
        keys = [pages.load(start, k) for start in starts]
        for start in starts if sums.queries < _QUERIES[0] else ():
            lanes.fetch(lanes.sum(pages.at(start, k), self.ahead))
        for query in range(sums.queries):
            place = lanes.at(lanes.at(row, lanes.constant(query), self.stride), k, 4)
            sums.add(query, keys, lanes.every_float(place))


@dataclass(frozen=True, slots=True)
class _Adding:
    """``out`` [queries][blocks][16] = corrections * out + weights * the values of pages.

    ``pages`` is the address of addresses, to which ``offset`` is added, ``weights``
    [queries][4][16] begin at the first of these pages, ``corrections`` are float32 [queries]. The
    first query sees the values from ``low`` to ``high``, counted from the first of these pages,
    each further query a range that is ``ahead`` later. What a query does not see may be anything,
    even NaN: a page that all queries of a tile see whole is just multiplied and added; of any other
    the marked weights are left out. Nothing from ``tokens`` on is read. The addresses of a chunk
    are followed by those of the next, whose keys, ``before`` bytes from its values, are prefetched.
    """

    lanes: Lanes
    is_half: bool
    pages: Value
    tokens: Value
    low: Value
    high: Value
    ahead: Value
    offset: Value
    before: Value
    weights: Value
    corrections: Value
    out: Value
    stride: Value
    blocks: Value
    queries: Value

    def emit(self) -> None:
        lanes = self.lanes
        for block, high in stretches(lanes, self.blocks, _BLOCKS):
            for first, size in stretches(lanes, self.queries, _QUERIES):
                for part, most in _heights(lanes, high, size):
                    self._tile(lanes.sum(block, part), most, first, size)

    def _tile(self, block: Value, high: int, first: Value, size: int) -> None:
        lanes = self.lanes
        out = lanes.at(lanes.at(self.out, block, VECTOR_BYTES), first, self.stride)
        corrections = lanes.at(self.corrections, first, 4)

        def place(query: int, number: int) -> Value:
            row = lanes.at(out, lanes.constant(query), self.stride)
            return lanes.sum(row, lanes.constant(number * VECTOR_BYTES))

        def corrected(query: int, number: int) -> Value:
            factor = lanes.every_float(lanes.at(corrections, lanes.constant(query), 4))
            return lanes.multiply(lanes.floats(place(query, number)), factor)

        sums = _Sums(lanes, high, size)
        sums.begin(corrected)
        self._values(lanes.product(block, lanes.constant(LANES)), first, sums, high)
        sums.store(place)

    def _values(self, vector: Value, first: Value, sums: _Sums, high: int) -> None:
        """Add the values of all pages that a query of the tile sees."""
        lanes, pages, sixteen = (
            self.lanes,
            _Pages(self.lanes, self.is_half),
            self.lanes.constant(LANES),
        )
        last = lanes.sum(first, lanes.constant(sums.queries - 1))
        seen_by_all = lanes.at(self.low, last, self.ahead), lanes.at(self.high, first, self.ahead)
        end = lanes.sum(lanes.at(self.high, last, self.ahead), lanes.constant(1))
        end = lanes.most(lanes.least(end, self.tokens), lanes.constant(0))
        weights = lanes.at(self.weights, first, CHUNK_BYTES)
        with lanes.count(lanes.parts(end, sixteen)) as page:
            begin = lanes.product(page, sixteen)
            count = lanes.least(lanes.subtract(end, begin), sixteen)
            at = lanes.at(self.pages, page, 8)
            start = pages.at(lanes.sum(lanes.word(at), self.offset), vector)
            following = lanes.word(lanes.sum(at, lanes.constant(TOGETHER * 8)))
            keys = lanes.sum(lanes.sum(following, self.offset), self.before)
            keys = pages.at(keys, vector)
            weight = lanes.at(weights, page, VECTOR_BYTES)
            whole = lanes.within(begin, lanes.sum(begin, count), *seen_by_all)
            for add in lanes.either(whole, sums.add, sums.add_seen):
                with lanes.count(count) as slot:
                    place = lanes.at(weight, slot, 4)
                    self._value(pages.at(start, slot), high, place, sums, add)
                    self._fetch(pages.at(keys, slot), high, sums)

    def _value(
        self,
        start: Value,
        high: int,
        weight: Value,
        sums: _Sums,
        add: Callable[[int, list[Value], Value], None],
    ) -> None:
        """Add the values of one token."""
        lanes, pages = self.lanes, _Pages(self.lanes, self.is_half)
        values = [pages.load(start, lanes.constant(number * LANES)) for number in range(high)]
        for query in range(sums.queries):
            place = lanes.sum(weight, lanes.constant(query * CHUNK_BYTES))
            add(query, values, lanes.every_float(place))

    def _fetch(self, start: Value, high: int, sums: _Sums) -> None:
        """Prefetch keys where queries are few, and so wait for memory."""
        lanes, pages = self.lanes, _Pages(self.lanes, self.is_half)
        for number in range(high if sums.queries < _QUERIES[0] else 0):
            lanes.fetch(pages.at(start, lanes.constant(number * LANES)))
