"""How experts are named on a command line: by reference, digest or file, with a weight."""

from pathlib import Path

import pytest

from expertctl.engine.request import FileExpert, parse_expert
from expertctl.errors import ExpertError, UsageError
from expertctl.reference import Digest, Reference
from expertctl.routing.request import ForcedExpert


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("./sql.expert", "sql.expert", 1.0),
        ("/a/b c/sql.expert:0.5", "/a/b c/sql.expert", 0.5),
        ("sql.expert:-1", "sql.expert", -1.0),
        ("C:\\x\\sql.expert:2", "C:\\x\\sql.expert", 2.0),
        ("../a:b/x.expert", "../a:b/x.expert", 1.0),
        ("a.expert/b.expert", "a.expert/b.expert", 1.0),
    ],
)
def test_a_file_is_told_by_its_name(text: str, path: str, weight: float) -> None:
    assert parse_expert(text) == FileExpert(Path(path), weight)


def test_anything_else_is_a_reference_or_a_digest() -> None:
    assert parse_expert("acme/sql@^1.2:0.5") == ForcedExpert(Reference.parse("acme/sql@^1.2"), 0.5)
    digest = "sha256:" + "a" * 64
    assert parse_expert(digest) == ForcedExpert(Digest("a" * 64))


@pytest.mark.parametrize(
    "text", ["x.expert:", "x.expert:heavy", "x.expert:nan", "x.expert:inf", "x.expert:11", "", "x"]
)
def test_what_is_none_of_them_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_expert(text)


def test_a_damaged_digest_is_refused() -> None:
    with pytest.raises(ExpertError):
        parse_expert("sha256:abc")
