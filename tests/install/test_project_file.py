"""experts.toml: what it may say, and changing it by one line."""

import os
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.install.project_file import Project, ProjectFile
from expertctl.reference import PackageName, Reference


def parse(text: str) -> Project:
    return Project.parse(text, what="experts.toml")


def test_experts_and_registries_are_read() -> None:
    project = parse(
        '[experts]\n"acme/sql" = "^1.2"\n"hub.example/beta/chat" = "*"\n"gamma/x" = "1.0.0"\n'
        '[registries]\ngamma = "127.0.0.1:8080"\n'
    )
    assert [str(reference) for reference in project.experts] == [
        "acme/sql@^1.2",
        "hub.example/beta/chat",
        "127.0.0.1:8080/gamma/x@1.0.0",
    ]
    assert project.registries == (("gamma", "127.0.0.1:8080"),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[experts]\n"acme/sql" = 1\n', "its value is not text"),
        ('[experts]\n"Acme/sql" = "*"\n', "not a package name"),
        ('[experts]\n"acme/sql" = "latest"\n', "not a version constraint"),
        ('[experts]\n"acme/sql@1.0.0" = "*"\n', "holds no '@'"),
        ('[experts]\n"acme/sql" = "*"\n"hub.example/acme/sql" = "*"\n', "is there twice"),
        ('experts = "acme/sql"\n', "experts is not a table"),
        ('[trust]\nkey = "x"\n', "unknown table 'trust'"),
        ('[registries]\nacme = "http://user:pass@hub"\n', "contains no login"),
        ('[registries]\n"../x" = "hub"\n', "not a package name"),
        ("[experts\n", "not valid TOML"),
        (
            '[experts]\n<<<<<<< ours\n"acme/sql" = "^1"\n=======\n',
            "line 2 is the marker of a merge",
        ),
        ("[experts]\n" + "".join(f'"acme/x{i}" = "*"\n' for i in range(201)), "more than 200"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidPackageError, match=problem):
        parse(text)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidPackageError) as raised:
        parse('[experts]\n"A/b" = "*"\n"acme/sql" = "x"\n[other]\n')
    assert len(raised.value.problems) == 3


@pytest.mark.parametrize("data", [b"\xff\xfe", b"#" * (1 << 20) + b"##"])
def test_a_file_that_is_no_text_or_endless_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "experts.toml").write_bytes(data)
    with pytest.raises(InvalidPackageError):
        ProjectFile(tmp_path / "experts.toml", tmp_path / "guard").read()


def test_a_pipe_is_no_project_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "experts.toml")
    with pytest.raises(InvalidPackageError, match="not a regular file"):
        ProjectFile(tmp_path / "experts.toml", tmp_path / "guard").read()


def saved(folder: Path, text: str, *references: str) -> str:
    file = ProjectFile(folder / "experts.toml", folder / "guard")
    if text:
        file.path.write_text(text)
    wanted = [Reference.parse(reference) for reference in references]
    file.update({reference.package: reference for reference in wanted})
    return file.path.read_text()


def test_saving_changes_one_line_and_keeps_comments(tmp_path: Path) -> None:
    text = '# ours\n[experts]  # all\n"acme/sql" = "^1" # old\n"beta/x" = "*"\n'
    assert saved(tmp_path, text, "acme/sql@^2", "acme/new") == (
        '# ours\n[experts]  # all\n"acme/new" = "*"\n"acme/sql" = "^2"\n"beta/x" = "*"\n'
    )


def test_saving_makes_the_file_and_its_table(tmp_path: Path) -> None:
    assert saved(tmp_path, "", "hub.example/acme/sql@1.0.0") == (
        '[experts]\n"hub.example/acme/sql" = "1.0.0"\n'
    )
    (tmp_path / "experts.toml").write_text('[registries]\nacme = "hub.example"\n')
    assert saved(tmp_path, "", "beta/x").endswith('\n[experts]\n"beta/x" = "*"\n')


def test_a_file_in_an_unusual_form_is_left_alone(tmp_path: Path) -> None:
    text = "experts = { 'acme/sql' = '^1' }\n"
    with pytest.raises(InvalidPackageError, match="line by line"):
        saved(tmp_path, text, "acme/sql@^2")
    assert (tmp_path / "experts.toml").read_text() == text


def test_dropping_takes_one_line_out(tmp_path: Path) -> None:
    file = ProjectFile(tmp_path / "experts.toml", tmp_path / "guard")
    file.path.write_text('[experts]\n"acme/sql" = "*"\n"beta/x" = "*"\n')
    assert file.remove(PackageName.parse("acme/sql"))
    assert not file.remove(PackageName.parse("acme/sql"))
    assert file.path.read_text() == '[experts]\n"beta/x" = "*"\n'
