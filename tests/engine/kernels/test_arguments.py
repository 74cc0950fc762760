"""Arguments are given by name, and numbers of another kind or rows with gaps are noticed."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.engine import kernels
from expertctl.engine.kernels.layer_operations import rms_norm_arguments
from expertctl.engine.kernels.program import array_address, encode_operands, row_address


def makers() -> dict[str, Callable[..., Any]]:
    """All that return the arguments of a kernel."""
    found = {}
    for path in Path(kernels.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"{kernels.__name__}.{path.stem}")
        own = inspect.getmembers(module, inspect.isfunction)
        found |= {name: each for name, each in own if name.endswith("_arguments")}
    return found


def test_arrays_that_could_be_swapped_are_given_by_name() -> None:
    found = makers()
    assert len(found) >= 14
    by_place = {
        name
        for name, maker in found.items()
        for one in inspect.signature(maker).parameters.values()
        if one.kind is not one.KEYWORD_ONLY
    }
    assert by_place == set()


def test_words_are_addresses_and_numbers_in_their_order() -> None:
    around = np.zeros((4, 9), np.float32)
    inside = around[1:, 2:7]
    place, stride = row_address(inside)
    assert (place, stride) == (around.ctypes.data + 36 + 8, 36)
    words = encode_operands(place, 7, array_address(None))
    np.testing.assert_array_equal(words, np.array([place, 7, 0]), strict=True)
    assert words.dtype == np.int64


@pytest.mark.parametrize("kind", [np.float64, np.int32, np.uint32])
def test_numbers_of_another_kind_are_noticed(kind: Any) -> None:
    rows, weight, eps = np.zeros((2, 8), np.float32), np.zeros(8, kind), np.zeros(1, np.float32)
    with pytest.raises(AssertionError, match="instead of float32"):
        rms_norm_arguments(rows=rows, weight=weight, out=rows, eps=eps)


def test_rows_whose_columns_lie_apart_are_noticed() -> None:
    with pytest.raises(AssertionError, match="not adjacent"):
        row_address(np.zeros((8, 4), np.float32).T)
    for few in (np.zeros((3, 1), np.float32), np.zeros((0, 7), np.float32)):
        assert row_address(few)[0] == few.ctypes.data
