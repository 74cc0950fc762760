"""Queries, keys and values of a layer: head norms, rotation, and keys and values into their pages.

A page holds sixteen tokens of one KV head as two packed matrices: keys ``[dim][16]``, so that the
scores of sixteen keys are one vector, and values ``[dim / 16][16][16]``, so that a product with
sixteen probabilities is one too.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic, register_jitable

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.elementwise import normalise
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes
from expertctl.engine.kernels.memory import float16_bits, floats_at, halves_at, longs_at, words
from expertctl.engine.kernels.scheme import Scheme

PAGE = 16
"""Tokens in a page."""

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """Query heads, KV heads, numbers in a head, and what pages hold: float32 or float16."""

    queries: int
    keys: int
    dim: int
    numbers: Scheme = Scheme.FLOAT32

    def __post_init__(self) -> None:
        """Check that heads are whole vectors and KV heads have equally many query heads."""
        assert self.dim % PAGE == 0
        assert self.queries % self.keys == 0
        assert self.numbers in (Scheme.FLOAT32, Scheme.FLOAT16)

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys of one head in a page; its values take as many."""
        return self.dim * self.numbers.layout.vector_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page in one layer; its values take as many."""
        return self.keys * self.head_bytes


@cache
def heads_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel for pages of these numbers.

    One item is one head of one token. Of each sixteen tokens, the items of one head come first, for
    its keys share cache lines, then those of the next: heads of queries, then keys, then values.
    Numbers beyond 65504 are infinite in float16.
    """
    return compile_kernel(f"heads {numbers.value}", _function(int(numbers is Scheme.FLOAT16)))


def heads_arguments(
    *,
    rows: Numbers,
    shape: HeadsShape,
    norms: tuple[Numbers | None, Numbers | None],
    eps: Numbers,
    rotations: Numbers,
    positions: Numbers,
    tables: Numbers,
    offsets: tuple[int, int],
    count: Numbers,
) -> Numbers:
    """Return its arguments.

    ``rows`` is float32 [tokens, heads * dim]; ``norms`` of queries and keys are [dim] or None,
    ``rotations`` [tokens, 2, dim] as `angles_kernel` writes them, ``tables`` addresses of page
    lists, ``offsets`` the bytes from the address of a page to a layer's keys and values;
    ``count``, int64 [1], the tokens of the run.
    """
    return words_of(
        *rows_at(rows),
        shape.queries,
        shape.keys,
        shape.dim,
        *(address(norm) for norm in norms),
        address(eps),
        address(rotations),
        address(positions, np.int64),
        address(tables, np.int64),
        *offsets,
        shape.head_bytes,
        address(count, np.int64),
    )


def _function(half: int) -> KernelFunction:
    def heads(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            rows, stride, queries, keys, dim, query_norm, key_norm, eps,
            rotations, positions, tables, key_offset, value_offset, head_bytes, count,
        ) = words(arguments, 15)  # fmt: skip
        tokens, together = words(count, 1)[0], (queries + 2 * keys) * PAGE
        for item in range(first, last):
            begin = item // together * PAGE
            high = min(tokens - begin, PAGE)
            token, head = begin + item % together % high, item % together // high
            row = rows + token * stride + head * dim * 4
            if head < queries + keys:
                numbers, norm = floats_at(row, dim), query_norm if head < queries else key_norm
                if norm != 0:
                    normalise(numbers, floats_at(norm, dim), numbers, floats_at(eps, 1)[0])
                _rotate(row, rotations + token * dim * 8, dim)
            if head >= queries:
                position = longs_at(positions, token + 1)[token]
                table = longs_at(longs_at(tables, token + 1)[token], position // PAGE + 1)
                page, slot = table[position // PAGE], position % PAGE
                if head < queries + keys:
                    place = page + key_offset + (head - queries) * head_bytes
                    _write_key(half, floats_at(row, dim), place, slot)
                else:
                    place = page + value_offset + (head - queries - keys) * head_bytes
                    write_value(half, row, place, slot, dim // LANES)

    return heads


@register_jitable
def _rotate(row: Any, rotation: Any, dim: Any) -> None:  # pragma: no cover - compiled
    """Rotate the halves of one head: cosines then sines, each [dim]."""
    half = dim // 2
    vectors = half // LANES
    rotate_lanes(row, rotation, half * 4, vectors)
    numbers, turns = floats_at(row, dim), floats_at(rotation, 2 * dim)
    for k in range(vectors * LANES, half):
        low, high = numbers[k], numbers[half + k]
        numbers[k] = low * turns[k] - high * turns[dim + k]
        numbers[half + k] = high * turns[half + k] + low * turns[dim + half + k]


@intrinsic
def rotate_lanes(_context: Any, row: Any, rotation: Any, half: Any, vectors: Any) -> Any:
    """Do the same for so many vectors; a half of a head has ``half`` bytes."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (numbers, turns, step, count) = Lanes(builder), values
        with lanes.count(count) as vector:
            low, high = (lanes.at(lanes.at(numbers, vector, VECTOR_BYTES), step, k) for k in (0, 1))
            start = lanes.at(turns, vector, VECTOR_BYTES)
            cosine, other_cosine, sine, other_sine = (
                lanes.floats(lanes.at(start, step, k)) for k in range(4)
            )
            a, b = lanes.floats(low), lanes.floats(high)
            first = lanes.less_by(lanes.multiply(a, cosine), lanes.multiply(b, sine))
            second = lanes.add(lanes.multiply(b, other_cosine), lanes.multiply(a, other_sine))
            lanes.store(first, low)
            lanes.store(second, high)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@register_jitable
def _write_key(half: Any, key: Any, place: Any, slot: Any) -> None:  # pragma: no cover - compiled
    """Write a key into its column of [dim][16]."""
    floats, halves = floats_at(place, len(key) * PAGE), halves_at(place, len(key) * PAGE)
    for k in range(len(key)):
        if half:
            halves[k * PAGE + slot] = float16_bits(key[k])
        else:
            floats[k * PAGE + slot] = key[k]


@intrinsic(prefer_literal=True)
def write_value(_context: Any, half: Any, row: Any, place: Any, slot: Any, vectors: Any) -> Any:
    """Write a value into its rows of [dim / 16][16][16]; ``half`` is a constant."""
    if not isinstance(half, types.IntegerLiteral):
        raise RequireLiteralValue("the numbers of pages are a constant")
    is_half = bool(half.literal_value)
    size = VECTOR_BYTES // 2 if is_half else VECTOR_BYTES

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (_, numbers, start, row, count) = Lanes(builder), values
        store = lanes.store_halves if is_half else lanes.store
        with lanes.count(count) as vector:
            to = lanes.at(lanes.at(start, row, size), vector, PAGE * size)
            store(lanes.floats(lanes.at(numbers, vector, VECTOR_BYTES)), to)
        return context.get_dummy_value()

    return types.void(half, *[types.int64] * 4), emit
