"""A small private file beside a base: whole or not there, never of others, nobody's change lost."""

import os
from pathlib import Path

import pytest

from expertctl.errors import ConflictError, DiskFullError, StoreError
from expertctl.store.base_habits import MAX_BYTES, HabitsFile
from expertctl.store.bases import BaseStore
from tests.store.faults import Fault, run
from tests.store.shop import House, Shop, fast, house, shop
from tests.store.test_processes import together

__all__ = ["fast", "house", "shop"]


@pytest.fixture
def habits(house: House, shop: Shop) -> HabitsFile:
    return HabitsFile(house.bases, house.bases.add(shop.base_dir))


def put(habits: HabitsFile, data: bytes) -> None:
    habits.change(lambda _: data)


def test_what_is_written_is_read_and_only_its_owner_may(habits: HabitsFile) -> None:
    assert habits.read() is None
    put(habits, b"one")
    assert habits.read() == b"one"
    assert habits.path.stat().st_mode & 0o777 == 0o600
    habits.change(lambda before: (before or b"") + b" two")
    assert habits.read() == b"one two"
    habits.bases.check_integrity()


def test_what_is_forgotten_is_gone(habits: HabitsFile) -> None:
    assert not habits.remove()
    put(habits, b"one")
    assert habits.remove()
    assert habits.read() is None


def test_it_goes_with_the_base(habits: HabitsFile) -> None:
    put(habits, b"one")
    habits.bases.remove(habits.base)
    assert not habits.path.parent.exists()
    with pytest.raises(ConflictError, match="removed or replaced"):
        put(habits, b"two")
    assert not habits.path.parent.exists()


def test_what_a_killed_removal_left_is_collected(habits: HabitsFile) -> None:
    put(habits, b"one")
    (habits.path.parent / "base.json").unlink()
    assert habits.bases.garbage() == (habits.path.parent,)
    habits.bases.collect()
    assert not habits.path.parent.exists()


def test_a_link_is_not_followed_but_replaced(habits: HabitsFile, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"theirs")
    habits.path.symlink_to(other)
    with pytest.raises(StoreError):
        habits.read()
    put(habits, b"ours")
    assert (habits.read(), other.read_bytes()) == (b"ours", b"theirs")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_believed(habits: HabitsFile, mode: int) -> None:
    put(habits, b"one")
    habits.path.chmod(mode)
    with pytest.raises(StoreError, match="others may write it"):
        habits.read()
    habits.change(lambda before: b"nothing" if before is None else b"believed")
    assert habits.read() == b"nothing"


def test_a_pipe_is_not_waited_for(habits: HabitsFile) -> None:
    os.mkfifo(habits.path, 0o600)
    with pytest.raises(StoreError, match="no regular file"):
        habits.read()


def test_a_folder_in_its_place_is_told_by_its_path(habits: HabitsFile) -> None:
    habits.path.mkdir(parents=True)
    with pytest.raises(StoreError, match=str(habits.path)):
        habits.read()


def test_a_file_that_is_too_large_is_not_read_whole(habits: HabitsFile) -> None:
    put(habits, b"")
    os.truncate(habits.path, 1 << 40)
    with pytest.raises(StoreError, match=f"larger than {MAX_BYTES} bytes"):
        habits.read()


@pytest.mark.parametrize("fault", ["kill", "torn", "full", "error"])
def test_whatever_step_goes_wrong_the_old_or_the_new_is_there(
    fault: Fault, habits: HabitsFile
) -> None:
    put(habits, b"old")
    steps = len(run(lambda: put(habits, b"old")).steps)
    assert steps > 5
    for at in range(1, steps + 1):
        ended = run(lambda: put(habits, b"new"), at=at, fault=fault)
        assert ended.is_whole_or(StoreError, DiskFullError), ended.trace
        assert habits.read() in (b"old", b"new")
        put(habits, b"old")
        names = {path.name for path in habits.path.parent.iterdir()}
        kept = {"base.json", "tokenizer-digest.json", habits.path.name}
        assert names == kept, "nothing half written is left"


def test_of_many_processes_no_change_is_lost(fast: Path, shop: Shop) -> None:
    bases = House(fast).bases
    base = bases.add(shop.base_dir)

    def count() -> None:
        for _ in range(10):
            HabitsFile(BaseStore(bases.folder), base).change(
                lambda before: str(int(before or b"0") + 1).encode()
            )

    assert together([count] * 4) == ["None"] * 4
    assert HabitsFile(bases, base).read() == b"40"
