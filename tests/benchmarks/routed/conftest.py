"""A small base whose tokens say whom they ask for."""

from pathlib import Path

import pytest

from benchmarks.cache_policies import Trace
from benchmarks.routed.traced_base import RoutedShape, make_trace, write_base

SHAPE = RoutedShape(
    layers=2, hidden=128, heads=2, experts=8, used=2, intermediate=32, vocabulary=96
)


@pytest.fixture
def trace() -> Trace:
    return make_trace(SHAPE, 80)


@pytest.fixture
def directory(tmp_path: Path, trace: Trace) -> Path:
    return write_base(tmp_path, SHAPE, trace)
