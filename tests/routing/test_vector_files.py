"""A table on the disk: appended to, damaged, and written by a process that is killed."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from expertctl.reference import Digest
from expertctl.routing import vector_files
from expertctl.routing.vector_files import (
    JOURNAL_FILE,
    ROWS_GLOB,
    JournalEntries,
    Records,
    VectorFiles,
    describe_vector_damage,
    replay,
)
from expertctl.routing.vector_table import Vectors, VectorTable
from tests.routing.vector_tables import DIMENSIONS, TEXTS, make_clusters, make_expert_digest
from tests.store.fault_injection import Fault, SpawnedProcess, lean, run_with_fault

__all__ = ["lean"]

TABLE = make_clusters(5)


@pytest.fixture(params=[vector_files.CHECKED_BYTES, 0], ids=["in memory", "mapped"])
def files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> VectorFiles:
    """Files of five experts, held in both ways."""
    monkeypatch.setattr(vector_files, "CHECKED_BYTES", request.param)
    made = opened(tmp_path)
    made.replace(TABLE)
    return made


def opened(folder: Path) -> VectorFiles:
    return VectorFiles(folder, dimensions=DIMENSIONS)


def read(files: VectorFiles) -> VectorTable:
    """What another process would read."""
    table = opened(files.folder).read()
    assert table is not None
    return table


def new(*numbers: int) -> dict[Digest, Vectors]:
    rows = make_clusters(1, seed=9).rows
    return {make_expert_digest(number, name="new"): rows for number in numbers}


Held = dict[Digest, list[list[float]]]


def read_table(table: VectorTable) -> Held:
    """What a table says of every expert that is alive."""
    at = table.find_positions(table.digests)
    return {
        digest: table.rows[table.select_rows(at[n : n + 1])].tolist()
        for n, digest in enumerate(table.digests)
    }


def rows_file(files: VectorFiles) -> Path:
    (path,) = files.folder.glob(ROWS_GLOB)
    return path


def test_a_table_survives_its_files(files: VectorFiles) -> None:
    assert read_table(read(files)) == read_table(TABLE)
    assert read(files).encoder == TABLE.encoder
    assert not describe_vector_damage(files.folder)
    modes = {path.stat().st_mode & 0o777 for path in files.folder.iterdir()}
    assert modes == {0o600}


def test_adding_appends_and_leaves_what_is_there_untouched(files: VectorFiles) -> None:
    before = rows_file(files).read_bytes(), (files.folder / JOURNAL_FILE).read_bytes()
    files.read()
    after = files.append(new(1, 2))
    assert (
        read_table(after)
        == read_table(read(files))
        == read_table(TABLE) | read_table(TABLE.add_entries(new(1, 2)))
    )
    grown = rows_file(files).read_bytes(), (files.folder / JOURNAL_FILE).read_bytes()
    assert [g.startswith(b) for g, b in zip(grown, before, strict=True)] == [True, True]
    assert len(grown[0]) - len(before[0]) == 2 * TEXTS * DIMENSIONS * 4
    assert len(grown[1]) - len(before[1]) == 2 * 64
    assert not describe_vector_damage(files.folder)


def test_what_is_forgotten_keeps_its_rows_until_all_is_written_anew(files: VectorFiles) -> None:
    files.read()
    files.remove(np.array([1, 3]))
    left = read(files)
    assert left.digests == [make_expert_digest(n) for n in (0, 2, 4)]
    assert left.dead_rows == 2 * TEXTS
    files.append({make_expert_digest(1): TABLE.rows[:3]})
    back = read(files)
    assert back.find_positions([make_expert_digest(1)]).tolist() == [5]
    old = rows_file(files)
    files.replace(files.read() or TABLE)
    assert read_table(read(files)) == read_table(back)
    assert read(files).dead_rows == 0
    assert not old.exists()


def test_a_reader_goes_on_with_the_files_that_it_opened(files: VectorFiles) -> None:
    reader = opened(files.folder)
    table = reader.read()
    assert table is not None
    files.replace(make_clusters(2, seed=3, name="other"))
    assert read_table(table) == read_table(TABLE)
    assert reader.has_changed()
    again = reader.read()
    assert again is not None
    assert again.digests == [
        make_expert_digest(0, name="other"),
        make_expert_digest(1, name="other"),
    ]
    assert not reader.has_changed()
    assert reader.read() is again


@pytest.mark.parametrize("times", [1, 9])
def test_files_that_are_replaced_while_they_are_opened_are_opened_again(
    files: VectorFiles, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(times))
    writer = opened(files.folder)
    writer.read()

    def overtaken(records: Records) -> JournalEntries | None:
        if next(left, None) is not None:
            monkeypatch.setattr(vector_files, "replay", replay)
            writer.replace(TABLE)
            monkeypatch.setattr(vector_files, "replay", overtaken)
        return replay(records)

    monkeypatch.setattr(vector_files, "replay", overtaken)
    table = opened(files.folder).read()
    assert (table is None) == (times == 9)
    assert table is None or read_table(table) == read_table(TABLE)


def test_a_table_that_is_replaced_while_it_is_checked_is_checked_again(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(files.folder)
    writer.read()

    def overtaken(records: Records) -> JournalEntries | None:
        monkeypatch.setattr(vector_files, "replay", replay)
        writer.replace(TABLE)
        return replay(records)

    monkeypatch.setattr(vector_files, "replay", overtaken)
    assert describe_vector_damage(files.folder) == ""


def test_the_encoder_may_move_without_its_rows_being_written_again(files: VectorFiles) -> None:
    files.read()
    files.append(new(1))
    rows = rows_file(files)
    assert files.update_stamp("elsewhere").stamp == read(files).stamp == "elsewhere"
    assert files.update_stamp("elsewhere") is files.read()
    files.append(new(2))
    assert rows_file(files) == rows
    assert read_table(read(files)) == read_table(TABLE.add_entries(new(1, 2)))


def test_an_empty_table_is_a_table(tmp_path: Path) -> None:
    files = opened(tmp_path)
    assert files.read() is None
    files.replace(make_clusters(0))
    assert len(read(files)) == 0
    files.append(new(1))
    assert read(files).digests == [make_expert_digest(1, name="new")]


@pytest.mark.parametrize("kept", ["journal", "rows", "neither"])
def test_files_may_be_deleted_at_any_time(files: VectorFiles, kept: str) -> None:
    if kept != "journal":
        (files.folder / JOURNAL_FILE).unlink()
    if kept != "rows":
        rows_file(files).unlink()
    assert opened(files.folder).read() is None
    assert bool(describe_vector_damage(files.folder)) == (kept == "journal")


def test_rows_of_another_length_are_worthless(files: VectorFiles) -> None:
    assert VectorFiles(files.folder, dimensions=DIMENSIONS * 2).read() is None


def test_rows_that_are_shorter_than_the_journal_says_are_worthless(files: VectorFiles) -> None:
    os.truncate(rows_file(files), 100)
    assert opened(files.folder).read() is None
    assert "is absent or too short" in describe_vector_damage(files.folder)


def test_a_changed_row_is_found(files: VectorFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows_file(files)
    data = bytearray(path.read_bytes())
    data[70] ^= 0x40
    path.write_bytes(data)
    assert describe_vector_damage(files.folder)
    monkeypatch.setattr(vector_files, "CHECKED_BYTES", 1 << 20)
    assert opened(files.folder).read() is None


def test_records_that_contradict_each_other_are_worthless(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_files, "replay", lambda _: None)
    assert opened(files.folder).read() is None
    assert describe_vector_damage(files.folder) == "its records are damaged"


def test_damage_in_the_middle_costs_what_comes_after_and_is_written_anew(
    files: VectorFiles,
) -> None:
    path = files.folder / JOURNAL_FILE
    data = bytearray(path.read_bytes())
    data[-3 * 64] ^= 1  # in the third of five
    path.write_bytes(data)
    damaged = opened(files.folder)
    table = damaged.read()
    assert table is not None
    assert table.digests == [make_expert_digest(0), make_expert_digest(1)]
    old = rows_file(files)
    damaged.append(new(1))
    assert rows_file(files) != old  # whoever reads the old rows still finds them there
    assert read(files).digests == [
        make_expert_digest(0),
        make_expert_digest(1),
        make_expert_digest(1, name="new"),
    ]
    assert not describe_vector_damage(files.folder)


def test_an_append_that_broke_off_is_overwritten_by_the_next(files: VectorFiles) -> None:
    with (files.folder / JOURNAL_FILE).open("ab") as journal:
        journal.write(b"\1" * 40)
    with rows_file(files).open("ab") as rows:
        rows.write(b"\2" * 100)
    again = opened(files.folder)
    assert read_table(again.read() or TABLE.compact()) == read_table(TABLE)
    again.append(new(1))
    assert read_table(read(files)) == read_table(TABLE.add_entries(new(1)))
    assert not describe_vector_damage(files.folder)


def between(now: Held, before: Held, after: Held) -> bool:
    """Tell whether a change was made in part, for some of its experts."""
    both = before | after
    return before.keys() & after.keys() <= now.keys() and all(now[d] == both[d] for d in now)


Change = Callable[[VectorFiles], object]
CHANGES: dict[str, Change] = {
    "append": lambda files: files.append(new(1, 2)),
    "bury": lambda files: files.remove(np.array([0, 2])),
    "replace": lambda files: files.replace(make_clusters(3, seed=4, name="other")),
    "restamp": lambda files: files.update_stamp("elsewhere"),
}


@pytest.mark.skipif(os.name != "posix", reason="forks")
@pytest.mark.parametrize("fault", ["kill", "torn", "full", "error"])
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_goes_wrong_at_any_step_there_is_a_table_before_or_after(
    tmp_path: Path, name: str, fault: Fault, lean: SpawnedProcess
) -> None:
    lean(changed_at_any_step, tmp_path, name, fault)


def changed_at_any_step(folder: Path, name: str, fault: Fault) -> None:
    def prepared(number: int) -> VectorFiles:
        files = opened(folder / str(number))
        files.folder.mkdir()
        files.replace(TABLE)
        return files

    done = prepared(0)
    steps = len(run_with_fault(lambda: CHANGES[name](done)).steps)
    after = read_table(read(done))
    before = read_table(TABLE)
    for step in range(1, steps + 1):
        files = prepared(step)
        run_with_fault(partial(CHANGES[name], files), at=step, fault=fault)
        left = opened(files.folder)
        table = left.read()
        assert table is not None
        now = read_table(table)
        assert now in (before, after) or (
            name in {"append", "bury"} and between(now, before, after)
        )
        left.append(new(7))
        assert read_table(read(files)) == read_table(table) | read_table(
            make_clusters(0).add_entries(new(7))
        )
        assert not describe_vector_damage(files.folder)
    assert steps >= 3


def test_a_table_in_memory_has_no_generation_and_one_on_disk_has(files: VectorFiles) -> None:
    assert TABLE.generation == ""
    table = files.read()
    assert table is not None
    assert table.generation == rows_file(files).name
    assert replace(table).add_entries(new(1)).generation == ""
