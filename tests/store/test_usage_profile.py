"""A small private file beside a base: whole or not there, never of others, nobody's change lost."""

import os
from pathlib import Path

import pytest

from expertctl.errors import ConflictError, DiskFullError, StoreError
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import MAX_PROFILE_BYTES, UsageProfileFile
from tests.store.fault_injection import Fault, run_with_fault
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home
from tests.store.test_processes import together

__all__ = ["fast", "package_factory", "user_home"]


@pytest.fixture
def habits(user_home: HomeFixture, package_factory: PackageFactory) -> UsageProfileFile:
    return UsageProfileFile(user_home.bases, user_home.bases.add(package_factory.base_dir))


def put(habits: UsageProfileFile, data: bytes) -> None:
    habits.update(lambda _: data)


def test_what_is_written_is_read_and_only_its_owner_may(habits: UsageProfileFile) -> None:
    assert habits.read() is None
    put(habits, b"one")
    assert habits.read() == b"one"
    assert habits.path.stat().st_mode & 0o777 == 0o600
    habits.update(lambda before: (before or b"") + b" two")
    assert habits.read() == b"one two"
    habits.bases.check_integrity()


def test_what_is_forgotten_is_gone(habits: UsageProfileFile) -> None:
    assert not habits.remove()
    put(habits, b"one")
    assert habits.remove()
    assert habits.read() is None


def test_it_goes_with_the_base(habits: UsageProfileFile) -> None:
    put(habits, b"one")
    habits.bases.remove(habits.base)
    assert not habits.path.parent.exists()
    with pytest.raises(ConflictError, match="removed or replaced"):
        put(habits, b"two")
    assert not habits.path.parent.exists()


def test_what_a_killed_removal_left_is_collected(habits: UsageProfileFile) -> None:
    put(habits, b"one")
    (habits.path.parent / "base.json").unlink()
    assert habits.bases.find_garbage() == (habits.path.parent,)
    habits.bases.collect_garbage()
    assert not habits.path.parent.exists()


def test_a_link_is_not_followed_but_replaced(habits: UsageProfileFile, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"theirs")
    habits.path.symlink_to(other)
    with pytest.raises(StoreError):
        habits.read()
    put(habits, b"ours")
    assert (habits.read(), other.read_bytes()) == (b"ours", b"theirs")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_believed(habits: UsageProfileFile, mode: int) -> None:
    put(habits, b"one")
    habits.path.chmod(mode)
    with pytest.raises(StoreError, match="others may write it"):
        habits.read()
    habits.update(lambda before: b"nothing" if before is None else b"believed")
    assert habits.read() == b"nothing"


def test_a_pipe_is_not_waited_for(habits: UsageProfileFile) -> None:
    os.mkfifo(habits.path, 0o600)
    with pytest.raises(StoreError, match="no regular file"):
        habits.read()


def test_a_folder_in_its_place_is_told_by_its_path(habits: UsageProfileFile) -> None:
    habits.path.mkdir(parents=True)
    with pytest.raises(StoreError, match=str(habits.path)):
        habits.read()


def test_a_file_that_is_too_large_is_not_read_whole(habits: UsageProfileFile) -> None:
    put(habits, b"")
    os.truncate(habits.path, 1 << 40)
    with pytest.raises(StoreError, match=f"larger than {MAX_PROFILE_BYTES} bytes"):
        habits.read()


@pytest.mark.all
@pytest.mark.parametrize("fault", ["kill", "torn", "full", "error"])
def test_whatever_step_goes_wrong_the_old_or_the_new_is_there(
    fault: Fault, habits: UsageProfileFile
) -> None:
    put(habits, b"old")
    steps = len(run_with_fault(lambda: put(habits, b"old")).steps)
    assert steps > 5
    for at in range(1, steps + 1):
        ended = run_with_fault(lambda: put(habits, b"new"), at=at, fault=fault)
        assert ended.completed_or_raised(StoreError, DiskFullError), ended.trace
        assert habits.read() in (b"old", b"new")
        put(habits, b"old")
        names = {path.name for path in habits.path.parent.iterdir()}
        kept = {"base.json", "tokenizer-digest.json", habits.path.name}
        assert names == kept, "nothing half written is left"


def test_of_many_processes_no_change_is_lost(fast: Path, package_factory: PackageFactory) -> None:
    bases = HomeFixture(fast).bases
    base = bases.add(package_factory.base_dir)

    def count() -> None:
        for _ in range(10):
            UsageProfileFile(BaseStore(bases.folder), base).update(
                lambda before: str(int(before or b"0") + 1).encode()
            )

    assert together([count] * 4) == ["None"] * 4
    assert UsageProfileFile(bases, base).read() == b"40"
