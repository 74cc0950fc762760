"""With hnswlib, where it is installed; without it, search is exact and nothing is missed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from expertctl.digest import Digest
from expertctl.routing import graph as graphs
from expertctl.routing import index as indexes
from expertctl.routing.graph import GRAPH_FILE, RECORD_FILE, build_graph, load_graph
from expertctl.routing.index import RoutingIndex
from expertctl.routing.lexical import LexicalEncoder
from expertctl.routing.vector_table import VectorTable
from tests.routing.experts import content_digest, manifest

needs_hnswlib = pytest.mark.skipif(
    find_spec("hnswlib") is None, reason="the extra `ann` is not installed"
)
EXPERTS = {
    content_digest(m.ref): m
    for m in (
        manifest(f"acme/e{n}", description=f"does job{n} things", examples=(f"do job{n} now",))
        for n in range(40)
    )
}


def rows(count: int = 300, *, seed: int = 0) -> VectorTable:
    drawn = np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)
    unit = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    empty = VectorTable.empty(encoder=Digest.of(b"e"), stamp="s", dimensions=16)
    return empty.with_entries(
        {Digest.of(bytes([n % 256, n // 256])): unit[n : n + 1] for n in range(count)}
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is large enough for a graph with a few rows, and a graph that sees few."""
    monkeypatch.setattr(indexes, "GRAPH_ROWS", 10)
    monkeypatch.setattr(graphs, "NEAREST", 6)


def test_without_hnswlib_there_is_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    monkeypatch.setattr(graphs, "find_spec", lambda _: None)
    assert build_graph(tmp_path, rows()) is None
    assert load_graph(tmp_path, rows()) is None
    assert list(tmp_path.iterdir()) == []


@needs_hnswlib
def test_a_graph_finds_the_closest_rows_that_exact_search_finds(tmp_path: Path) -> None:
    table = rows()
    built = build_graph(tmp_path, table)
    loaded = load_graph(tmp_path, table)
    assert built is not None
    assert loaded is not None
    for query in table.rows[::25]:
        exact = set(np.argsort(-(table.rows @ query))[:10].tolist())
        assert exact <= set(built.nearest(query).tolist())
        assert exact <= set(loaded.nearest(query).tolist())
    assert {p.name for p in tmp_path.iterdir()} == {GRAPH_FILE, RECORD_FILE}


@needs_hnswlib
@pytest.mark.parametrize("name", [GRAPH_FILE, RECORD_FILE])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "other"])
def test_a_graph_that_is_not_the_recorded_one_is_never_loaded(
    tmp_path: Path, name: str, damage: str
) -> None:
    table = rows()
    build_graph(tmp_path, table)
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
def test_a_graph_of_other_rows_is_not_used(tmp_path: Path) -> None:
    build_graph(tmp_path, rows())
    assert load_graph(tmp_path, rows(299)) is None
    assert load_graph(tmp_path, rows()) is not None


@needs_hnswlib
@pytest.mark.usefixtures("small")
def test_a_large_index_is_searched_through_the_graph_from_the_second_search_on(
    tmp_path: Path,
) -> None:
    RoutingIndex(tmp_path, LexicalEncoder()).rebuild(EXPERTS)
    assert (tmp_path / GRAPH_FILE).exists()
    index = RoutingIndex(tmp_path, LexicalEncoder())
    exact = index.similarities("do job7 now")
    assert len(exact) == len(EXPERTS)
    always = [content_digest("acme/e39@1.0.0")]
    near = index.similarities("do job7 now", always=always)
    assert len(near) < len(EXPERTS)
    assert set(always) <= set(near)
    best = max(exact, key=lambda digest: exact[digest].cosine)
    assert best == content_digest("acme/e7@1.0.0")
    assert near[best] == exact[best]
    assert all(near[digest] == exact[digest] for digest in always)


@needs_hnswlib
@pytest.mark.usefixtures("small")
def test_a_new_expert_makes_search_exact_until_the_graph_is_built_again(tmp_path: Path) -> None:
    index = RoutingIndex(tmp_path, LexicalEncoder())
    index.rebuild(EXPERTS)
    new = manifest("acme/new", description="brand new")
    index.add({content_digest(new.ref): new})
    index.similarities("first")
    assert len(index.similarities("second")) == len(EXPERTS) + 1
