"""Routed experts in memory, what the kernels do with them one by one, and the plain formula."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertPart, ExpertShape
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.packed import PackedMatrix, pack_into
from expertctl.engine.kernels.routed import routed_arguments, routed_items, routed_kernel
from expertctl.engine.kernels.rows import PreparedRows, room_for_rows, rows_as_they_are
from expertctl.engine.kernels.scheme import FLOATING, Scheme
from expertctl.engine.kernels.sorting import (
    RoutedOrder,
    gather_arguments,
    gather_kernel,
    room_for_order,
    sort_arguments,
    sort_kernel,
)
from tests.engine.kernels.products import random_numbers

Array = np.ndarray[Any, Any]
FOREIGN = np.float32(77)
"""What stood in memory before, and stays where nothing is written."""


@dataclass(frozen=True)
class Experts:
    """Experts that lie apart, each in a block of its own."""

    shape: ExpertShape
    blocks: Sequence[Array]
    places: Array

    def gate_up(self, expert: int) -> PackedMatrix:
        return self.shape.gate_up(self.blocks[expert])

    def down(self, expert: int) -> PackedMatrix:
        return self.shape.down(self.blocks[expert])


def random_experts(
    scheme: Scheme, count: int, *, hidden: int, intermediate: int, seed: int = 0
) -> Experts:
    """Experts whose outputs are about as large as their inputs, in no order of addresses."""
    shape = ExpertShape(scheme, hidden, intermediate)
    blocks = [aligned(shape.nbytes, np.uint8) for _ in range(count)]
    np.random.default_rng(seed).shuffle(blocks)
    for number, block in enumerate(blocks):
        for matrix in (shape.gate_up(block), shape.down(block)):
            numbers = random_numbers(seed + 2 * number, matrix.rows, matrix.columns)
            pack_into(matrix, numbers / np.float32(np.sqrt(matrix.columns)))
    return Experts(shape, blocks, np.array([block.ctypes.data for block in blocks], np.int64))


def random_choices(seed: int, tokens: int, used: int, experts: int) -> Array:
    """Different experts for each token, int64 [tokens, used]."""
    random = np.random.default_rng(seed)
    found = [random.permutation(experts)[:used] for _ in range(tokens)]
    return np.array(found, np.int64).reshape(tokens, used)


def sort(selected: Array, experts: int, *, tokens: int | None = None) -> RoutedOrder:
    """What the kernel makes of choices, in memory that held something else."""
    order = room_for_order(experts, selected.size)
    for each in (order.counts, order.begins, order.active, order.sources, order.inverse):
        each[...] = int(FOREIGN)
    count = np.array([len(selected) if tokens is None else tokens], np.int64)
    arguments = sort_arguments(selected=selected, tokens=count, order=order)
    sort_kernel()(0, 1, arguments.ctypes.data)
    return order


def sort_in_parts(
    selected: Array, experts: int, parts: Sequence[Array | None]
) -> Iterator[RoutedOrder]:
    """Those who have a place now, then those behind them who have one; None: all who are left."""
    order = room_for_order(experts, selected.size)
    count = np.array([len(selected)], np.int64)
    for number, places in enumerate(parts):
        arguments = sort_arguments(
            selected=selected, tokens=count, order=order, places=places, behind=number > 0
        )
        sort_kernel()(0, 1, arguments.ctypes.data)
        yield order


def room_for_gathered(scheme: Scheme, positions: int, columns: int) -> PreparedRows:
    """Room for rows in the order of experts."""
    if scheme in FLOATING:
        return rows_as_they_are(aligned((positions, columns), np.float32))
    return room_for_rows(scheme, positions, columns)


def gather(order: RoutedOrder, rows: PreparedRows, *, scheme: Scheme, used: int) -> PreparedRows:
    """Rows of tokens in the order of experts."""
    positions = len(order.sources)
    out = room_for_gathered(scheme, positions, rows.data.shape[1])
    arguments = gather_arguments(order=order, used=used, rows=rows, gathered=out)
    gather_kernel()(0, positions, arguments.ctypes.data)
    return out


@dataclass(frozen=True)
class Product:
    """What a routed product wrote, and whom it missed."""

    rows: Array
    absent: int


def multiply_routed(
    part: ExpertPart,
    places: Array,
    order: RoutedOrder,
    rows: PreparedRows,
    *,
    plain: bool = False,
    active: int | None = None,
    cuts: Sequence[int] = (),
) -> Product:
    """Products of rows with the matrices of their experts, [positions, filled rows of the part].

    Items are cut into ranges there, which are done from the last to the first.
    """
    out = aligned((len(order.sources), part.blocks * LANES), np.float32)
    out[...] = FOREIGN
    most = order.experts if active is None else active
    items, absent = np.array([routed_items(part, active=most)], np.int64), np.zeros(1, np.int64)
    arguments = routed_arguments(
        part=part, places=places, order=order, rows=rows, out=out, items=items, absent=absent
    )
    ends = [0, *cuts, int(items[0])]
    for first, last in reversed(list(itertools.pairwise(ends))):
        routed_kernel(part.scheme, plain=plain)(first, last, arguments.ctypes.data)
    return Product(out, int(absent[0]))
