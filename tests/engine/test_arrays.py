"""Stored numbers as float32: exactly those of torch, in the memory that is announced."""

import tracemalloc

import numpy as np
import pytest
import torch

from expertctl.engine.arrays import (
    FloatArray,
    join_rows,
    joining_scratch_bytes,
    round_to_bfloat16,
    split_rows,
    widen,
)
from expertctl.engine.torch.plan import to_array, to_tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OBJECTS = 8 << 10
"""What Python objects take that only refer to numbers."""


def list_all_numbers(dtype: torch.dtype) -> FloatArray:
    """Every number of a narrow dtype, [256, 256]."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return to_array(bits.view(dtype).reshape(256, 256))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_narrow_number_becomes_the_same_float32(dtype: torch.dtype) -> None:
    numbers = list_all_numbers(dtype)
    expected = to_tensor(numbers).float().numpy()
    joined = np.empty((256, 256), np.float32)
    join_rows(joined, [numbers[:100], numbers[100:]])
    for found in (widen(numbers), joined):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
        assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_float32_is_widened_without_a_copy() -> None:
    numbers = np.ones(3, np.float32)
    assert widen(numbers) is numbers


@pytest.mark.parametrize("kinds", [DTYPES[:1], DTYPES[1:2], DTYPES[2:], DTYPES, DTYPES[::2]])
def test_rows_of_any_dtype_and_order_are_joined(kinds: list[torch.dtype]) -> None:
    parts = [torch.randn(3 + n, 5).to(dtype) for n, dtype in enumerate(kinds)]
    parts += [torch.randn(5, 2).to(dtype).T for dtype in kinds]
    joined = np.empty((sum(map(len, parts)), 5), np.float32)
    join_rows(joined, [to_array(part) for part in parts])
    assert torch.equal(to_tensor(joined), torch.cat([part.float() for part in parts]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 9000), (3, 100_000), (70_000, 2)])
def test_joining_takes_no_more_than_is_said(
    shape: tuple[int, int], dtype: torch.dtype, transposed: bool
) -> None:
    part = to_array(torch.randn(shape).to(dtype))
    part = part.T if transposed else part
    joined = np.empty(part.shape, np.float32)
    join_rows(joined, [part])  # makes its table
    tracemalloc.start()
    join_rows(joined, [part])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= joining_scratch_bytes(part) + OBJECTS
    assert joining_scratch_bytes(part) == joining_scratch_bytes(part.T)
    assert np.array_equal(joined, to_tensor(part).float().numpy())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_joining_two_dtypes_takes_no_more_than_is_said(
    dtype: torch.dtype, other: torch.dtype, transposed: bool
) -> None:
    tensors = [torch.randn(600, 600).to(kind) for kind in (dtype, other)]
    if transposed:
        tensors = [tensor.T for tensor in tensors]
    parts, joined = [to_array(tensor) for tensor in tensors], np.empty((1200, 600), np.float32)
    join_rows(joined, parts)  # makes its table
    tracemalloc.start()
    join_rows(joined, parts)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= max(map(joining_scratch_bytes, parts)) + OBJECTS
    assert torch.equal(to_tensor(joined), torch.cat([tensor.float() for tensor in tensors]))


def test_rows_are_split_into_views() -> None:
    array = np.arange(12).reshape(6, 2)
    parts = split_rows(array, [1, 0, 3])
    assert [part.tolist() for part in parts] == [[[0, 1]], [], [[2, 3], [4, 5], [6, 7]]]
    assert all(part.base is array.base for part in parts)


def test_float32_is_rounded_to_bfloat16_as_torch_does() -> None:
    numbers = torch.cat([torch.randn(1000) * 10.0**n for n in range(-38, 38)])
    ties = to_tensor(widen(list_all_numbers(torch.bfloat16))).flatten()
    halfway = (ties.view(torch.int32) + 0x8000).view(torch.float32)
    for each in (numbers, ties, halfway):
        there = to_array(each.bfloat16())
        found = round_to_bfloat16(each.numpy())
        is_nan = each.isnan().numpy()
        np.testing.assert_array_equal(found[~is_nan], there[~is_nan])
        assert to_tensor(found)[torch.from_numpy(is_nan)].isnan().all()
