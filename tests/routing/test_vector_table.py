import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.reference import Digest
from expertctl.routing.vector_table import Vectors, VectorTable, count_rows, split_rows

ENCODER = Digest.compute(b"encoder")
ONE, TWO, THREE = (Digest.compute(name.encode()) for name in ("one", "two", "three"))


def some(**counts: int) -> dict[Digest, Vectors]:
    rng = np.random.default_rng(len(counts))
    return {
        Digest.compute(name.encode()): rng.uniform(-0.4, 0.4, (count, 4)).astype(np.float32)
        for name, count in counts.items()
    }


def table(**counts: int) -> VectorTable:
    empty = VectorTable.empty(encoder=ENCODER, stamp="s", dimensions=4)
    return empty.add_entries(some(**counts))


def test_an_empty_table_has_no_positions() -> None:
    empty = table()
    assert len(empty) == 0
    assert empty.digests == []
    assert empty.find_positions([ONE, TWO]).tolist() == [-1, -1]
    assert empty.find_positions([]).tolist() == []
    assert empty.select_rows(np.zeros(0, np.int64)).tolist() == []
    assert empty.compact().rows.shape == (0, 4)


def test_entries_are_added_once_and_keep_their_positions() -> None:
    three = table(one=1, two=2, three=1)
    assert three.starts.tolist() == [0, 1, 3]
    assert three.owners.tolist() == [0, 1, 1, 2]
    assert three.select_rows(np.array([2, 1])).tolist() == [3, 1, 2]
    again = three.add_entries({TWO: np.zeros((9, 4), np.float32), ENCODER: three.rows[:2]})
    assert again.digests == [ONE, TWO, THREE, ENCODER]
    assert np.array_equal(again.rows, np.concatenate([three.rows, three.rows[:2]]))


def test_what_is_forgotten_keeps_its_place_until_the_table_is_compact() -> None:
    left = table(one=1, two=2, three=1).mark_dead(np.array([1]))
    assert left.dead_rows == 2
    assert left.digests == [ONE, THREE]
    assert left.find_positions([ONE, TWO, THREE]).tolist() == [0, -1, 2]
    assert left.digest_at(1) == TWO
    compact = left.compact()
    assert compact.find_positions([ONE, TWO, THREE]).tolist() == [0, -1, 1]
    assert np.array_equal(compact.rows, left.rows[[0, 3]])


def test_what_comes_back_gets_a_new_position() -> None:
    back = table(one=1, two=2).mark_dead(np.array([0])).add_entries(some(one=3))
    assert back.find_positions([ONE, TWO]).tolist() == [2, 1]
    assert back.counts.tolist() == [1, 2, 3]


@pytest.mark.parametrize("count", [3, 40])
def test_few_and_many_digests_are_found_alike(count: int) -> None:
    names = {f"e{n}": 1 + n % 3 for n in range(60)}
    full = table(**names).mark_dead(np.array([5, 7]))
    asked = [Digest.compute(f"e{n}".encode()) for n in range(4, 4 + count)]
    asked.append(Digest.compute(b"unknown"))
    expected = [n if n not in {5, 7} else -1 for n in range(4, 4 + count)]
    assert full.find_positions(asked).tolist() == [*expected, -1]


def test_a_digest_that_only_begins_like_another_is_not_it() -> None:
    twin = Digest(ONE.hex[:16] + "0" * 48)
    assert table(one=1).find_positions([twin]).tolist() == [-1]
    assert table(one=1).find_positions([twin] * 30).tolist() == [-1] * 30


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), max_size=8))
def test_rows_are_cut_apart_where_they_were_joined(counts: list[int]) -> None:
    entries = some(**{f"e{n}": count for n, count in enumerate(counts)})
    joined = VectorTable.empty(encoder=ENCODER, stamp="s", dimensions=4).add_entries(entries)
    assert count_rows(entries).tolist() == counts
    parts = split_rows(joined.rows, joined.counts)
    assert [part.tolist() for part in parts] == [rows.tolist() for rows in entries.values()]
