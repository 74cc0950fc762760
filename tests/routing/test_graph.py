"""With hnswlib, where it is installed; without it, search is exact and nothing is missed."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from expertctl.reference import Digest
from expertctl.routing import vector_search as graphs
from expertctl.routing.vector_search import (
    GRAPH_FILE,
    RECORD_FILE,
    HnswGraph,
    build_graph,
    load_graph,
    read_record,
    remove_graph,
    save_graph,
)
from expertctl.routing.vector_table import VectorTable
from tests.routing.vector_tables import make_clusters, make_table
from tests.store.fault_injection import Fault, run_with_fault

needs_hnswlib = pytest.mark.skipif(
    find_spec("hnswlib") is None, reason="the extra `ann` is not installed"
)


def saved(folder: Path, table: VectorTable) -> HnswGraph:
    graph = build_graph(table)
    assert graph is not None
    save_graph(folder, graph, table)
    return graph


def ten(table: VectorTable, query: np.ndarray) -> set[int]:
    return set(np.argsort(-(table.rows @ query))[:10].tolist())


def found_of(graph: HnswGraph, query: np.ndarray) -> set[int]:
    found = graph.find_closest(query, 10)
    assert found is not None
    return set(found.rows.tolist())


def test_without_hnswlib_there_is_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    monkeypatch.setattr(graphs, "find_spec", lambda _: None)
    assert build_graph(make_clusters(30)) is None
    assert load_graph(tmp_path, make_clusters(30)) is None
    assert read_record(tmp_path, make_clusters(30)) is None


@needs_hnswlib
def test_a_graph_finds_the_closest_rows_that_exact_search_finds(tmp_path: Path) -> None:
    table = make_clusters(60)
    built = saved(tmp_path, table)
    loaded = load_graph(tmp_path, table)
    assert loaded is not None
    assert (loaded.rows, loaded.width) == (built.rows, built.width)
    for graph in (built, loaded):
        hits = [found_of(graph, query) & ten(table, query) for query in table.rows[::25]]
        assert sum(map(len, hits)) / (10 * len(hits)) >= 0.99
    assert {p.name for p in tmp_path.iterdir()} == {GRAPH_FILE, RECORD_FILE}
    assert (tmp_path / GRAPH_FILE).stat().st_mode & 0o777 == 0o600


@needs_hnswlib
def test_the_width_of_search_is_the_smallest_that_finds_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_clusters(150)
    saved(tmp_path, table)
    record = read_record(tmp_path, table)
    assert record is not None
    assert record.recall >= 0.99
    assert record.load_seconds > 0
    monkeypatch.setattr(graphs, "RECALL", 1.0)
    wider = build_graph(table)
    assert wider is not None
    assert record.width <= wider.width
    assert wider.recall == 1.0


@needs_hnswlib
def test_a_graph_that_finds_too_little_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RECALL", 1.1)
    assert build_graph(make_clusters(30)) is None


@needs_hnswlib
def test_a_graph_returns_nothing_rather_than_less_than_it_was_asked_for() -> None:
    graph = build_graph(make_clusters(10))
    assert graph is not None
    assert graph.find_closest(make_clusters(10).rows[0], 10**6) is None


@needs_hnswlib
@pytest.mark.parametrize("name", [GRAPH_FILE, RECORD_FILE])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "other"])
def test_a_graph_that_is_not_the_recorded_one_is_never_loaded(
    tmp_path: Path, name: str, damage: str
) -> None:
    table = make_clusters(30)
    saved(tmp_path, table)
    path = tmp_path / name
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "flip":
            path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        case "remove":
            path.unlink()
        case _:
            path.write_bytes(b"{}")
    assert load_graph(tmp_path, table) is None


@needs_hnswlib
@pytest.mark.parametrize(
    "table",
    [make_clusters(29), make_clusters(30, seed=1, name="f"), make_clusters(30, encoder=b"other")],
    ids=["fewer", "others", "encoder"],
)
def test_a_graph_of_other_rows_is_not_used(tmp_path: Path, table: VectorTable) -> None:
    saved(tmp_path, make_clusters(30))
    assert load_graph(tmp_path, table) is None
    assert load_graph(tmp_path, make_clusters(30)) is not None


@needs_hnswlib
def test_a_graph_covers_the_first_rows_of_a_table_that_grew_and_takes_in_the_rest(
    tmp_path: Path,
) -> None:
    table = make_clusters(30)
    saved(tmp_path, table)
    new = make_clusters(1, seed=5, name="new").rows
    grown = table.add_entries({Digest.compute(b"new"): new})
    graph = load_graph(tmp_path, grown)
    assert graph is not None
    assert graph.rows == len(table.rows)
    all_of_it = graph.absorb(grown)
    assert all_of_it.rows == len(grown.rows)
    found = all_of_it.find_closest(new[0], 5)
    assert found is not None
    assert found.rows[0] == len(table.rows)
    save_graph(tmp_path, all_of_it, grown)
    again = load_graph(tmp_path, grown)
    assert again is not None
    assert again.rows == len(grown.rows)
    assert load_graph(tmp_path, table) is None  # it knows rows that this table has not


@needs_hnswlib
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".hnsw-left").mkdir()
    (tmp_path / ".hnsw-left" / GRAPH_FILE).write_bytes(b"half")
    saved(tmp_path, make_clusters(30))
    assert {p.name for p in tmp_path.iterdir()} == {GRAPH_FILE, RECORD_FILE}


@needs_hnswlib
def test_what_is_dead_is_not_built_in() -> None:
    table = make_clusters(40)
    graph = build_graph(table.mark_dead(np.arange(0, 40, 2)))
    assert graph is not None
    assert graph.index.get_current_count() == len(table.rows) // 2
    found = graph.find_closest(table.rows[0], 20)
    assert found is not None
    assert (table.owners[found.rows] % 2 == 1).all()


@needs_hnswlib
def test_one_entry_is_enough_for_a_graph() -> None:
    table = make_table({Digest.compute(b"one"): make_clusters(1).rows[:1]})
    graph = build_graph(table)
    assert graph is not None
    query = make_clusters(2).rows[-1]
    found = graph.find_closest(query, 1)
    assert found is not None
    assert found.rows.tolist() == [0]
    assert found.cosines == pytest.approx(table.rows @ query, abs=1e-6)


@needs_hnswlib
def test_a_graph_is_removed_with_its_record(tmp_path: Path) -> None:
    saved(tmp_path, make_clusters(30))
    remove_graph(tmp_path)
    remove_graph(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.all
@needs_hnswlib
@pytest.mark.skipif(os.name != "posix", reason="forks")
@pytest.mark.parametrize("fault", ["kill", "error"])
def test_a_graph_whose_saving_went_wrong_is_the_old_one_or_none(
    tmp_path: Path, fault: Fault
) -> None:
    old, new = (
        make_clusters(20),
        make_clusters(20).add_entries({Digest.compute(b"new"): make_clusters(1).rows}),
    )
    graph = build_graph(new)
    assert graph is not None
    saved(tmp_path, old)
    steps = len(run_with_fault(lambda: save_graph(tmp_path, graph, new)).steps)
    seen = set()
    for step in range(1, steps + 1):
        saved(tmp_path, old)
        run_with_fault(lambda: save_graph(tmp_path, graph, new), at=step, fault=fault)
        left = load_graph(tmp_path, new)
        seen.add(None if left is None else left.rows)
        if left is not None:
            assert ten(old, old.rows[0]) & found_of(left, old.rows[0])
    assert seen <= {None, len(old.rows), len(new.rows)}
    assert len(old.rows) in seen


def test_rows_are_held_out_evenly_of_all_experts() -> None:
    table = make_table(
        {Digest.compute(bytes([n])): make_clusters(1, seed=n).rows[: 1 + n] for n in range(6)}
    )
    spread = graphs._interleave_rows(table, np.arange(len(table.rows)))
    assert sorted(spread.tolist()) == list(range(len(table.rows)))
    turns = [6, 5, 4, 3, 2, 1]  # so many experts have a first row, a second, and so on
    for turn, ends in zip(turns, np.cumsum(turns).tolist(), strict=True):
        owners = table.owners[spread[ends - turn : ends]].tolist()
        assert sorted(owners) == list(range(6 - turn, 6))
    assert spread.tolist() == graphs._interleave_rows(table, np.arange(len(table.rows))).tolist()
