"""When a graph is loaded; searches find the same either way."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from expertctl.reference import Digest
from expertctl.routing import vector_search as searchings
from expertctl.routing.vector_files import VectorFiles
from expertctl.routing.vector_search import (
    GRAPH_FILE,
    GraphRecord,
    VectorSearcher,
    build_graph,
    save_graph,
)
from expertctl.routing.vector_table import SearchHits, VectorTable
from tests.routing.vector_tables import DIMENSIONS, make_clusters, make_expert_digest

pytestmark = pytest.mark.skipif(
    find_spec("hnswlib") is None, reason="the extra `ann` is not installed"
)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VectorTable:
    """A table on the disk with its graph, large enough for one."""
    monkeypatch.setattr(searchings, "GRAPH_ROWS", 100)
    written = VectorFiles(tmp_path, dimensions=DIMENSIONS).replace(make_clusters(100))
    graph = build_graph(written)
    assert graph is not None
    save_graph(tmp_path, graph, written)
    return written


def run(searching: VectorSearcher, table: VectorTable, row: int = 0) -> SearchHits:
    return searching.search(table, table.rows[row], count=8, allowed=None)


def uses_graph(searching: VectorSearcher, table: VectorTable) -> bool:
    """Tell whether it finds the owners of the eight closest rows, not the eight closest."""
    return len(run(searching, table)) < 8


def test_a_process_that_searches_once_loads_nothing(tmp_path: Path, table: VectorTable) -> None:
    assert not uses_graph(VectorSearcher(tmp_path), table)


def test_a_process_that_is_prepared_uses_the_graph_at_once(
    tmp_path: Path, table: VectorTable
) -> None:
    searching = VectorSearcher(tmp_path)
    searching.load(table)
    assert uses_graph(searching, table)
    assert run(searching, table).experts[0] == 0


def test_the_graph_is_loaded_once_exact_searches_have_taken_as_long(
    tmp_path: Path, table: VectorTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphRecord, "load_seconds", 3.5)
    clock = iter(range(100))
    monkeypatch.setattr(searchings.time, "perf_counter", lambda: next(clock))
    searching = VectorSearcher(tmp_path)
    used = [uses_graph(searching, table) for _ in range(6)]
    assert used == [False] * 4 + [True] * 2


def test_a_small_table_and_one_without_a_graph_are_searched_exactly(
    tmp_path: Path, table: VectorTable
) -> None:
    (tmp_path / GRAPH_FILE).unlink()
    searching = VectorSearcher(tmp_path)
    searching.load(table)
    assert not uses_graph(searching, table)
    small = make_clusters(9)
    searching.load(small)
    assert len(run(searching, small)) == 8


def test_a_graph_is_not_used_for_another_table(tmp_path: Path, table: VectorTable) -> None:
    searching = VectorSearcher(tmp_path)
    searching.load(table)
    other = VectorFiles(tmp_path, dimensions=DIMENSIONS).replace(
        make_clusters(100, seed=7, name="f")
    )
    assert not uses_graph(searching, other)


@pytest.mark.parametrize("absorbed", [10, 0])
def test_what_came_later_is_found_whether_the_graph_takes_it_in_or_not(
    tmp_path: Path, table: VectorTable, absorbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searchings, "MAX_ABSORBED_ROWS", absorbed)
    files = VectorFiles(tmp_path, dimensions=DIMENSIONS)
    files.read()
    new = np.eye(DIMENSIONS, dtype=np.float32)[:1]
    grown = files.append({make_expert_digest(0, name="new"): new, Digest.compute(b"more"): -new})
    searching = VectorSearcher(tmp_path)
    searching.load(grown)
    found = searching.search(grown, new[0], count=8, allowed=None)
    assert found.experts[0] == 100
    assert found.cosines[0] == pytest.approx(1)
    assert uses_graph(searching, grown)
