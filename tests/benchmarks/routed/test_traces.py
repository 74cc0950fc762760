"""Traces of routed experts, drawn and from files."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.routed.traced_base import make_shape, make_trace, read_trace
from tests.benchmarks.routed.conftest import SHAPE


def test_drawn_requests_fit_the_shape() -> None:
    trace = make_trace(SHAPE, 40, every=10)
    assert trace.shape == (40, 2, 2)
    assert trace.max() < 8


def test_a_file_holds_a_trace_of_any_model(tmp_path: Path) -> None:
    trace = np.array([[[0, 4], [1, 2], [4, 3]], [[3, 1], [0, 1], [2, 0]]], np.int16)
    np.save(tmp_path / "small.npy", trace)
    found = read_trace(tmp_path / "small.npy")
    assert np.array_equal(found, trace)
    shape = make_shape(found, layers=2)
    assert (shape.layers, shape.experts, shape.used, shape.hidden) == (2, 5, 2, 2048)
    assert make_shape(found, layers=8).layers == 3


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 2, 1), np.int32),
        np.zeros((2, 2), np.int16),
        np.zeros((0, 2, 1), np.int16),
        np.full((1, 1, 1), -1, np.int16),
        np.zeros((1, 1, 2), np.int16),
    ],
    ids=["of other numbers", "flat", "empty", "below 0", "twice"],
)
def test_what_is_no_trace_is_refused(wrong: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "wrong.npy", wrong)
    with pytest.raises(ValueError, match=r"wrong\.npy"):
        read_trace(tmp_path / "wrong.npy")


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "wrong.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_trace(tmp_path / "wrong.npy")
