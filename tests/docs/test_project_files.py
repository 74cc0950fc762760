"""The reference of experts.toml and expert.lock: its examples are read by the real parsers."""

import re
from pathlib import Path

import pytest

from expertctl.install import project_file
from expertctl.install.project_file import LockFile, Project
from expertctl.reference import Constraint, Version
from expertctl.store.pins import MAX_BYTES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
LIST = (REFERENCE / "experts-toml.md").read_text(encoding="utf-8")
LOCK = (REFERENCE / "expert-lock.md").read_text(encoding="utf-8")
GUIDE = (REFERENCE.parent / "how-to" / "install-from-a-registry.md").read_text(encoding="utf-8")


def examples(page: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", [*examples(LIST), *examples(GUIDE)])
def test_an_example_of_a_list_is_read(text: str) -> None:
    project = Project.parse(text, what="experts.toml")
    assert project.experts
    assert project.registries


def test_the_example_of_a_lock_is_exactly_what_is_written() -> None:
    (text,) = examples(LOCK)
    lock = LockFile.parse(text, what="expert.lock")
    assert lock.encode() == text
    wanted = "".join(
        f'"{ref.partition("@")[0]}" = "{ref.partition("@")[2]}"\n' for ref in lock.wanted
    )
    lock.check_current(Project.parse(f"[experts]\n{wanted}", what=""), what="expert.lock")


def test_every_key_of_a_lock_has_a_row_in_its_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", LOCK, re.MULTILINE)
    assert rows[:2] == ["format", "wanted"]
    assert tuple(rows[2 : 2 + len(project_file._KEYS)]) == project_file._KEYS


def test_every_table_of_a_list_has_a_section() -> None:
    assert set(re.findall(r"^## `\[(\w+)\]`$", LIST, re.MULTILINE)) == project_file._TABLES


def test_a_constraint_allows_what_its_row_says() -> None:
    rows = re.findall(r"^\| `([^`…]+)` \| ([<>=]\S.*?) \|$", LIST, re.MULTILINE)
    assert len(rows) >= 9
    for text, bounds in rows:
        stated = {
            tuple(re.split(r"(?<==)|(?<=[<>])(?!=)", bound, maxsplit=1))
            for bound in bounds.split(", ")
        }
        found = {(operator, str(version)) for operator, version in Constraint.parse(text).bounds}
        assert found == stated, text


def test_prereleases_are_allowed_as_the_page_says() -> None:
    candidate = Version.parse("2.0.0-rc.2")
    assert Constraint.parse(">=2.0.0-rc.1").allows(candidate)
    assert not Constraint.parse(">=1").allows(candidate)


def test_the_limits_are_those_of_the_code() -> None:
    assert f"at most {project_file.MAX_EXPERTS} in all" in LIST
    assert "at most 1 MiB" in LIST
    assert "at most 1 MiB" in LOCK
    assert MAX_BYTES == 1 << 20
