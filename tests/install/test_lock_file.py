"""expert.lock: one form, read strictly."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import ConflictError, InvalidPackageError, NotFoundError
from expertctl.install.candidate import Requirement
from expertctl.install.project_file import (
    LockFile,
    Project,
    describe_changes,
    read_lock,
    require_lock,
    write_lock,
)
from expertctl.install.resolve import ResolvedPackage
from expertctl.reference import Reference
from tests.install.candidates import make_candidate

WANTED = '[experts]\n"acme/top" = "^1"\n'
PROJECT = Project.parse(WANTED, what="experts.toml")


def a_lock(low: str = "1.0.0") -> LockFile:
    top = make_candidate("acme/top@1.0.0", requires=["acme/low@^1"])
    chosen = [top, make_candidate(f"acme/low@{low}")]
    needs = (Requirement(Reference.parse("acme/top"), "you"),)
    return LockFile.from_resolution(
        PROJECT, [ResolvedPackage(candidate, needs) for candidate in chosen]
    )


TEXT = a_lock().encode()


def parse(text: str) -> LockFile:
    return LockFile.parse(text, what="expert.lock")


def test_a_lock_is_read_as_it_was_written() -> None:
    assert parse(TEXT) == a_lock()
    assert parse(TEXT).encode() == TEXT
    assert [locked.ref for locked in a_lock().experts] == ["acme/low@1.0.0", "acme/top@1.0.0"]


def test_line_ends_of_another_system_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "expert.lock"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert read_lock(path) == a_lock()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("format = 1", "format = 2", "update expertctl|its format is '2'"),
        ("format = 1\n", "", "its format is 'None'"),
        ("format = 1", "format = 1\nextra = 1", "does not write"),
        ('base = ""', 'base = ""\nallow_unsigned = true', "not exactly the fields"),
        ('base = ""\n', "", "not exactly the fields"),
        ('base = ""', "base = 1", "base is not text"),
        ("sha256:", "sha512:", "not a digest"),
        ('registry = "hub.example"', 'registry = "HUB.example"', "not the host of a registry"),
        ('registry = "hub.example"', 'registry = "https://hub.example/x"', "not the address"),
        ('version = "1.0.0"', 'version = "1.0"', "not a version"),
        ("acme/top", "acme/aaa", "not sorted|does not write"),
        ("acme/low", "acme/top", "not sorted|does not write"),
        ("requires = []", "requires = [1]", "not text"),
        ('requires = ["acme/low@^1"]', 'requires = "acme/low@^1"', "is not one"),
        ("wanted = [", "wanted = [\n<<<<<<< HEAD", "line 4 is the marker of a merge conflict"),
        ("[[expert]]", "[expert]", "not valid TOML|not a list"),
        ("# Written", "[[", "not valid TOML"),
    ],
)
def test_a_lock_that_was_edited_or_half_merged_is_refused(old: str, new: str, problem: str) -> None:
    with pytest.raises(InvalidPackageError, match=problem):
        parse(TEXT.replace(old, new))


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_a_changed_character_gives_a_refusal_or_a_lock_in_its_one_form(
    at: int, character: str
) -> None:
    changed = TEXT[:at] + character + TEXT[at + 1 :]
    try:
        lock = parse(changed)
    except InvalidPackageError:
        return
    assert lock.encode().split() == changed.split()


def test_a_lock_of_this_project_is_current() -> None:
    a_lock().check_current(PROJECT, what="expert.lock")


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ('"acme/top" = "^2"', r"asks acme/top@\^2, locked is acme/top@1\.0\.0"),
        ('"acme/top" = "^1"\n"acme/more" = "*"', "acme/more, which is not locked"),
        ('"acme/low" = "*"', r"nothing needs acme/top@1\.0\.0"),
        ('"acme/top" = ">=1"', "made for another experts.toml"),
        ('"two.example/acme/top" = "^1"', r"asks two\.example/acme/top"),
    ],
)
def test_a_lock_of_another_project_is_told_apart(wanted: str, problem: str) -> None:
    project = Project.parse(f"[experts]\n{wanted}\n", what="experts.toml")
    with pytest.raises(ConflictError, match=problem):
        a_lock().check_current(project, what="expert.lock")


def test_a_downgrade_below_what_an_expert_requires_is_told() -> None:
    with pytest.raises(ConflictError, match=r"requires acme/low@\^1, locked is acme/low@0\.9\.0"):
        a_lock("0.9.0").check_current(PROJECT, what="expert.lock")


def test_an_equal_lock_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "expert.lock"
    assert read_lock(path) is None
    with pytest.raises(NotFoundError, match="no such file"):
        require_lock(path)
    assert write_lock(path, a_lock())
    assert not write_lock(path, a_lock())
    assert require_lock(path) == a_lock()


def test_what_changed_between_two_locks_is_told() -> None:
    before, after = a_lock().experts, a_lock("1.2.0").experts[:1]
    assert describe_changes(before, after) == ["~ acme/low@1.0.0 -> 1.2.0", "- acme/top@1.0.0"]
    assert describe_changes([], after) == ["+ acme/low@1.2.0"]
