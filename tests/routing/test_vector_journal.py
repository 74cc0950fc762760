"""Whatever happened to a journal, what is read is the beginning of what was written, or nothing."""

from pathlib import Path

import numpy as np
import pytest

from expertctl.reference import Digest
from expertctl.routing.vector_files import (
    ADDED,
    FORMAT,
    RECORD,
    JournalHeader,
    Records,
    build_added_records,
    build_removed_records,
    read_journal,
    replay,
    seal_records,
)
from expertctl.routing.vector_table import Vectors

HEADER = JournalHeader(FORMAT, str(Digest.compute(b"encoder")), "a stamp", 4, "vectors-0.rows")
ONE, TWO, THREE = (Digest.compute(name) for name in (b"one", b"two", b"three"))
ROWS = np.full((2, 4), 0.5, np.float32)
ENTRIES: dict[Digest, Vectors] = {ONE: ROWS, TWO: ROWS[:1], THREE: ROWS}
KEYS = np.stack([np.frombuffer(bytes.fromhex(digest.hex), np.uint8) for digest in ENTRIES])


def records() -> Records:
    """Three entries of which the second is buried."""
    return np.concatenate(
        [build_added_records(ENTRIES, row=0), build_removed_records(KEYS, np.array([1], np.int64))]
    )


def written(folder: Path, data: bytes) -> Path:
    path = folder / "journal"
    path.write_bytes(data)
    return path


def whole() -> bytes:
    return HEADER.to_bytes() + seal_records(records(), HEADER, first=0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    journal = read_journal(written(tmp_path, whole()))
    assert journal is not None
    assert (journal.header, journal.size, journal.damaged) == (HEADER, len(whole()), False)
    entries = replay(journal.records)
    assert entries is not None
    assert np.array_equal(entries.keys, KEYS)
    assert entries.counts.tolist() == [2, 1, 2]
    assert entries.alive.tolist() == [True, False, True]
    assert len(HEADER.to_bytes()) % RECORD.itemsize == 0


def test_records_that_are_sealed_one_by_one_are_those_that_are_sealed_together() -> None:
    parts = [seal_records(records()[n : n + 1], HEADER, first=n) for n in range(4)]
    assert b"".join(parts) == seal_records(records(), HEADER, first=0)


@pytest.mark.parametrize("cut", range(1, 130, 13))
def test_an_append_that_broke_off_is_cut_away(tmp_path: Path, cut: int) -> None:
    journal = read_journal(written(tmp_path, whole()[:-cut]))
    assert journal is not None
    assert len(journal.records) == 4 - -(-cut // RECORD.itemsize)
    assert journal.size == len(HEADER.to_bytes()) + len(journal.records) * RECORD.itemsize
    assert not journal.damaged


def test_zeros_that_a_power_cut_left_are_cut_away(tmp_path: Path) -> None:
    journal = read_journal(written(tmp_path, whole() + bytes(RECORD.itemsize * 3 + 5)))
    assert journal is not None
    assert (len(journal.records), journal.damaged) == (4, False)


@pytest.mark.parametrize("byte", range(RECORD.itemsize))
def test_a_changed_byte_ends_the_records_and_is_called_damage(tmp_path: Path, byte: int) -> None:
    data = bytearray(whole())
    data[len(HEADER.to_bytes()) + RECORD.itemsize + byte] ^= 1
    journal = read_journal(written(tmp_path, bytes(data)))
    assert journal is not None
    assert (len(journal.records), journal.damaged) == (1, True)


def test_records_count_only_in_their_place_below_their_header(tmp_path: Path) -> None:
    data, start = whole(), len(HEADER.to_bytes())
    swapped = data[:start] + data[start + 64 : start + 128] + data[start : start + 64]
    other = JournalHeader(FORMAT, HEADER.encoder, "another stamp", 4, HEADER.rows).to_bytes()
    for forged in (swapped, other + data[start:]):
        journal = read_journal(written(tmp_path, forged))
        assert journal is not None
        assert len(journal.records) == 0


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}\n",
        b"x" * 100,
        b"\x80\x04\x95pickle\n",
        HEADER.to_bytes()[:-1],
        HEADER.to_bytes().replace(b' "2"', b' "1"'),
        HEADER.to_bytes().replace(b"sha256:", b"md5:sha"),
        HEADER.to_bytes().replace(b"}", b',"x":1}'),
        HEADER.to_bytes()[:-1] + b" \n",
        HEADER.to_bytes().replace(b"a stamp", b"s" * (1 << 14)),
    ],
    ids=[
        "empty",
        "no keys",
        "no line",
        "pickle",
        "no end",
        *["format", "digest", "key", "space", "long"],
    ],
)
def test_a_header_that_is_not_ours_is_no_journal(tmp_path: Path, header: bytes) -> None:
    assert read_journal(written(tmp_path, header)) is None
    assert read_journal(tmp_path / "absent") is None


def changed(position: int, field: str, value: int) -> Records:
    made = records()
    made[field][position] = value
    return made


@pytest.mark.parametrize(
    "contradiction",
    [
        changed(0, "count", 0),
        changed(1, "at", 5),
        changed(0, "kind", 7),
        changed(3, "kind", ADDED),
        changed(3, "at", 0),
        changed(3, "at", 3),
        changed(3, "at", 1 << 63),
        records()[[3, 0, 1, 2]],
    ],
    ids=["no rows", "gap", "kind", "twice", "digest", "beyond", "negative", "before it was born"],
)
def test_records_that_contradict_each_other_come_to_nothing(contradiction: Records) -> None:
    assert replay(records()) is not None
    assert replay(contradiction) is None


def test_no_records_are_no_entries() -> None:
    entries = replay(records()[:0])
    assert entries is not None
    assert len(entries.counts) == len(entries.alive) == 0
