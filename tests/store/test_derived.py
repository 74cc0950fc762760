"""What was computed from a package is found again as it was written, or not at all."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.install.doctor import Finding, examine_store
from expertctl.reference import Digest
from expertctl.store.disk import DerivedData
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["fast", "package_factory", "user_home"]

PACKAGE, OTHER, KEY = (Digest.compute(text) for text in (b"package", b"other", b"key"))
DATA = bytes(range(200))


@pytest.fixture
def derived(tmp_path: Path) -> DerivedData:
    return DerivedData(tmp_path / "store" / "derived")


def test_what_was_written_is_found_under_its_package_and_key(derived: DerivedData) -> None:
    assert derived.read(PACKAGE, KEY, size=len(DATA)) is None
    derived.write(PACKAGE, KEY, DATA)
    assert derived.read(PACKAGE, KEY, size=len(DATA)) == DATA
    assert derived.read(PACKAGE, OTHER, size=len(DATA)) is None
    assert derived.read(OTHER, KEY, size=len(DATA)) is None
    assert derived.take_notes() == ()


def test_the_last_one_written_counts(derived: DerivedData) -> None:
    derived.write(PACKAGE, KEY, DATA)
    derived.write(PACKAGE, KEY, b"new")
    assert derived.read(PACKAGE, KEY, size=3) == b"new"
    assert derived.read(PACKAGE, KEY, size=len(DATA)) is None
    assert [path.name for path in (derived.root / PACKAGE.hex).iterdir()] == [KEY.hex]


@given(st.integers(0, 32 + len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_anywhere_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, position: int, change: int
) -> None:
    derived = DerivedData(tmp_path_factory.mktemp("derived"))
    derived.write(PACKAGE, KEY, DATA)
    path = derived.path(PACKAGE, KEY)
    content = bytearray(path.read_bytes())
    content[position] ^= change
    path.write_bytes(content)
    assert derived.read(PACKAGE, KEY, size=len(DATA)) is None


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, 231, 233])
def test_a_file_of_another_size_is_never_believed(derived: DerivedData, cut: int) -> None:
    derived.write(PACKAGE, KEY, DATA)
    path = derived.path(PACKAGE, KEY)
    os.truncate(path, cut)
    assert derived.read(PACKAGE, KEY, size=len(DATA)) is None
    assert derived.read(PACKAGE, KEY, size=max(0, cut - 32)) is None


def test_a_file_that_was_moved_here_is_never_believed(derived: DerivedData) -> None:
    derived.write(PACKAGE, KEY, DATA)
    for package, key in ((OTHER, KEY), (PACKAGE, OTHER)):
        target = derived.path(package, key)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(derived.path(PACKAGE, KEY).read_bytes())
        assert derived.read(package, key, size=len(DATA)) is None


def test_a_folder_in_its_place_counts_as_absent_and_is_told(derived: DerivedData) -> None:
    derived.path(PACKAGE, KEY).mkdir(parents=True)
    assert derived.read(PACKAGE, KEY, size=len(DATA)) is None
    derived.write(PACKAGE, KEY, DATA)
    [note] = derived.take_notes()
    assert str(derived.path(PACKAGE, KEY)) in note
    assert derived.take_notes() == ()


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_nobody_else_may_read_or_write_it(derived: DerivedData) -> None:
    derived.write(PACKAGE, KEY, DATA)
    for path in (derived.root, derived.root / PACKAGE.hex):
        assert path.stat().st_mode & 0o777 == 0o700
    assert derived.path(PACKAGE, KEY).stat().st_mode & 0o777 == 0o600


def test_gc_removes_what_was_derived_from_packages_that_are_gone(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package())
    [expert] = user_home.store.list_experts()
    derived = DerivedData(user_home.store.paths.derived)
    for package in (expert.content_digest, OTHER):
        derived.write(package, KEY, DATA)
    gone = derived.root / OTHER.hex
    told = user_home.store.find_garbage()
    assert (told.folders, told.size) == ((gone,), 32 + len(DATA))
    assert gone.exists()
    assert user_home.store.collect_garbage() == told
    assert not gone.exists()
    assert derived.read(expert.content_digest, KEY, size=len(DATA)) == DATA
    user_home.store.remove(expert)
    user_home.store.collect_garbage()
    assert list(derived.root.iterdir()) == []


def findings(user_home: HomeFixture) -> tuple[Finding, ...]:
    return examine_store(
        user_home.store, bases=user_home.bases, trust=user_home.trust, catalogue=user_home.catalogue
    ).findings


def test_doctor_has_nothing_to_say_about_it(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package())
    before = findings(user_home)
    DerivedData(user_home.store.paths.derived).write(OTHER, KEY, DATA)
    assert findings(user_home) == before
