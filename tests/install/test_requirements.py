"""Who needs whom, and who will not be beside whom."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import ConflictError, MissingDependencyError
from expertctl.install.candidate import InstallCandidate
from expertctl.install.publication import (
    check_conflicts,
    check_requirements,
    sort_by_requirements,
)
from expertctl.store.refs import LOCAL
from tests.install.candidates import make_candidate


def claims(
    name: str, version: str = "1.0.0", *, requires: str = "", conflicts: str = ""
) -> InstallCandidate:
    return make_candidate(
        f"acme/{name}@{version}",
        requires=[f"acme/{text}" for text in requires.split()],
        conflicts=[f"acme/{text}" for text in conflicts.split()],
        registry=LOCAL,
    )


def test_requirements_are_met_by_what_is_installed_or_given() -> None:
    new = [claims("a", requires="b@^1 c"), claims("b", "1.5.0")]
    check_requirements(new, [claims("c")])


def test_everything_that_is_missing_is_named() -> None:
    new = [claims("a", requires="b@^1 c"), claims("d", requires="c e@2.0.0")]
    with pytest.raises(MissingDependencyError) as error:
        check_requirements(new, [claims("b", "2.0.0"), claims("e")])
    for text in ("acme/a@1.0.0 requires acme/b@^1", "acme/a@1.0.0 requires acme/c",
                 "acme/d@1.0.0 requires acme/c", "acme/d@1.0.0 requires acme/e@2.0.0"):  # fmt: skip
        assert text in error.value.message
    assert error.value.hint.count("acme/c") == 1


def test_a_requirement_of_another_registry_is_not_met_by_a_local_one() -> None:
    new = [make_candidate("acme/a@1.0.0", requires=["example.com/acme/b"])]
    with pytest.raises(MissingDependencyError, match=r"example\.com/acme/b"):
        check_requirements(new, [claims("b")])


@pytest.mark.parametrize(
    ("new", "installed"),
    [
        ([claims("a", conflicts="b@*")], [claims("b")]),
        ([claims("b")], [claims("a", conflicts="b@*")]),
        ([claims("a", conflicts="b@^1"), claims("b", "1.9.0")], []),
        ([claims("a", "2.0.0", conflicts="a@^1")], [claims("a", "1.0.0")]),
    ],
)
def test_a_conflict_is_found_whoever_says_so(
    new: list[InstallCandidate], installed: list[InstallCandidate]
) -> None:
    with pytest.raises(ConflictError, match="conflicts with"):
        check_conflicts(new, installed)


@pytest.mark.parametrize(
    ("new", "installed"),
    [
        ([claims("a", conflicts="b@^2")], [claims("b")]),
        ([claims("a", conflicts="a@*")], []),
        ([claims("a", conflicts="a@*")], [claims("a", conflicts="a@*")]),
        ([claims("c")], [claims("a", conflicts="b"), claims("b")]),
    ],
)
def test_what_does_not_meet_does_not_conflict(
    new: list[InstallCandidate], installed: list[InstallCandidate]
) -> None:
    check_conflicts(new, installed)


NAMES = "abcdef"


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=6, max_size=6), st.permutations(NAMES))
@settings(max_examples=80, deadline=None)
def test_the_order_has_everyone_once_and_needs_first(
    needs: list[set[str]], given_order: list[str]
) -> None:
    wanted = dict(zip(NAMES, needs, strict=True))
    new = [claims(name, requires=" ".join(sorted(wanted[name]))) for name in given_order]
    ordered = [c.package.name for c in sort_by_requirements(new)]
    assert sorted(ordered) == sorted(NAMES)
    for name in NAMES:
        for need in wanted[name]:
            on_a_cycle = name in reach(need, wanted)
            assert on_a_cycle or ordered.index(need) < ordered.index(name)


def reach(start: str, wanted: dict[str, set[str]]) -> set[str]:
    seen, left = set(), [start]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += wanted[name]
    return seen
