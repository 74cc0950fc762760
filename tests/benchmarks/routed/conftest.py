"""A small base whose tokens say whom they ask for."""

from pathlib import Path

import pytest

from benchmarks.cache_oracles import Trace
from benchmarks.routed.shape import RoutedShape, write_base
from benchmarks.routed.traces import drawn

SHAPE = RoutedShape(
    layers=2, hidden=128, heads=2, experts=8, used=2, intermediate=32, vocabulary=96
)


@pytest.fixture
def trace() -> Trace:
    return drawn(SHAPE, 80)


@pytest.fixture
def directory(tmp_path: Path, trace: Trace) -> Path:
    return write_base(tmp_path, SHAPE, trace)
