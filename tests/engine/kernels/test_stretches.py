"""Loops over stretches cover a count once, whatever it is."""

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import types
from numba.extending import intrinsic

from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.compiled.gemm import _emit_token_tiles
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value, emit_even_tiles, emit_tiles
from expertctl.engine.kernels.packed_format import Scheme

MOST, SIZES = 6, (6, 4, 1)
WIDE = replace(get_host_cpu(), has_512_bit_registers=True)
_ROW = 3 * 8


def _keep(builder: Any, lanes: SimdBuilder, row: Value, *numbers: Value) -> None:
    for place, number in enumerate(numbers):
        address = lanes.add_int(row, lanes.int_constant(place * 8))
        builder.store(number, builder.inttoptr(address, number.type.as_pointer()))


@intrinsic
def _write_even(_context: Any, out: Any, count: Any, several: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, total, parts) = SimdBuilder(builder), values
        for turn, first, size in emit_even_tiles(lanes, total, parts=parts, largest=MOST):
            row = lanes.offset(place, turn, _ROW)
            _keep(builder, lanes, row, turn, first, lanes.int_constant(size))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def _write_greedy(_context: Any, out: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, total) = SimdBuilder(builder), values
        for first, size in emit_tiles(lanes, total, SIZES):
            row = lanes.offset(place, first, _ROW)
            _keep(builder, lanes, row, first, first, lanes.int_constant(size))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), emit


def _writer_of_tiles(blocks: int) -> Any:
    @intrinsic
    def write(_context: Any, out: Any, count: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            lanes, (place, total) = SimdBuilder(builder), values
            for turn, first, size in _emit_token_tiles(lanes, total, blocks, Scheme.BFLOAT16, WIDE):
                row = lanes.offset(place, turn, _ROW)
                _keep(builder, lanes, row, turn, first, lanes.int_constant(size))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 2), emit

    @numba.njit
    def tiles(out: int, count: int) -> None:
        write(out, count)

    return tiles


_tiles_of_four_blocks, _tiles_of_a_block = _writer_of_tiles(4), _writer_of_tiles(1)


@numba.njit
def _even(out: int, count: int, several: int) -> None:
    _write_even(out, count, several)


@numba.njit
def _greedy(out: int, count: int) -> None:
    _write_greedy(out, count)


@given(st.integers(0, 200), st.data())
def test_even_ones_cover_a_count_and_differ_by_one_at_most(count: int, data: st.DataObject) -> None:
    several = data.draw(st.integers(-(-count // MOST), count))
    found = np.full((several + 1, 3), -1)
    _even(found.ctypes.data, count, several)
    *rows, beyond = found.tolist()
    assert beyond == [-1, -1, -1]
    sizes = [count // several + (turn < count % several) for turn in range(several)]
    begins = [sum(sizes[:turn]) for turn in range(several)]
    assert rows == [list(row) for row in zip(range(several), begins, sizes, strict=True)]


@given(st.integers(0, 200))
def test_others_have_each_size_as_often_as_it_fits(count: int) -> None:
    found = np.full((count + 1, 3), -1)
    _greedy(found.ctypes.data, count)
    sixes, left = divmod(count, 6)
    fours, ones = divmod(left, 4)
    sizes = [6] * sixes + [4] * fours + [1] * ones
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    assert [row[1:] for row in found.tolist() if row[0] >= 0] == [
        list(row) for row in zip(begins, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (1, [1]),
        (7, [4, 3]),
        (11, [6, 5]),
        (12, [3, 3, 3, 3]),
        (18, [5, 5, 4, 4]),
        (24, [6, 6, 6, 6]),
        (31, [6, 5, 5, 5, 5, 5]),
    ],
)
def test_tiles_of_a_strip_are_enough_to_fetch_the_next_one(tokens: int, sizes: list[int]) -> None:
    found = np.full((tokens + 1, 3), -1)
    _tiles_of_four_blocks(found.ctypes.data, tokens)
    assert found[found[:, 0] >= 0, 2].tolist() == sizes


def test_tiles_of_a_block_on_its_own_are_as_few_as_do() -> None:
    found = np.full((19, 3), -1)
    _tiles_of_a_block(found.ctypes.data, 18)
    assert found[found[:, 0] >= 0, 2].tolist() == [6, 6, 6]
