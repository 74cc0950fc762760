"""The choices of tokens, in the order of experts: the rows of an expert lie next to each other.

A token's j-th choice has the number ``src = token * used + j``. Sorted it has a position; a choice
without an expert has none. Choices of resident experts may be sorted first, the others behind them
once those experts are loaded: all write positions of one list, so the merged result is the same.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, words_of
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.memory import aligned, longs_at, words, words_at
from expertctl.engine.kernels.rows import PreparedRows

Numbers = np.ndarray[Any, Any]
NOWHERE = -1
"""The position of a choice without an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedOrder:
    """Where `sort_kernel` writes; all are int64."""

    counts: Numbers
    """[experts]: how many rows each has."""
    begins: Numbers
    """[experts + 1]: where each one's rows begin, and at the end how many positions there are."""
    active: Numbers
    """[experts]: those that have rows, in ascending order."""
    actives: Numbers
    """[1]: how many those are."""
    sources: Numbers
    """[tokens * used]: the ``src`` at each position; of one expert they ascend."""
    inverse: Numbers
    """[tokens * used]: the position of each ``src``."""

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        lists = (self.counts, self.begins, self.active, self.actives, self.sources, self.inverse)
        return sum(each.nbytes for each in lists)


def room_for_order(experts: int, positions: int) -> RoutedOrder:
    """Return room for so many positions at most, ``tokens * used``."""
    sizes = (experts, experts + 1, experts, 1, positions, positions)
    return RoutedOrder(*(aligned(size, np.int64) for size in sizes))


@cache
def sort_kernel() -> Kernel:
    """Return the kernel that writes the order; there is one item.

    A choice whose id is below 0, or not that of an expert, is without an expert.
    """
    return compile_kernel("sort", _sort)


def sort_arguments(
    *,
    selected: Numbers,
    tokens: Numbers,
    order: RoutedOrder,
    places: Numbers | None = None,
    behind: bool = False,
) -> Numbers:
    """Return its arguments; ``selected`` is int64 [tokens, used].

    ``tokens``, int64 [1], is read at each run. With ``places``, int64 [experts], only choices of
    experts whose place is not 0 are sorted. With ``behind``, what an order left out is sorted
    behind it; the order then tells of that alone, and earlier positions stay what they were.
    """
    assert selected.flags.c_contiguous
    assert selected.size <= min(len(order.sources), len(order.inverse))
    lists = (order.counts, order.begins, order.active, order.actives, order.sources, order.inverse)
    return words_of(
        address(selected, np.int64),
        selected.shape[1],
        address(tokens, np.int64),
        order.experts,
        *(address(each, np.int64) for each in lists),
        0 if places is None else address(places, np.int64),
        address(order.begins, np.int64) + order.experts * 8 if behind else 0,
    )


def _sort(_first: int, _last: int, arguments: int) -> None:  # pragma: no cover - compiled
    (
        ids, used, tokens, experts, numbers, starts, present, presents, places, inverses,
        there, before,
    ) = words(arguments, 12)  # fmt: skip
    total = words(tokens, 1)[0] * used
    selected, counts, begins = (
        longs_at(ids, total),
        longs_at(numbers, experts),
        longs_at(starts, experts + 1),
    )
    active, sources, inverse = (
        longs_at(present, experts),
        longs_at(places, total),
        longs_at(inverses, total),
    )
    for expert in range(experts):
        counts[expert] = 0
    if before == 0:
        inverse[:] = NOWHERE
    for src in range(total):
        if inverse[src] == NOWHERE and _is_wanted(selected[src], experts, there):
            counts[selected[src]] += 1
    position, actives = 0, 0
    if before != 0:
        position = words(before, 1)[0]
    for expert in range(experts):
        begins[expert] = position
        position += counts[expert]
        if counts[expert] > 0:
            active[actives] = expert
            actives += 1
            counts[expert] = 0
    begins[experts] = position
    longs_at(presents, 1)[0] = actives
    for src in range(total):
        expert = selected[src]
        if inverse[src] == NOWHERE and _is_wanted(expert, experts, there):
            position = begins[expert] + counts[expert]
            counts[expert] += 1
            sources[position], inverse[src] = src, position


@register_jitable
def _is_wanted(expert: Any, experts: Any, there: Any) -> Any:  # pragma: no cover - compiled
    """Tell whether an expert exists and, where only resident ones are wanted, is resident."""
    if not 0 <= expert < experts:
        return False
    return there == 0 or longs_at(there, experts)[expert] != 0


@cache
def gather_kernel() -> Kernel:
    """Return the kernel that copies the row of its token to each position; items are positions.

    There may be more items than positions: how many positions there are is read at each run.
    """
    return compile_kernel("gather", _gather)


def gather_arguments(
    *, order: RoutedOrder, used: int, rows: PreparedRows, gathered: PreparedRows
) -> Numbers:
    """Return its arguments; ``gathered`` has the shape of ``rows``, but one row per position."""
    assert gathered.data.dtype == rows.data.dtype
    assert gathered.data.shape[1] == rows.data.shape[1]
    assert gathered.scales.shape[1] == rows.scales.shape[1]
    words_a_row = rows.data.shape[1] * rows.data.itemsize // 4
    kind = rows.data.dtype
    return words_of(
        address(order.sources, np.int64),
        address(order.begins, np.int64) + order.experts * 8,
        used,
        words_a_row,
        address(rows.data, kind),
        rows.data.strides[0],
        address(gathered.data, kind),
        gathered.data.strides[0],
        rows.scales.shape[1],
        address(rows.scales),
        address(gathered.scales),
        address(rows.sums, np.int32),
        address(gathered.sums, np.int32),
    )


def _gather(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    (
        places, positions, used, wide, rows, stride, outs, out_stride,
        groups, scales, out_scales, sums, out_sums,
    ) = words(arguments, 13)  # fmt: skip
    last = min(last, words(positions, 1)[0])
    for position in range(first, last):
        token = longs_at(places, last)[position] // used
        _copy(rows + token * stride, outs + position * out_stride, wide)
        _copy(scales + token * groups * 4, out_scales + position * groups * 4, groups)
        _copy(sums + token * groups * 4, out_sums + position * groups * 4, groups)


@register_jitable
def _copy(source: Any, target: Any, count: Any) -> None:  # pragma: no cover - compiled
    """Copy so many words of four bytes."""
    found, out = words_at(source, count), words_at(target, count)
    for k in range(count):
        out[k] = found[k]
