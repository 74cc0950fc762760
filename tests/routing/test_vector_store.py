"""One folder of vectors, shared by processes and made by one encoder."""

import os
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from expertctl.errors import StoreError
from expertctl.reference import Digest
from expertctl.routing import index
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import LOCK_FILE, VectorStore
from expertctl.routing.vector_files import describe_vector_damage
from expertctl.routing.vector_table import Vectors
from tests.routing.vector_tables import DIMENSIONS, make_expert_digest

ROWS: Vectors = np.eye(DIMENSIONS, dtype=np.float32)[:2]


class NamedEncoder(LexicalEncoder):
    """An encoder that says which weights it has, and where."""

    def __init__(self, stamp: str) -> None:
        self.stamp = stamp

    def digest(self) -> Digest:
        return Digest.compute(self.stamp.split("@")[0].encode())


def store(folder: Path, stamp: str = "one") -> VectorStore:
    return VectorStore(folder, NamedEncoder(stamp), dimensions=DIMENSIONS)


def some(*numbers: int) -> dict[Digest, Vectors]:
    return {make_expert_digest(number): ROWS for number in numbers}


def test_what_one_appends_another_finds(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path)
    one.append(some(1))
    assert other.table.digests == [make_expert_digest(1)]
    one.append(some(2))
    assert other.table.digests == [make_expert_digest(1)]
    other.refresh()
    assert other.table.digests == [make_expert_digest(1), make_expert_digest(2)]
    other.append(some(1, 2, 3))
    assert store(tmp_path).table.digests == [
        make_expert_digest(1),
        make_expert_digest(2),
        make_expert_digest(3),
    ]
    assert not describe_vector_damage(one.folder)
    assert one.notes == []


def test_a_table_that_was_given_stays_as_it_is(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.append(some(1, 2))
    before = kept.table
    kept.remove([make_expert_digest(1)])
    kept.replace(some(5))
    assert before.digests == [make_expert_digest(1), make_expert_digest(2)]
    assert np.array_equal(before.rows, np.concatenate([ROWS, ROWS]))
    assert kept.table.digests == [make_expert_digest(5)]


def test_burying_tells_when_positions_became_others(tmp_path: Path) -> None:
    many = store(tmp_path)
    many.append(some(*range(10)))
    assert not many.remove([make_expert_digest(0), make_expert_digest(99)])
    assert not many.remove([make_expert_digest(99)])
    assert many.table.find_positions([make_expert_digest(9)]).tolist() == [9]
    assert many.remove([make_expert_digest(1), make_expert_digest(2), make_expert_digest(3)])
    assert many.table.find_positions([make_expert_digest(9)]).tolist() == [5]


def test_vectors_of_another_encoder_do_not_count(tmp_path: Path) -> None:
    store(tmp_path).append(some(1))
    other = store(tmp_path, "two")
    assert len(other.table) == 0
    other.append(some(2))
    assert store(tmp_path, "two").table.digests == [make_expert_digest(2)]
    assert len(store(tmp_path).table) == 0


def test_what_was_made_outlives_another_encoder_that_writes_between(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path, "two")
    one.append(some(1))
    other.append(some(1))
    one.append(some(2))
    assert one.table.digests == [make_expert_digest(1), make_expert_digest(2)]
    assert store(tmp_path).table.digests == [make_expert_digest(1), make_expert_digest(2)]
    assert other.table.digests == [make_expert_digest(1)]


def test_the_same_encoder_in_another_place_counts(tmp_path: Path) -> None:
    store(tmp_path, "one@here").append(some(1))
    moved = store(tmp_path, "one@there")
    assert moved.table.digests == [make_expert_digest(1)]
    moved.append(some(2))
    assert store(tmp_path, "one@there").table.stamp == "one@there"
    assert store(tmp_path, "one@there").table.digests == [
        make_expert_digest(1),
        make_expert_digest(2),
    ]


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    memory = store(tmp_path / "file" / "home")
    memory.append(some(1))
    memory.append(some(2))
    assert memory.table.digests == [make_expert_digest(1), make_expert_digest(2)]
    assert memory.notes[0].startswith("the routing index was not saved: ")
    with pytest.raises(StoreError):
        memory.replace(some(3))


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_a_lock_that_is_held_for_too_long_is_no_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "LOCK_SECONDS", 0.05)
    waiting = store(tmp_path)
    with FileLock(tmp_path / LOCK_FILE):
        waiting.append(some(1))
        with pytest.raises(StoreError, match="locked for too long"):
            waiting.remove([make_expert_digest(1)])
    assert waiting.table.digests == [make_expert_digest(1)]
    assert "locked for too long" in waiting.notes[0]
