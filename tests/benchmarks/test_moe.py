"""The rows about bases of routed experts, of a small one and its real processes."""

from pathlib import Path

import pytest

from benchmarks.__main__ import benchmark_names
from benchmarks.moe import BenchmarkedBase, measure_from_disk, measure_from_memory, measure_prompts
from benchmarks.routed.traced_base import RoutedShape, make_trace, write_base
from expertctl.engine.kernels.packed_format import Scheme

SHAPE = RoutedShape(
    layers=2, hidden=256, heads=2, experts=64, used=8, intermediate=512, vocabulary=1024
)


@pytest.fixture
def subject(tmp_path: Path) -> BenchmarkedBase:
    trace = make_trace(SHAPE, 600)
    return BenchmarkedBase(
        write_base(tmp_path, SHAPE, trace), tmp_path / "home", SHAPE, trace, "little"
    )


def test_it_is_among_the_benchmarks() -> None:
    assert "moe" in benchmark_names()


@pytest.mark.all
def test_rows_from_memory_compare_with_all_resident(subject: BenchmarkedBase) -> None:
    cached, copied = measure_from_memory(subject, rounds=1)
    assert (cached.rival, copied.rival) == ("all resident", "all resident")
    assert "100%" not in str(copied.note)
    assert "not in memory" in str(copied.note)
    assert all(row.ours and row.theirs and row.unit == "tok/s" for row in (cached, copied))


@pytest.mark.all
def test_rows_from_the_disk_say_what_was_read_of_it(subject: BenchmarkedBase) -> None:
    naive, whole, parts, budget = measure_from_disk(subject, rounds=1, limit=None)
    assert (naive.rival, naive.target) == ("load on miss, LRU", ">= 3")
    assert "from the disk" in str(naive.note)
    assert whole.target is None
    assert parts.target is None
    assert budget.target == "<= 1.0"
    for row in (parts, budget):
        assert row.unit == "MB"
        assert row.ours
        assert row.theirs


@pytest.mark.all
def test_prompts_are_compared_with_transformers(subject: BenchmarkedBase) -> None:
    [row] = measure_prompts(subject, Scheme.FLOAT32, rounds=1)
    assert row.target == ">= 2"
    assert row.ours
    assert "float32" in str(row.note)
