"""Choosing versions: what is preferred, what is left out, and what is said when nothing fits."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from expertctl.errors import (
    ConflictError,
    ExpertError,
    IncompatibleError,
    MissingDependencyError,
    NotFoundError,
    OfflineError,
    RegistryError,
)
from expertctl.install import resolve as module
from expertctl.install.candidate import InstallCandidate, ReleaseAge, Requirement
from expertctl.install.resolve import CandidatePool, LockedVersion, ResolvedPackage, resolve
from expertctl.reference import Digest, PackageName, Reference, Version
from tests.install.candidates import HOST, make_candidate, make_index

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def asked(*texts: str, by: str = "you") -> list[Requirement]:
    return [Requirement(Reference.parse(text), by) for text in texts]


def chosen(
    needs: Sequence[Requirement], offered: Sequence[InstallCandidate] = (), **universe: Any
) -> list[ResolvedPackage]:
    return resolve(needs, CandidatePool(make_index(offered), **universe))


def refs(found: Sequence[ResolvedPackage]) -> list[str]:
    return [item.candidate.ref for item in found]


def versions(name: str, *numbers: str, **options: Any) -> list[InstallCandidate]:
    return [make_candidate(f"{name}@{number}", **options) for number in numbers]


def pin(candidate: InstallCandidate) -> dict[PackageName, LockedVersion]:
    return {candidate.package: LockedVersion(candidate.version, candidate.content_digest)}


def test_the_newest_version_that_is_allowed_is_chosen() -> None:
    offered = versions("acme/sql", "1.0.0", "1.10.0", "1.9.0", "2.0.0")
    assert refs(chosen(asked("acme/sql"), offered)) == ["acme/sql@2.0.0"]
    assert refs(chosen(asked("acme/sql@^1"), offered)) == ["acme/sql@1.10.0"]


def test_a_prerelease_is_chosen_only_when_it_is_named() -> None:
    offered = versions("acme/sql", "1.0.0", "2.0.0-rc.1")
    assert refs(chosen(asked("acme/sql"), offered)) == ["acme/sql@1.0.0"]
    assert refs(chosen(asked("acme/sql@2.0.0-rc.1"), offered)) == ["acme/sql@2.0.0-rc.1"]


def test_what_is_required_comes_along_with_what_that_requires() -> None:
    offered = [
        make_candidate("acme/a@1.0.0", requires=["acme/b@^1"]),
        make_candidate("acme/b@1.5.0", requires=["acme/c"]),
        make_candidate("acme/b@2.0.0"),
        make_candidate("acme/c@3.0.0"),
    ]
    found = chosen(asked("acme/a"), offered)
    assert refs(found) == ["acme/a@1.0.0", "acme/b@1.5.0", "acme/c@3.0.0"]
    assert [str(need) for item in found for need in item.needs] == [
        "you ask acme/a",
        "acme/a@1.0.0 requires acme/b@^1",
        "acme/b@1.5.0 requires acme/c",
    ]


def test_an_older_version_is_taken_where_the_newest_cannot_be() -> None:
    offered = [
        make_candidate("acme/a@1.0.0"),
        make_candidate("acme/a@2.0.0", requires=["acme/b@^2"]),
        *versions("acme/b", "1.0.0", "2.0.0"),
    ]
    assert refs(chosen(asked("acme/a", "acme/b@^1"), offered)) == ["acme/a@1.0.0", "acme/b@1.0.0"]


def test_a_cycle_of_requirements_is_legal() -> None:
    offered = [
        make_candidate("acme/a@1.0.0", requires=["acme/b@^1"]),
        make_candidate("acme/b@1.0.0", requires=["acme/a@^1"]),
    ]
    assert refs(chosen(asked("acme/a"), offered)) == ["acme/a@1.0.0", "acme/b@1.0.0"]


def test_a_version_that_needs_another_version_of_itself_is_never_chosen() -> None:
    offered = [
        make_candidate("acme/a@1.0.0"),
        make_candidate("acme/a@2.0.0", requires=["acme/a@^1"]),
    ]
    assert refs(chosen(asked("acme/a"), offered)) == ["acme/a@1.0.0"]


def test_a_conflict_sends_the_search_to_another_version_from_both_sides() -> None:
    hater = [make_candidate("acme/a@1.0.0"), make_candidate("acme/a@2.0.0", conflicts=["acme/b"])]
    offered = [*hater, make_candidate("acme/b@1.0.0")]
    assert refs(chosen(asked("acme/a", "acme/b"), offered)) == ["acme/a@1.0.0", "acme/b@1.0.0"]
    assert refs(chosen(asked("acme/a"), offered)) == ["acme/a@2.0.0"]


def test_what_is_locked_is_preferred_while_it_fits() -> None:
    offered = versions("acme/sql", "1.0.0", "1.1.0", "2.0.0")
    locked = pin(offered[0])
    assert refs(chosen(asked("acme/sql"), offered, locked=locked)) == ["acme/sql@1.0.0"]
    assert refs(chosen(asked("acme/sql@^2"), offered, locked=locked)) == ["acme/sql@2.0.0"]


def test_what_is_locked_and_installed_needs_no_index() -> None:
    here, requests = make_candidate("acme/sql@1.0.0", given=True), list[PackageName]()
    universe = CandidatePool(make_index([], requests), installed=[here], locked=pin(here))
    assert refs(resolve(asked("acme/sql"), universe)) == ["acme/sql@1.0.0"]
    assert requests == []


def test_what_is_installed_satisfies_a_requirement_without_an_index() -> None:
    top = make_candidate("acme/top@1.0.0", requires=["acme/sql@^1"])
    here, requests = make_candidate("acme/sql@1.0.0", given=True), list[PackageName]()
    newer = make_candidate("acme/sql@1.9.0")
    universe = CandidatePool(make_index([top, newer], requests), installed=[here])
    assert refs(resolve(asked("acme/top"), universe)) == ["acme/sql@1.0.0", "acme/top@1.0.0"]
    assert requests == [PackageName.parse("acme/top")]


def test_a_person_who_names_a_package_gets_the_newest_though_another_is_installed() -> None:
    here, newer = make_candidate("acme/sql@1.0.0", given=True), make_candidate("acme/sql@1.9.0")
    assert refs(chosen(asked("acme/sql"), [newer], installed=[here])) == ["acme/sql@1.9.0"]


def test_an_exact_version_that_is_installed_needs_no_index() -> None:
    here, requests = make_candidate("acme/sql@1.0.0", given=True), list[PackageName]()
    universe = CandidatePool(make_index([], requests), installed=[here])
    assert refs(resolve(asked("acme/sql@1.0.0"), universe)) == ["acme/sql@1.0.0"]
    assert requests == []


def test_what_is_installed_counts_where_no_registry_has_it() -> None:
    here = make_candidate("acme/sql@1.0.0", given=True, registry="local")
    assert refs(chosen(asked("acme/sql"), installed=[here])) == ["acme/sql@1.0.0"]


def test_a_file_that_was_given_is_the_only_choice_for_its_name() -> None:
    file = make_candidate("acme/sql@1.0.0", registry="local", requires=["acme/b@1"])
    offered = [make_candidate("acme/sql@2.0.0"), *versions("acme/b", "1.0.0", "2.0.0")]
    needs = asked("acme/sql@1.0.0", by="sql.expert")
    assert refs(chosen(needs, offered, files=[file])) == ["acme/b@1.0.0", "acme/sql@1.0.0"]


def test_a_yanked_version_is_passed_over() -> None:
    offered = [make_candidate("acme/sql@1.0.0"), make_candidate("acme/sql@1.1.0", yanked="leaks")]
    assert refs(chosen(asked("acme/sql"), offered)) == ["acme/sql@1.0.0"]
    with pytest.raises(NotFoundError, match=r"1\.1\.0 was yanked: leaks"):
        chosen(asked("acme/sql@^1.1"), offered)


def test_a_yanked_version_is_taken_when_locked_or_named_exactly_by_a_person() -> None:
    offered = [make_candidate("acme/sql@1.0.0"), make_candidate("acme/sql@1.1.0", yanked="")]
    locked = pin(offered[1])
    assert refs(chosen(asked("acme/sql"), offered, locked=locked)) == ["acme/sql@1.1.0"]
    assert refs(chosen(asked("acme/sql@1.1.0"), offered)) == ["acme/sql@1.1.0"]


def test_of_installed_versions_a_yanked_one_is_the_last_that_satisfies_a_requirement() -> None:
    top = make_candidate("acme/top@1.0.0", requires=["acme/sql@^1"])
    good = make_candidate("acme/sql@1.0.0", given=True)
    bad = make_candidate("acme/sql@1.1.0", yanked="leaks", given=True)
    assert "acme/sql@1.0.0" in refs(chosen(asked("acme/top"), [top], installed=[good, bad]))
    assert "acme/sql@1.1.0" in refs(chosen(asked("acme/top"), [top], installed=[bad]))


@pytest.mark.parametrize(
    ("offered", "hint"),
    [
        ([("1.0.0", "leaks", False)], "every version was yanked: ask"),
        ([("1.0.0", None, True)], "every version was signed with a key that was revoked"),
        ([("1.0.0", "", False), ("1.1.0", None, True)], "yanked, or its key was revoked: ask"),
        ([("1.0.0", "", True), ("1.1.0", "", True)], "every version was signed with a key"),
        ([("1.0.0", "", False), ("2.0.0-rc.1", None, False)], "a prerelease must be named"),
        ([("1.0.0", "", False), ("2.0.0-rc.1", None, True)], "yanked, or its key was revoked: ask"),
    ],
)
def test_where_no_version_may_be_chosen_the_hint_says_what_is_the_matter(
    offered: list[tuple[str, str | None, bool]], hint: str
) -> None:
    candidates = [
        replace(make_candidate(f"acme/sql@{number}", yanked=yanked), revoked=revoked)
        for number, yanked, revoked in offered
    ]
    with pytest.raises(ExpertError) as told:
        chosen(asked("acme/sql"), candidates)
    assert hint in told.value.hint


def test_a_package_cannot_bring_in_a_yanked_version_of_another() -> None:
    offered = [
        make_candidate("acme/top@1.0.0", requires=["acme/sql@1.1.0"]),
        make_candidate("acme/sql@1.1.0", yanked=""),
    ]
    with pytest.raises(IncompatibleError, match=r"acme/top@1\.0\.0 requires acme/sql@1\.1\.0"):
        chosen(asked("acme/top"), offered)


def test_a_locked_version_counts_only_with_its_content() -> None:
    offered = versions("acme/sql", "1.0.0", "1.1.0")
    other = make_candidate("acme/sql@1.0.0", content="another")
    assert refs(chosen(asked("acme/sql"), offered, locked=pin(other))) == ["acme/sql@1.1.0"]


def test_a_version_waits_until_it_has_its_least_age() -> None:
    offered = [
        make_candidate("acme/sql@1.0.0", published=NOW - timedelta(days=30)),
        make_candidate("acme/sql@1.1.0", published=NOW - timedelta(days=1)),
    ]
    age = ReleaseAge(timedelta(days=3), (), NOW)
    assert refs(chosen(asked("acme/sql"), offered, age=age)) == ["acme/sql@1.0.0"]
    with pytest.raises(NotFoundError, match=r"1\.1\.0 waits until 2026-11-23 00:00 UTC") as raised:
        chosen(asked("acme/sql@1.1.0"), offered, age=age)
    assert "minimum_release_age_exclude" in raised.value.hint
    for name in ("acme", "acme/sql"):
        excluded = ReleaseAge(timedelta(days=3), (name,), NOW)
        assert refs(chosen(asked("acme/sql"), offered, age=excluded)) == ["acme/sql@1.1.0"]


def test_what_is_locked_or_named_by_its_digest_does_not_wait() -> None:
    young = make_candidate("acme/sql@1.1.0", published=NOW)
    age = ReleaseAge(timedelta(days=3), (), NOW)
    assert refs(chosen(asked("acme/sql"), [young], age=age, locked=pin(young))) == [young.ref]
    by_digest = asked(f"acme/sql@{young.content_digest}")
    assert refs(chosen(by_digest, [young], age=age)) == [young.ref]


def test_an_older_signed_form_is_taken_when_its_digest_is_named() -> None:
    forms = (Digest.compute(b"newest"), Digest.compute(b"older"))
    offered = [replace(make_candidate("acme/sql@1.0.0"), package_digests=forms)]
    (newest,) = chosen(asked("acme/sql"), offered)
    (older,) = chosen(asked(f"acme/sql@{forms[1]}"), offered)
    assert (newest.package_digest, older.package_digest) == forms


def test_requirements_that_disagree_are_told_with_their_chains() -> None:
    offered = [
        make_candidate("acme/d@1.0.0", requires=["acme/a@^1"]),
        make_candidate("acme/a@1.0.0", requires=["acme/b@^2"]),
        *versions("acme/b", "1.0.0", "2.0.0"),
    ]
    needs = [*asked("acme/d"), *asked("acme/b@^1", by="experts.toml")]
    with pytest.raises(ConflictError) as raised:
        chosen(needs, offered)
    assert raised.value.message == (
        "experts.toml asks acme/b@^1, but acme/d@1.0.0 requires acme/a@^1, "
        "acme/a@1.0.0 requires acme/b@^2; there are 1.0.0, 2.0.0"
    )


def test_a_refusal_that_cannot_be_helped_is_told() -> None:
    offered = [
        make_candidate("acme/a@1.0.0", conflicts=["acme/b@^1"]),
        make_candidate("acme/b@1.0.0"),
    ]
    with pytest.raises(ConflictError, match=r"acme/a@1\.0\.0 refuses acme/b@\^1; there is 1\.0\.0"):
        chosen(asked("acme/a", "acme/b"), offered)


def test_a_name_that_is_nowhere_is_told_apart_from_a_requirement_that_is() -> None:
    with pytest.raises(NotFoundError, match=rf"acme/absent is not there: {HOST} has no"):
        chosen(asked("acme/absent"))
    top = make_candidate("acme/top@1.0.0", requires=["acme/absent@^1"])
    with pytest.raises(MissingDependencyError, match=r"acme/top@1\.0\.0 requires acme/absent@\^1"):
        chosen(asked("acme/top"), [top])


def test_a_version_that_is_not_there_is_told_with_those_that_are() -> None:
    offered = versions("acme/sql", *[f"1.{minor}.0" for minor in range(12)])
    with pytest.raises(NotFoundError, match=r"there are 4 older and 1\.4\.0, .*1\.11\.0"):
        chosen(asked("acme/sql@^2"), offered)
    with pytest.raises(NotFoundError) as raised:
        chosen(asked("acme/sql"), versions("acme/sql", "1.0.0-rc.1"))
    assert "prerelease must be named" in raised.value.hint


def test_one_package_is_never_mixed_from_two_registries() -> None:
    offered = versions("acme/sql", "1.0.0", registry="one.example")
    offered += versions("acme/sql", "2.0.0", registry="two.example")
    needs = asked("one.example/acme/sql", "two.example/acme/sql")
    with pytest.raises(ConflictError, match=r"one\.example/acme/sql, but you ask two\.example"):
        chosen(needs, offered)
    assert refs(chosen(asked("one.example/acme/sql"), offered)) == ["acme/sql@1.0.0"]


def test_a_namespace_mate_is_looked_for_where_its_dependent_came_from() -> None:
    hosts: list[str | None] = []
    top = make_candidate("acme/top@1.0.0", registry="one.example", requires=["acme/b", "beta/c"])
    offered = {"acme/top": top, "acme/b": make_candidate("acme/b@1.0.0", registry="one.example"),
               "beta/c": make_candidate("beta/c@1.0.0")}  # fmt: skip

    def index(wanted: Reference, by_hand: bool) -> list[InstallCandidate]:
        hosts.append(wanted.registry)
        return [offered[str(wanted.package)]]

    resolve(asked("one.example/acme/top"), CandidatePool(index))
    assert hosts == ["one.example", "one.example", None]


def test_a_registry_that_fails_is_not_one_that_has_nothing() -> None:
    def broken(wanted: Reference, by_hand: bool) -> list[InstallCandidate]:
        raise RegistryError(f"{HOST}: bad gateway")

    def offline(wanted: Reference, by_hand: bool) -> list[InstallCandidate]:
        raise OfflineError("expertctl is offline")

    with pytest.raises(RegistryError, match="bad gateway"):
        resolve(asked("acme/sql"), CandidatePool(broken))
    with pytest.raises(NotFoundError, match="expertctl is offline"):
        resolve(asked("acme/sql"), CandidatePool(offline))


def test_an_endless_chain_of_packages_ends() -> None:
    def index(wanted: Reference, by_hand: bool) -> list[InstallCandidate]:
        package = wanted.package
        number = int(package.name[1:])
        return [make_candidate(f"{package}@1.0.0", requires=[f"acme/p{number + 1}"])]

    with pytest.raises(IncompatibleError, match="more than 300 packages"):
        resolve(asked("acme/p0"), CandidatePool(index))


def test_thousands_of_versions_that_all_disagree_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight packages, with 500 versions, wants a version of the next that is not there."""
    monkeypatch.setattr(module, "MAX_STEPS", 200)

    def index(wanted: Reference, by_hand: bool) -> list[InstallCandidate]:
        package = wanted.package
        number = int(package.name[1:])
        after = [f"acme/p{(number + 1) % 8}@^1", f"acme/p{(number + 3) % 8}@<1.{number}.0"]
        return [
            make_candidate(
                f"{package}@1.{minor}.0", requires=[*after, f"acme/p{minor % 8}@>=1.600"]
            )
            for minor in range(500)
        ]

    with pytest.raises(IncompatibleError):
        resolve(asked("acme/p0"), CandidatePool(index))


def test_hundreds_of_versions_that_need_the_same_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_LOOKS", 1000)
    numbers = [f"1.{minor}.0" for minor in range(400)]
    offered = [
        *versions("acme/sql", *numbers, requires=["acme/text@^2"]),
        *versions("acme/text", *numbers),
    ]
    with pytest.raises(IncompatibleError, match=r"^acme/sql@1\.399\.0 requires acme/text@\^2; "):
        chosen(asked("acme/sql"), offered)


def test_a_search_that_looks_at_too_many_versions_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version wants another range of the next package, of which nothing is there."""
    monkeypatch.setattr(module, "MAX_LOOKS", 1000)
    offered = [
        make_candidate(f"acme/sql@1.{minor}.0", requires=[f"acme/text@>=2.{minor}"])
        for minor in range(100)
    ]
    offered += versions("acme/text", *(f"1.{minor}.0" for minor in range(100)))
    with pytest.raises(IncompatibleError, match="no answer after 1,000 looks at versions"):
        chosen(asked("acme/sql"), offered)


def test_a_candidate_is_what_a_reference_with_its_digest_asks_for() -> None:
    one = make_candidate("acme/sql@1.0.0")
    for digest in (one.content_digest, one.package_digest):
        assert one.satisfies(Reference.parse(f"acme/sql@{digest}"))
    assert not one.satisfies(Reference.parse(f"acme/sql@{Digest.compute(b'')}"))
    assert one.version == Version(1, 0, 0)
