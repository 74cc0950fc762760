"""Several processes at one store: nobody loses anything, nobody sees half of anything."""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from expertctl.errors import NotFoundError, StoreError
from expertctl.reference import Reference
from expertctl.store.locks import exclusive_lock, is_claimed
from expertctl.store.store import Store
from tests.store.fixtures import HomeFixture, PackageFactory

pytestmark = pytest.mark.all

CONTEXT = multiprocessing.get_context("fork")
LIMIT_S = 120


def together(actions: Sequence[Callable[[], object]]) -> list[str]:
    """Run actions at once, a process each; return what each said: its result or its error."""
    start, results = CONTEXT.Barrier(len(actions)), CONTEXT.SimpleQueue()

    def work(number: int) -> None:
        start.wait(LIMIT_S)
        try:
            results.put((number, f"{actions[number]()}"))
        except BaseException as error:  # noqa: BLE001  # the parent judges it
            results.put((number, f"{type(error).__name__}: {error}"))

    processes = [CONTEXT.Process(target=work, args=(n,)) for n in range(len(actions))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside native threads
        for process in processes:
            process.start()
    told = dict(results.get() for _ in processes)
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    return [told[number] for number in range(len(actions))]


def test_of_many_installs_of_one_package_one_installs_it(
    fast: Path, package_factory: PackageFactory
) -> None:
    user_home, file = HomeFixture(fast).trust_keys("acme"), package_factory.package()
    said = together([lambda: user_home.install(file)[0].outcome] * 6)
    assert sorted(said) == ["already installed"] * 5 + ["installed"]
    assert user_home.refs() == ["acme/sql@1.0.0"]
    assert list(user_home.store.paths.staging.iterdir()) == []
    user_home.check_integrity()


def test_of_two_contents_for_one_version_one_wins(
    fast: Path, package_factory: PackageFactory
) -> None:
    user_home = HomeFixture(fast).trust_keys("acme")
    files = [package_factory.package(seed=seed) for seed in (0, 1)]
    said = together([lambda f=file: user_home.install(f)[0].outcome for file in files * 2])
    assert said.count("installed") == 1
    assert sum(text.startswith("ChangedVersionError") for text in said) == 2
    user_home.check_integrity()


def test_different_packages_install_side_by_side(
    fast: Path, package_factory: PackageFactory
) -> None:
    user_home = HomeFixture(fast).trust_keys("acme")
    files = [package_factory.package(f"acme/expert{n}", seed=n) for n in range(6)]
    said = together(
        [
            lambda f=file: user_home.install(f, catalogue=user_home.catalogue)[0].warnings
            for file in files
        ]
    )
    assert all("not indexed" not in text for text in said), said
    assert len(user_home.refs()) == 6
    assert user_home.catalogue.list_refs() == user_home.refs()
    user_home.check_integrity()


def look(user_home: HomeFixture) -> set[str]:
    """Read all that is installed; return the refs that stayed until they were read."""
    now, seen = user_home.store.scan(), set()
    assert now.damaged == ()
    for expert in now.experts:
        try:
            with user_home.store.lease_experts([expert]):
                sizes = [user_home.store.blob_path(f.digest).stat().st_size for f in expert.layers]
                assert sizes == [file.size for file in expert.layers]
                assert user_home.store.read_manifest(expert).ref == expert.ref
                seen.add(expert.ref)
        except NotFoundError:
            continue
    return seen


def test_readers_gc_and_removals_beside_installs_lose_nothing(
    fast: Path, package_factory: PackageFactory
) -> None:
    user_home = HomeFixture(fast).trust_keys("acme")
    kept = package_factory.package("acme/kept")
    user_home.install(kept)
    done = fast / "done"
    files = [
        package_factory.package("acme/comes-and-goes"),
        package_factory.package("acme/goes", seed=4),
    ]

    def change() -> str:
        for _ in range(12):
            for file in files:
                user_home.install(file)
            for name in ("acme/comes-and-goes", "acme/goes"):
                user_home.store.remove(user_home.store.find(Reference.parse(name)))
        done.touch()
        return "changed"

    def collect() -> str:
        while not done.exists():
            with user_home.store.begin_transaction() as changes:
                changes.collect_garbage(age=0)
        return "collected"

    def read() -> str:
        rounds = 0
        while not done.exists() or rounds == 0:
            rounds += 1
            seen = look(user_home)
            assert "acme/kept@1.0.0" in seen
        return "read"

    assert together([change, collect, read]) == ["changed", "collected", "read"]
    assert user_home.refs() == ["acme/kept@1.0.0"]
    user_home.store.collect_garbage()
    user_home.check_integrity()
    (expert,) = user_home.store.list_experts()
    names = {path.name for path in user_home.store.paths.blobs.iterdir()}
    assert names == {file.digest.hex for file in expert.layers}


def test_a_base_added_by_many_is_there_once(fast: Path, package_factory: PackageFactory) -> None:
    user_home = HomeFixture(fast)
    said = together([lambda: user_home.bases.add(package_factory.base_dir).name] * 3)
    said += together([lambda: user_home.bases.add_copy(package_factory.base_dir).name] * 3)
    assert set(said) == {package_factory.base_dir.name}
    assert len(user_home.bases.list_bases()) == 1
    user_home.bases.check_integrity()


def test_a_store_that_is_locked_for_too_long_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held, late = exclusive_lock(path), exclusive_lock(path, seconds=0.01)
    with held, pytest.raises(StoreError, match="another process") as error, late:
        pass
    assert "try again" in error.value.hint


def test_a_folder_without_a_lock_is_held_by_nobody(tmp_path: Path) -> None:
    assert not is_claimed(tmp_path)
    (tmp_path / "lock").touch()
    assert not is_claimed(tmp_path)
    with exclusive_lock(tmp_path / "lock"):
        assert is_claimed(tmp_path)


def test_a_process_that_dies_frees_its_lock(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def die() -> None:
        with store.begin_transaction():
            os._exit(9)

    process = CONTEXT.Process(target=die)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 9
    with store.begin_transaction() as changes:
        assert changes.scan().experts == ()
