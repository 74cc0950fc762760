"""Whatever way a search takes, it finds what comparing every row by hand finds."""

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.routing import vector_search as nearests
from expertctl.routing.vector_search import HnswGraph, build_graph, find_nearest, find_nearest_exact
from expertctl.routing.vector_table import SearchFilter, SearchHits, Vectors, VectorTable
from tests.routing.vector_tables import DIMENSIONS, TEXTS, make_clusters, make_expert_digest

needs_hnswlib = pytest.mark.skipif(
    find_spec("hnswlib") is None, reason="the extra `ann` is not installed"
)
EXPERTS = 400
TABLE = make_clusters(EXPERTS)


def prompts(count: int = 40) -> Vectors:
    """Prompts that are close to some expert, yet to none of its texts."""
    rng = np.random.default_rng(11)
    centres = TABLE.rows.reshape(EXPERTS, TEXTS, -1).mean(axis=1)[rng.permutation(EXPERTS)[:count]]
    moved = centres + 0.2 * rng.standard_normal(centres.shape)
    unit: Vectors = (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)
    return unit


def by_hand(table: VectorTable, query: Vectors, mask: np.ndarray) -> list[tuple[int, float, int]]:
    """Every expert that may be found with its best cosine and text, the closest first."""
    best = []
    for position in np.flatnonzero(mask):
        cosines = table.rows[table.select_rows(np.array([position]))] @ query
        best.append((int(position), float(cosines.max()), int(cosines.argmax())))
    return sorted(best, key=lambda each: -each[1])


def list_found(found: SearchHits) -> list[tuple[int, float, int]]:
    texts, cosines = found.texts.tolist(), found.cosines.tolist()
    return list(zip(found.experts.tolist(), cosines, texts, strict=True))


def same(found: SearchHits, expected: list[tuple[int, float, int]]) -> bool:
    pairs = zip(list_found(found), expected, strict=True)
    return all(a[::2] == b[::2] and a[1] == pytest.approx(b[1], abs=1e-6) for a, b in pairs)


def some(share: float, *, seed: int = 3) -> SearchFilter:
    mask = np.random.default_rng(seed).random(EXPERTS) < share
    mask[0] = True
    return SearchFilter(TABLE, mask)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("count", [1, 10, EXPERTS])
def test_exact_search_finds_what_one_finds_by_hand(share: float, count: int) -> None:
    allowed = some(share)
    for query in prompts(5):
        expected = by_hand(TABLE, query, allowed.mask)[:count]
        assert same(find_nearest_exact(TABLE, query, count=count, allowed=allowed), expected)
        if share == 1.0:
            assert same(find_nearest(TABLE, query, count=count), expected)


def test_of_equal_rows_the_first_counts() -> None:
    table = make_clusters(3)
    doubled = table.add_entries({make_expert_digest(9): table.rows[[5, 5, 4]]})
    found = find_nearest_exact(doubled, table.rows[5], count=4)
    assert (found.experts[:2].tolist(), found.texts[:2].tolist()) == ([0, 3], [5, 0])


def test_nothing_is_found_among_nothing() -> None:
    none = SearchFilter(TABLE, np.zeros(EXPERTS, np.bool_))
    query = prompts(1)[0]
    assert len(find_nearest_exact(TABLE, query, count=5, allowed=none)) == 0
    assert len(find_nearest_exact(TABLE, query, count=0)) == 0
    assert len(find_nearest_exact(make_clusters(0), query, count=5)) == 0


@settings(deadline=None, max_examples=30)
@given(st.sets(st.integers(0, EXPERTS - 1), min_size=1), st.integers(1, 12))
def test_any_filter_lets_through_what_it_says_and_nothing_else(names: set[int], count: int) -> None:
    mask = np.isin(np.arange(EXPERTS), list(names))
    query = prompts(1)[0]
    found = find_nearest(TABLE, query, count=count, allowed=SearchFilter(TABLE, mask))
    assert same(found, by_hand(TABLE, query, mask)[:count])


def test_a_filter_lets_through_nothing_that_came_later_or_died() -> None:
    allowed = some(0.5)
    grown = TABLE.append_entries(
        {make_expert_digest(0, name="new"): TABLE.rows[:2]}, TABLE.rows
    ).mark_dead(np.array([0]))
    now = allowed.extend_to(grown)
    assert now.mask.tolist() == [False, *allowed.mask[1:].tolist(), False]
    assert allowed.extend_to(TABLE) is allowed
    with pytest.raises(AssertionError, match="positions that are no more"):
        allowed.extend_to(VectorTable(**{**vars_of(TABLE), "generation": "another"}))


def vars_of(table: VectorTable) -> dict[str, object]:
    names = ("encoder", "stamp", "keys", "counts", "alive", "rows", "generation")
    return {name: getattr(table, name) for name in names}


@pytest.fixture(scope="module")
def graph() -> HnswGraph:
    built = build_graph(TABLE)
    assert built is not None
    return built


def ten_recall(search: Callable[[Vectors], SearchHits], allowed: SearchFilter) -> float:
    """The share of the ten closest rows whose experts a search finds."""
    hits = 0
    for query in prompts():
        cosines = np.where(allowed.mask[TABLE.owners], TABLE.rows @ query, -2)
        ten = np.argsort(-cosines)[:10]
        ten = ten[cosines[ten] > -2]
        hits += np.isin(TABLE.owners[ten], search(query).experts).sum() * 10 // len(ten)
    return hits / (10 * len(prompts()))


@needs_hnswlib
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01, 0.001])
def test_filters_keep_recall(
    graph: HnswGraph, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = some(share)
    for rows_per_link in (0, 1, nearests.ROWS_PER_LINK):
        monkeypatch.setattr(nearests, "ROWS_PER_LINK", rows_per_link)

        def search(query: Vectors) -> SearchHits:
            return find_nearest(TABLE, query, count=32, allowed=allowed, graph=graph)

        assert ten_recall(search, allowed) >= 0.99


@needs_hnswlib
@pytest.mark.parametrize("rows_per_link", [0, nearests.ROWS_PER_LINK])
def test_a_filter_that_shuts_out_all_that_is_near_is_kept_too(
    graph: HnswGraph, rows_per_link: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearests, "ROWS_PER_LINK", rows_per_link)
    for query in prompts(10):
        near = find_nearest_exact(TABLE, query, count=EXPERTS // 2).experts
        mask = np.ones(EXPERTS, np.bool_)
        mask[near] = False
        found = find_nearest(TABLE, query, count=10, allowed=SearchFilter(TABLE, mask), graph=graph)
        assert mask[found.experts].all()
        assert found.experts[0] == by_hand(TABLE, query, mask)[0][0]


@needs_hnswlib
def test_a_graph_gives_the_cosines_of_the_rows_themselves(graph: HnswGraph) -> None:
    for query in prompts(10):
        for position, cosine, text in list_found(find_nearest(TABLE, query, count=16, graph=graph)):
            row = TABLE.rows[TABLE.starts[position] + text]
            assert cosine == pytest.approx(float(row @ query), abs=1e-6)


@needs_hnswlib
@pytest.mark.parametrize("later", [1, 30])
def test_rows_that_came_after_the_graph_are_found_as_well(graph: HnswGraph, later: int) -> None:
    query = prompts(1)[0]
    others = make_clusters(later, seed=8, name="far").rows.reshape(later, TEXTS, -1)
    added = {make_expert_digest(n, name="far"): rows for n, rows in enumerate(others)}
    grown = TABLE.add_entries({**added, make_expert_digest(0, name="new"): query[None]})
    position = len(grown) - 1
    assert find_nearest(grown, query, count=8, graph=graph).experts[0] == position
    everyone = SearchFilter(grown, np.ones(len(grown), np.bool_))
    assert find_nearest(grown, query, count=8, allowed=everyone, graph=graph).experts[0] == position
    nobody_new = some(0.9).extend_to(grown)
    assert (
        position not in find_nearest(grown, query, count=8, allowed=nobody_new, graph=graph).experts
    )


@needs_hnswlib
def test_a_graph_that_cannot_answer_is_not_asked_twice(graph: HnswGraph) -> None:
    class Broken:
        def set_ef(self, _: int) -> None: ...

        def knn_query(self, *_: object, **__: object) -> None:
            raise RuntimeError("Cannot return the results in a contiguous 2D array")

    broken = HnswGraph(Broken(), graph.rows, graph.width, graph.recall)
    query = prompts(1)[0]
    for allowed in (None, some(0.95)):
        expected = find_nearest_exact(TABLE, query, count=5, allowed=allowed)
        assert list_found(
            find_nearest(TABLE, query, count=5, allowed=allowed, graph=broken)
        ) == list_found(expected)


@needs_hnswlib
@pytest.mark.parametrize("packages", [1, 4, 6])
def test_packages_with_many_close_texts_do_not_hide_all_others(packages: int) -> None:
    query, rng = TABLE.rows[8], np.random.default_rng(3)
    rows = query + 0.02 * rng.standard_normal((packages, 201, DIMENSIONS))
    close = (rows / np.linalg.norm(rows, axis=2, keepdims=True)).astype(np.float32)
    flooded = TABLE.add_entries(
        {make_expert_digest(n, name="flood"): close[n] for n in range(packages)}
    )
    for allowed in (None, SearchFilter(flooded, flooded.alive)):
        flooded_graph = build_graph(flooded)
        found = find_nearest(flooded, query, count=160, allowed=allowed, graph=flooded_graph)
        assert len(found) >= 10
        assert {1, *range(len(TABLE), len(flooded))} <= set(found.experts.tolist())
