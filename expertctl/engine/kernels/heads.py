"""Queries, keys and values of a layer: head norms, rotation, and keys and values into their pages.

A page holds sixteen tokens of one KV head as two packed matrices: keys ``[dim][16]``, so that the
scores of sixteen keys are one vector, and values ``[dim / 16][16][16]``, so that a product with
sixteen probabilities is one too.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.elementwise import normalise
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
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
        """Heads are whole vectors, and each KV head has as many query heads."""
        assert self.dim % PAGE == 0
        assert self.queries % self.keys == 0
        assert self.numbers in (Scheme.FLOAT32, Scheme.FLOAT16)

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys of one head in a page, and of its values."""
        return self.dim * self.numbers.layout.vector_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page in one layer, and of its values."""
        return self.keys * self.head_bytes


@cache
def heads_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel for pages of these numbers.

    One item is one head of one token, queries first, then keys, then values. Numbers beyond 65504
    are infinite in float16.
    """
    write = _write_halves if numbers is Scheme.FLOAT16 else _write_floats
    return compile_kernel(f"heads {numbers.value}", _function(write))


def heads_arguments(
    rows: Numbers,
    shape: HeadsShape,
    norms: tuple[Numbers | None, Numbers | None],
    eps: Numbers,
    rotations: Numbers,
    where: tuple[Numbers, Numbers],
    offsets: tuple[int, int],
) -> Numbers:
    """Return its arguments.

    ``rows`` is float32 [tokens, heads * dim]; ``norms`` of queries and keys are [dim] or None,
    ``rotations`` [tokens, 2, dim] as `angles_kernel` writes them, ``where`` positions and addresses
    of page lists, ``offsets`` the bytes from the address of a page to a layer's keys and values.
    """
    query_norm, key_norm = (0 if norm is None else norm.ctypes.data for norm in norms)
    positions, tables = where
    return np.array(
        [
            rows.ctypes.data,
            rows.strides[0],
            shape.queries,
            shape.keys,
            shape.dim,
            query_norm,
            key_norm,
            eps.ctypes.data,
            rotations.ctypes.data,
            positions.ctypes.data,
            tables.ctypes.data,
            *offsets,
            shape.head_bytes,
        ],
        np.int64,
    )


def _function(write: Any) -> KernelFunction:
    def heads(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            rows, stride, queries, keys, dim, query_norm, key_norm, eps,
            rotations, positions, tables, key_offset, value_offset, head_bytes,
        ) = words(arguments, 14)  # fmt: skip
        every = queries + 2 * keys
        for item in range(first, last):
            token, head = item // every, item % every
            row = floats_at(rows + token * stride + head * dim * 4, dim)
            if head < queries + keys:
                norm = query_norm if head < queries else key_norm
                if norm != 0:
                    normalise(row, floats_at(norm, dim), row, floats_at(eps, 1)[0])
                _rotate(row, floats_at(rotations + token * dim * 8, 2 * dim), dim)
            if head >= queries:
                position = longs_at(positions, token + 1)[token]
                table = longs_at(longs_at(tables, token + 1)[token], position // PAGE + 1)
                page, slot = table[position // PAGE], position % PAGE
                if head < queries + keys:
                    place = page + key_offset + (head - queries) * head_bytes
                    write(row, place, slot, PAGE)
                else:
                    place = page + value_offset + (head - queries - keys) * head_bytes
                    write(row, place, slot * PAGE, 1)

    return heads


@register_jitable
def _rotate(row: Any, rotation: Any, dim: Any) -> None:  # pragma: no cover - compiled
    """Rotate the halves of one head: cosines then sines, each [dim]."""
    half = dim // 2
    for k in range(half):
        low, high = row[k], row[half + k]
        row[k] = low * rotation[k] - high * rotation[dim + k]
        row[half + k] = high * rotation[half + k] + low * rotation[dim + half + k]


@register_jitable
def _write_floats(
    row: Any, place: Any, slot: Any, step: Any
) -> None:  # pragma: no cover - compiled
    page = floats_at(place, len(row) * PAGE)
    for k in range(len(row)):
        page[_slot(k, slot, step)] = row[k]


@register_jitable
def _write_halves(
    row: Any, place: Any, slot: Any, step: Any
) -> None:  # pragma: no cover - compiled
    page = halves_at(place, len(row) * PAGE)
    for k in range(len(row)):
        page[_slot(k, slot, step)] = float16_bits(row[k])


@register_jitable
def _slot(k: Any, slot: Any, step: Any) -> Any:  # pragma: no cover - compiled
    return k // PAGE * PAGE * PAGE + slot + k % PAGE * step
