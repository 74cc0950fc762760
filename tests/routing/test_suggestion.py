"""What is said of experts that are named and not installed."""

import pytest

from expertctl.digest import Digest
from expertctl.errors import NotFoundError
from expertctl.reference import PackageName, parse_target
from expertctl.routing.request import ForcedExpert
from expertctl.routing.selection import (
    find_near_names,
    format_suggestion,
    list_unused_exclusions,
    select_forced,
)
from tests.routing.experts import make_installed, make_manifest

SQL, NEWER, DATES = (
    make_installed(make_manifest("acme/sql-gen", "1.0.0")),
    make_installed(make_manifest("acme/sql-gen", "2.0.0-rc.1")),
    make_installed(make_manifest("corp/dates")),
)
EXPERTS = (SQL, NEWER, DATES)
NAMES = [expert.stored.package for expert in EXPERTS]
FULL = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("acme/sql-gne", ["acme/sql-gen"]),
        ("corp/sql-gen", ["acme/sql-gen"]),
        ("acme/dates", ["corp/dates"]),
        ("acme/sql-gen", []),
        ("other/thing", []),
    ],
)
def test_names_like_one_are_those_of_other_namespaces_and_slips(
    typed: str, meant: list[str]
) -> None:
    assert find_near_names(PackageName.parse(typed), NAMES) == meant


def test_at_most_three_names_are_suggested_and_each_once() -> None:
    many = [PackageName(f"n{i}", "sql") for i in range(5)]
    assert find_near_names(PackageName("acme", "sql"), [*many, *many]) == [
        "n0/sql",
        "n1/sql",
        "n2/sql",
    ]
    assert format_suggestion(PackageName("acme", "sql"), []) == ""


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("acme/sqlgen", "did you mean acme/sql-gen?"),
        ("acme/sql-gen@^3", "installed: 1.0.0, 2.0.0-rc.1"),
        ("zzz/zzz", "`expertctl list` shows what is installed"),
        (FULL, "`expertctl list --json` shows digests"),
    ],
)
def test_an_expert_that_is_forced_and_unknown_is_answered_with_what_was_meant(
    target: str, hint: str
) -> None:
    with pytest.raises(NotFoundError) as caught:
        select_forced([ForcedExpert(parse_target(target))], EXPERTS, EXPERTS, context=100)
    assert caught.value.message == f"{target} is not installed"
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("exclude", "warnings"),
    [
        (["acme/sql-gen", "corp/dates@1", str(NEWER.stored.content_digest)], []),
        (
            ["corp/datse"],
            ["corp/datse is excluded, and no such expert is installed; did you mean corp/dates?"],
        ),
        (
            ["corp/dates@>=2"],
            ["corp/dates@>=2 is excluded, and no such expert is installed; installed: 1.0.0"],
        ),
        (["x/y"], ["x/y is excluded, and no such expert is installed"]),
    ],
)
def test_an_exclusion_that_excludes_nothing_is_warned_of(
    exclude: list[str], warnings: list[str]
) -> None:
    assert list_unused_exclusions([parse_target(text) for text in exclude], EXPERTS) == warnings


def test_a_prerelease_alone_is_excluded_by_the_name_of_its_package() -> None:
    assert list_unused_exclusions([parse_target("acme/sql-gen")], [NEWER]) == []


def test_a_digest_that_names_nothing_installed_is_warned_of() -> None:
    (warning,) = list_unused_exclusions([Digest.parse_input(FULL)], EXPERTS)
    assert warning.startswith(f"{FULL} is excluded, and no such expert")
