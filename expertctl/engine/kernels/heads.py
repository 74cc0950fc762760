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
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.memory import floats_at, longs_at, words

PAGE = 16
"""Tokens in a page."""

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """Query heads, KV heads, and numbers in a head."""

    queries: int
    keys: int
    dim: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page in one layer, and of its values."""
        return self.keys * self.dim * PAGE * 4


@cache
def heads_kernel() -> Kernel:
    """Return the kernel; one item is one head of one token, queries first, then keys, values."""
    return compile_kernel("heads", _heads)


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
        ],
        np.int64,
    )


def _heads(first: int, last: int, arguments: int) -> None:
    (
        rows, stride, queries, keys, dim, query_norm, key_norm, eps,
        rotations, positions, tables, key_offset, value_offset,
    ) = words(arguments, 13)  # fmt: skip
    heads = queries + 2 * keys
    for item in range(first, last):
        token, head = item // heads, item % heads
        row = floats_at(rows + token * stride + head * dim * 4, dim)
        if head < queries + keys:
            norm = query_norm if head < queries else key_norm
            if norm != 0:
                normalise(row, floats_at(norm, dim), row, floats_at(eps, 1)[0])
            _rotate(row, floats_at(rotations + token * dim * 8, 2 * dim), dim)
        if head >= queries:
            position = longs_at(positions, token + 1)[token]
            table = longs_at(longs_at(tables, token + 1)[token], position // PAGE + 1)
            page = table[position // PAGE]
            if head < queries + keys:
                place = page + key_offset + (head - queries) * dim * PAGE * 4
                _write_key(row, floats_at(place, dim * PAGE), position % PAGE)
            else:
                place = page + value_offset + (head - queries - keys) * dim * PAGE * 4
                _write_value(row, floats_at(place, dim * PAGE), position % PAGE)


@register_jitable
def _rotate(row: Any, rotation: Any, dim: Any) -> None:
    """Rotate the halves of one head: cosines then sines, each [dim]."""
    half = dim // 2
    for k in range(half):
        low, high = row[k], row[half + k]
        row[k] = low * rotation[k] - high * rotation[dim + k]
        row[half + k] = high * rotation[half + k] + low * rotation[dim + half + k]


@register_jitable
def _write_key(row: Any, page: Any, slot: Any) -> None:
    for k in range(len(row)):
        page[k * PAGE + slot] = row[k]


@register_jitable
def _write_value(row: Any, page: Any, slot: Any) -> None:
    if slot == 0:  # what an earlier owner left is multiplied by 0, which does not undo a NaN
        for k in range(len(page)):
            page[k] = np.float32(0)
    for k in range(len(row)):
        page[k // PAGE * PAGE * PAGE + slot * PAGE + k % PAGE] = row[k]
