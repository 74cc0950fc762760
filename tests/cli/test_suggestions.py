"""Who names an expert by less than its whole name hears which one may be meant."""

from pathlib import Path

import pytest

from expertctl.cli.suggestions import add_name_suggestions
from expertctl.errors import NotFoundError, UsageError
from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["expertctl", "fast", "package_factory", "user_home"]

MEANT = "hint: did you mean acme/units?"


@pytest.fixture(autouse=True)
def experts(user_home: HomeFixture, package_factory: PackageFactory) -> None:
    user_home.install(package_factory.package("acme/units"), package_factory.package("acme/dates"))


@pytest.mark.parametrize(
    "words",
    [
        ["route", "x", "--expert", "units"],
        ["route", "x", "--expert", "unit:0.5"],
        ["route", "x", "--exclude=units@1"],
        ["run", "x", "--expert", "units"],
        ["chat", "--expert", "units"],
        ["remove", "units"],
        ["inspect", "units"],
        ["info", "Units"],
    ],
)
def test_a_name_without_its_namespace_is_answered_with_the_whole(
    expertctl: CommandRunner, words: list[str]
) -> None:
    said = expertctl(*words, exit_code=2)
    assert "is not a package name" in said.err
    assert MEANT in said.err


def test_the_document_says_it_too(expertctl: CommandRunner) -> None:
    error = expertctl("why", "unit", "--json", exit_code=2).document["error"]
    assert error == {
        "code": "usage",
        "message": "'unit' is not a package name",
        "hint": "did you mean acme/units?",
    }


def test_a_name_like_none_is_answered_with_what_names_look_like(expertctl: CommandRunner) -> None:
    assert "names look like acme/sql-gen" in expertctl("remove", "poetry", exit_code=2).err


def test_other_errors_and_a_home_that_cannot_be_read_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "file" / "home"))
    for error in (
        NotFoundError("gone", hint="look"),
        UsageError("no", hint="why"),
        UsageError("'units' is not a package name", hint="why", unknown_name="units"),
    ):
        assert add_name_suggestions(error) is error


def test_info_of_a_file_points_to_what_shows_files(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    for file in ("sql.expert", tmp_path / "missing.expert"):
        said = expertctl("info", file, exit_code=2)
        assert f"hint: `expertctl inspect {file}` shows what is in it" in said.err
