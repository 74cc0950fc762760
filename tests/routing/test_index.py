import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from expertctl.errors import DiskFullError, StoreError
from expertctl.reference import Digest
from expertctl.routing import index as index_module
from expertctl.routing import index as indexes
from expertctl.routing import vector_files, vector_search
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import LOCK_FILE, RERANK_FOLDER, RoutingIndex
from expertctl.routing.vector_files import JOURNAL_FILE
from expertctl.routing.vector_search import GRAPH_FILE, HnswGraph, build_graph
from expertctl.routing.vector_table import EncodedTexts, SearchFilter, Vectors, VectorTable
from expertctl.schema.manifest import Manifest
from tests.routing.experts import make_content_digest, make_manifest
from tests.routing.vector_tables import encode_prompt, find_closest

needs_hnswlib = pytest.mark.skipif(
    find_spec("hnswlib") is None, reason="the extra `ann` is not installed"
)
SORT = make_manifest(
    "acme/sort", description="Sorts numbers.", examples=("Sort these numbers: 3, 1, 2",)
)
SQL = make_manifest("acme/sql", examples=("Write an SQL query for users", "Query the orders table"))


def texts(*manifests: Manifest) -> dict[Digest, Manifest]:
    return {make_content_digest(m.ref): m for m in manifests}


BOTH = texts(SORT, SQL)


class OtherEncoder(LexicalEncoder):
    """The same rows under the name of other weights, counting how often it is asked."""

    def __init__(self, version: str) -> None:
        self.stamp = version
        self.encoded: list[str] = []

    def digest(self) -> Digest:
        return Digest.compute(self.stamp.split("@")[0].encode())

    def encode(self, listed: Any) -> Vectors:
        self.encoded += listed
        return super().encode(listed)


def test_an_expert_is_as_close_as_its_closest_text(index: RoutingIndex) -> None:
    index.add(BOTH)
    found = find_closest(index, "query the orders table")
    assert found[make_content_digest(SQL.ref)] == (pytest.approx(1), 2)
    assert found[make_content_digest(SORT.ref)][0] < 0.1
    assert find_closest(index, "Sorts numbers.")[make_content_digest(SORT.ref)][1] == 0
    index.check_integrity()


def test_of_equal_texts_the_first_is_named(index: RoutingIndex) -> None:
    doubled = make_manifest("acme/twice", examples=("sort it", "SORT it"))
    index.add(texts(doubled))
    assert find_closest(index, "sort it")[make_content_digest(doubled.ref)][1] == 1


def test_an_empty_index_finds_nothing_and_writes_nothing(index: RoutingIndex) -> None:
    assert find_closest(index, "anything") == {}
    assert not index.folder.exists()


def test_vectors_are_kept_and_not_made_again(tmp_path: Path) -> None:
    RoutingIndex(tmp_path, OtherEncoder("one")).add(BOTH)
    again = OtherEncoder("one")
    index = RoutingIndex(tmp_path, again)
    index.add(BOTH)
    assert again.encoded == []
    assert set(index.table.digests) == set(BOTH)
    for name in (JOURNAL_FILE, LOCK_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_another_encoder_makes_all_vectors_again(tmp_path: Path) -> None:
    RoutingIndex(tmp_path, OtherEncoder("one")).add(BOTH)
    other = OtherEncoder("two")
    RoutingIndex(tmp_path, other).add(BOTH)
    assert len(other.encoded) == 7  # two descriptions, three examples, two names
    RoutingIndex(tmp_path, other).check_integrity()
    index = RoutingIndex(tmp_path, other)
    assert index.table.digests
    index._rows.encoder = OtherEncoder("three")
    with pytest.raises(StoreError, match="made by another encoder"):
        index.check_integrity()


def test_the_same_weights_in_another_place_are_recognised_by_their_digest(tmp_path: Path) -> None:
    RoutingIndex(tmp_path, OtherEncoder("one@here")).add(BOTH)
    moved = OtherEncoder("one@there")
    RoutingIndex(tmp_path, moved).add(BOTH)
    assert moved.encoded == []


@pytest.mark.parametrize(
    "data", [b"", b"x" * 100, b"\x80\x04\x95pickle", b"\xff" * 8 + b"{}", b"\x02\0\0\0\0\0\0\0{}"]
)
def test_a_damaged_file_is_made_again(index: RoutingIndex, data: bytes) -> None:
    index.add(BOTH)
    (index.folder / JOURNAL_FILE).write_bytes(data)
    fresh = RoutingIndex(index.folder, LexicalEncoder())
    fresh.add(BOTH)
    assert set(fresh.table.digests) == set(BOTH)
    fresh.check_integrity()


def test_the_files_can_be_deleted_at_any_time(index: RoutingIndex) -> None:
    index.add(BOTH)
    for path in list(index.folder.rglob("*")):
        if path.is_file():
            path.unlink()
    fresh = RoutingIndex(index.folder, LexicalEncoder())
    fresh.add(BOTH)
    assert (index.folder / JOURNAL_FILE).exists()


def test_experts_are_forgotten_and_all_made_again(index: RoutingIndex) -> None:
    index.add(BOTH)
    index.remove([make_content_digest(SQL.ref), make_content_digest("acme/unknown@1.0.0")])
    assert set(RoutingIndex(index.folder, LexicalEncoder()).table.digests) == set(texts(SORT))
    index.rebuild(texts(SQL))
    assert set(index.table.digests) == set(texts(SQL))
    index.rebuild({})
    assert find_closest(index, "sql") == {}
    index.check_integrity()


def test_an_unwritable_home_keeps_vectors_in_memory_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    index = RoutingIndex(tmp_path / "file" / "home", LexicalEncoder())
    index.add(BOTH)
    assert set(index.table.digests) == set(BOTH)
    assert index.notes[0].startswith("the routing index was not saved: ")


def test_a_full_disk_keeps_vectors_in_memory(
    index: RoutingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    index.add(BOTH)
    assert set(index.table.digests) == set(BOTH)
    assert "No space left" in index.notes[0]
    index.remove(BOTH)
    assert find_closest(index, "sort") == {}
    with pytest.raises(DiskFullError):
        index.rebuild(BOTH)
    assert {path.name for path in index.folder.rglob("*")} <= {RERANK_FOLDER, LOCK_FILE}


def test_a_prompt_is_encoded_once_for_several_bases(tmp_path: Path) -> None:
    encoder = OtherEncoder("one")
    index = RoutingIndex(tmp_path, encoder)
    index.add(BOTH)
    encoder.encoded.clear()
    assert find_closest(index, "sort") == find_closest(index, "sort")
    assert index.encode_prompt("other").rows.shape == (1, encoder.dimensions)
    assert encoder.encoded == ["sort", "other"]


def test_a_lock_that_is_held_for_too_long_is_no_deadlock(
    index: RoutingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "LOCK_SECONDS", 0.05)
    index.folder.mkdir()
    with FileLock(index.folder / LOCK_FILE):
        index.add(BOTH)
        with pytest.raises(StoreError, match="locked for too long"):
            index.rebuild(BOTH)
    assert set(index.table.digests) == set(BOTH)
    assert "locked for too long" in index.notes[0]


def test_what_another_process_published_meanwhile_is_kept(index: RoutingIndex) -> None:
    other = RoutingIndex(index.folder, LexicalEncoder())
    index.add(texts(SORT))
    assert other.table.digests  # read before the next one writes
    other.add(texts(SORT, SQL))
    index.add(texts(make_manifest("acme/third")))
    assert len(RoutingIndex(index.folder, LexicalEncoder()).table.digests) == 3


def test_integrity_names_a_row_that_is_not_a_unit(index: RoutingIndex) -> None:
    index.add(BOTH)
    table = index.table
    table.rows[0] *= 0.5
    with pytest.raises(StoreError, match="unit length"):
        index.check_integrity()
    table.rows[0] *= 2
    assert np.isfinite(table.rows).all()


def admit(index: RoutingIndex, digests: Iterable[Digest]) -> SearchFilter:
    mask = np.zeros(len(index.table), np.bool_)
    mask[index.find_positions(digests)] = True
    return SearchFilter(index.table, mask)


def test_a_search_names_positions_and_the_closest_text_of_each(index: RoutingIndex) -> None:
    index.add(BOTH)
    found = index.search(encode_prompt(index, "query the orders table"))
    assert [index.table.digest_at(position) for position in found.experts] == [
        make_content_digest(SQL.ref),
        make_content_digest(SORT.ref),
    ]
    assert found.cosines[0] == pytest.approx(1)
    assert found.texts[0] == 2
    only = admit(index, [make_content_digest(SORT.ref), make_content_digest("acme/absent@1.0.0")])
    assert index.search(encode_prompt(index, "query"), allowed=only).experts.tolist() == [0]
    measured = index.measure_similarity(
        encode_prompt(index, "query"), index.find_positions([make_content_digest(SQL.ref)])
    )
    assert measured.experts.tolist() == [1]


def test_the_rows_of_an_expert_are_those_of_its_texts(index: RoutingIndex) -> None:
    index.add(BOTH)
    at = index.find_positions(
        [make_content_digest(SORT.ref), make_content_digest("acme/absent@1.0.0")]
    )
    rows = index.table.rows[index.table.select_rows(at)]
    texts_ = ["Sorts numbers.", "Sort these numbers: 3, 1, 2", "sort"]
    assert np.array_equal(rows, index.encoder.encode(texts_))


def test_forgetting_much_writes_what_is_left_anew(index: RoutingIndex) -> None:
    many = texts(*(make_manifest(f"acme/e{n}", examples=(f"do {n}",)) for n in range(10)))
    index.add(many)
    revision = index.revision
    index.remove(list(many)[:3])
    assert index.find_positions(many).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert index.revision != revision
    index.remove(list(many)[3:5])
    assert index.find_positions(many).tolist() == [0, 1, 2, 3, 4]
    assert set(index.table.digests) == set(list(many)[5:])
    assert [index.table.digest_at(n) for n in range(5)] == list(many)[5:]
    index.check_integrity()


def test_what_was_forgotten_is_never_found_and_may_come_back(index: RoutingIndex) -> None:
    many = texts(*(make_manifest(f"acme/e{n}", examples=(f"do job{n} now",)) for n in range(10)))
    index.add(many)
    gone = list(many)[7]
    everyone = admit(index, many)
    index.remove([gone])
    for allowed in (None, everyone):
        found = index.search(encode_prompt(index, "do job7 now"), allowed=allowed)
        assert gone not in {index.table.digest_at(at) for at in found.experts}
    index.add({gone: many[gone]})
    found = index.search(encode_prompt(index, "do job7 now"))
    assert index.table.digest_at(found.experts[0]) == gone


def test_a_process_that_did_not_see_a_removal_forgets_too_when_it_writes(
    index: RoutingIndex,
) -> None:
    other = RoutingIndex(index.folder, LexicalEncoder())
    index.add(BOTH)
    assert set(other.table.digests) == set(BOTH)
    index.remove([make_content_digest(SQL.ref)])
    other.remove([make_content_digest(SQL.ref)])
    assert set(other.table.digests) == set(texts(SORT))


def test_a_row_that_was_changed_on_the_disk_is_told(
    index: RoutingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_files, "CHECKED_BYTES", 0)
    index.add(BOTH)
    (path,) = index.folder.glob(vector_files.ROWS_GLOB)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="changed after they were written"):
        RoutingIndex(index.folder, LexicalEncoder()).check_integrity()


def test_rows_without_an_expert_are_told(index: RoutingIndex) -> None:
    index.add(BOTH)
    index._rows._table = replace(index.table, counts=index.table.counts - 1)
    with pytest.raises(StoreError, match="rows without an expert"):
        index.check_integrity()


def test_the_rows_of_the_head_come_of_the_same_pass(tmp_path: Path) -> None:
    encoder = OtherEncoder("one")
    index = RoutingIndex(tmp_path, encoder)
    index.add(BOTH)
    assert len(encoder.encoded) == 7
    deep = index.rerank_table
    at = deep.find_positions([make_content_digest(SQL.ref)])
    texts_ = [SQL.description, *SQL.routing.examples]
    assert np.array_equal(deep.rows[deep.select_rows(at)], encoder.encode(texts_))
    index.remove([make_content_digest(SQL.ref)])
    assert index.rerank_table.digests == [make_content_digest(SORT.ref)]
    index.rebuild(texts(SQL))
    assert index.rerank_table.digests == [make_content_digest(SQL.ref)]


@pytest.mark.parametrize("gone", ["", RERANK_FOLDER])
def test_where_either_half_is_lost_it_is_made_again_and_the_other_stays(
    tmp_path: Path, gone: str
) -> None:
    RoutingIndex(tmp_path, LexicalEncoder()).add(BOTH)
    kept = tmp_path / (RERANK_FOLDER if not gone else "") / JOURNAL_FILE
    size = kept.stat().st_size
    (tmp_path / gone / JOURNAL_FILE).unlink()
    fresh = RoutingIndex(tmp_path, LexicalEncoder())
    fresh.add(BOTH)
    assert set(fresh.table.digests) == set(fresh.rerank_table.digests) == set(BOTH)
    assert kept.stat().st_size == size
    fresh.check_integrity()


def test_many_experts_are_published_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "BATCH", 4)
    encoder = OtherEncoder("one")
    many = texts(*(make_manifest(f"acme/e{n}") for n in range(10)))

    def encode_deep(listed: Any) -> EncodedTexts:
        if len(encoder.encoded) >= 16:
            raise KeyboardInterrupt
        return EncodedTexts.from_rows(encoder.encode(listed))

    monkeypatch.setattr(encoder, "encode_for_rerank", encode_deep)
    with pytest.raises(KeyboardInterrupt):
        RoutingIndex(tmp_path, encoder).add(many)
    assert RoutingIndex(tmp_path, encoder).table.digests == list(many)[:8]


@needs_hnswlib
def test_making_all_again_builds_a_graph_where_it_pays_and_removes_it_where_not(
    index: RoutingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "GRAPH_ROWS", 60)
    monkeypatch.setattr(vector_search, "GRAPH_ROWS", 60)
    many = texts(
        *(
            make_manifest(f"acme/e{n}", description=f"does job{n}", examples=(f"do job{n} now",))
            for n in range(40)
        )
    )
    index.rebuild(many)
    assert (index.folder / GRAPH_FILE).exists()
    fresh = RoutingIndex(index.folder, LexicalEncoder())
    fresh.load_search_graph()
    for each in (index, fresh):
        found = each.search(encode_prompt(each, "does job7"), count=10)
        assert each.table.digest_at(found.experts[0]) == make_content_digest("acme/e7@1.0.0")
        assert len(found) < 10  # the owners of the ten closest rows
        named = each.find_positions([make_content_digest("acme/e39@1.0.0")])
        assert each.measure_similarity(
            encode_prompt(each, "does job7"), named
        ).experts.tolist() == [39]
    index.remove(list(many)[:20])
    assert not (index.folder / GRAPH_FILE).exists()
    index.rebuild(many)
    index.rebuild(texts(SORT))
    assert not (index.folder / GRAPH_FILE).exists()


@needs_hnswlib
def test_a_graph_that_was_built_too_late_is_thrown_away(
    index: RoutingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "GRAPH_ROWS", 10)
    many = texts(*(make_manifest(f"acme/e{n}", description=f"does job{n}") for n in range(40)))

    def overtaken(table: VectorTable) -> HnswGraph | None:
        monkeypatch.setattr(indexes, "build_graph", lambda _: None)
        RoutingIndex(index.folder, LexicalEncoder()).rebuild(texts(SORT))
        return build_graph(table)

    monkeypatch.setattr(indexes, "build_graph", overtaken)
    index.rebuild(many)
    assert not (index.folder / GRAPH_FILE).exists()
    assert len(RoutingIndex(index.folder, LexicalEncoder()).table.digests) == 1


def test_forgetting_what_is_not_there_writes_nothing(index: RoutingIndex) -> None:
    index.remove([make_content_digest("acme/unknown@1.0.0")])
    assert not index.folder.exists()
    index.add(BOTH)
    assert index.table.digests == list(BOTH)
