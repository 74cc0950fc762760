"""An expert is one block of memory, and its matrices are views of it."""

import numpy as np
import pytest

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import (
    ExpertShape,
    allocate_matrix,
    pack_matrix,
    pack_rows,
)
from tests.engine.kernels.reference_gemm import make_random_numbers

EVERY = pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
SHAPES = ((1, 1), (48, 20), (130, 257), (300, 128))


@EVERY
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_the_matrices_of_an_expert_fill_its_block_one_behind_the_other(
    scheme: Scheme, hidden: int, intermediate: int
) -> None:
    shape = ExpertShape(scheme, hidden, intermediate)
    block = aligned_zeros(shape.nbytes, np.uint8)
    gate_up, down = shape.view_gate_up(block), shape.view_down(block)
    assert (gate_up.rows, gate_up.columns) == (2 * intermediate, hidden)
    assert (down.rows, down.columns) == (hidden, intermediate)
    parts = [gate_up.data, gate_up.scales, down.data, down.scales]
    assert shape.nbytes == sum(-(-each.nbytes // 64) * 64 for each in parts)
    places = [each.ctypes.data - block.ctypes.data for each in parts if each.nbytes]
    assert places == sorted(places)
    assert all(place % 64 == 0 for place in places)


@EVERY
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_a_matrix_is_packed_into_a_block_as_anywhere(
    scheme: Scheme, hidden: int, intermediate: int
) -> None:
    shape = ExpertShape(scheme, hidden, intermediate)
    block = aligned_zeros(shape.nbytes, np.uint8)
    for number, matrix in enumerate(
        (shape.view_gate_up(block), shape.view_down(memoryview(block)))
    ):
        numbers = make_random_numbers(number, matrix.rows, matrix.columns)
        alone = pack_matrix(numbers, scheme)
        pack_rows(matrix, numbers)
        np.testing.assert_array_equal(matrix.data, alone.data, strict=True)
        np.testing.assert_array_equal(matrix.scales, alone.scales, strict=True)
    again = shape.view_gate_up(block)
    np.testing.assert_array_equal(
        again.data,
        pack_matrix(make_random_numbers(0, 2 * intermediate, hidden), scheme).data,
        strict=True,
    )


@EVERY
def test_a_block_takes_what_its_matrices_take_where_nothing_has_to_be_filled(
    scheme: Scheme,
) -> None:
    shape = ExpertShape(scheme, 256, 128)
    matrices = (allocate_matrix(scheme, 256, 256), allocate_matrix(scheme, 256, 128))
    assert shape.nbytes == sum(matrix.nbytes for matrix in matrices)


def test_a_block_that_cannot_be_written_gives_matrices_that_cannot() -> None:
    shape = ExpertShape(Scheme.INT8, 16, 16)
    matrix = shape.view_down(memoryview(bytes(shape.nbytes)))
    assert not matrix.data.flags.writeable
    assert not matrix.scales.flags.writeable
