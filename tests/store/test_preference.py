"""Which of several installed versions is meant: the table of the rule, and its files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import NotFoundError
from expertctl.reference import Digest, PackageName, Reference, Version
from expertctl.settings import Home
from expertctl.store.pins import PinFiles, VersionPin, VersionPins
from expertctl.store.preference import (
    SignerNames,
    VersionPreference,
    describe_version_usage,
    read_preference,
    read_yanks,
    record_yanks,
)
from expertctl.store.refs import StoredExpert
from tests.routing.experts import make_installed, make_manifest
from tests.store.fixtures import HomeFixture, PackageFactory, package_factory, user_home

__all__ = ["package_factory", "user_home"]

SQL = PackageName("acme", "sql")
HUB = "hub.example"


def version(number: str, *, registry: str = HUB, signer: str = "k1") -> StoredExpert:
    stored = make_installed(make_manifest("acme/sql", number), registry=registry).stored
    return replace(stored, signer=signer)


def yanked(*numbers: str) -> dict[tuple[str, str], str]:
    return {(HUB, f"acme/sql@{number}"): "wrong joins" for number in numbers}


def pinned(number: str) -> VersionPins:
    wanted = Reference.parse(f"acme/sql@{number}")
    return VersionPins({SQL: VersionPin(wanted, Path("expert.lock"))})


REVOKED = SignerNames(revoked=frozenset({("k2", None, None)}))
ELSEWHERE = SignerNames(assigned=frozenset({(HUB, "acme")}), registries=frozenset({HUB}))
V1, V2, RC = version("1.0.0"), version("2.0.0"), version("3.0.0-rc.1")


@pytest.mark.parametrize(
    ("experts", "preference", "used"),
    [
        ([V1, V2], VersionPreference(), "2.0.0"),
        ([V1, V2], VersionPreference(yanked("2.0.0")), "1.0.0"),
        ([V1, V2], VersionPreference(yanked("1.0.0")), "2.0.0"),
        ([V2], VersionPreference(yanked("2.0.0")), "2.0.0"),
        ([V1, V2], VersionPreference(yanked("1.0.0", "2.0.0")), "2.0.0"),
        ([V1, V2], VersionPreference(yanked("1.0.0"), pinned("1.0.0")), "1.0.0"),
        ([V1, V2], VersionPreference(pins=pinned("1.0.0")), "1.0.0"),
        ([V1, V2], VersionPreference(pins=pinned("1.5.0")), "2.0.0"),
        ([V1, V2, RC], VersionPreference(), "2.0.0"),
        ([V1, V2, RC], VersionPreference(pins=pinned("3.0.0-rc.1")), "3.0.0-rc.1"),
        ([RC], VersionPreference(), None),
        ([V1, version("2.0.0", signer="k2")], VersionPreference(signers=REVOKED), "1.0.0"),
        ([version("2.0.0", signer="k2")], VersionPreference(signers=REVOKED), "2.0.0"),
        ([V1, version("2.0.0", registry="other")], VersionPreference(signers=ELSEWHERE), "1.0.0"),
        ([V1, version("2.0.0", registry="other")], VersionPreference(yanked("2.0.0")), "2.0.0"),
    ],
    ids=[
        "the newest",
        "the newest that was not yanked",
        "an older one that was yanked changes nothing",
        "a yanked one where it is alone",
        "the newest where all were yanked",
        "a yanked one that is locked",
        "an older one that is locked",
        "a lock of what is not installed",
        "no prerelease",
        "a prerelease that is locked",
        "no prerelease even where it is alone",
        "none whose key was revoked",
        "a revoked one where it is alone, to be refused",
        "that of the registry of the namespace",
        "a yank by another registry than its own",
    ],
)
def test_the_version_that_is_used_where_none_is_named(
    experts: list[StoredExpert], preference: VersionPreference, used: str | None
) -> None:
    found = preference.select_used(experts).get(SQL)
    assert (str(found.version) if found else None) == used
    assert preference.select_used(experts[::-1]).get(SQL) == found


def test_a_constraint_limits_which_versions_are_compared() -> None:
    preference = VersionPreference(yanked("1.0.0"), pinned("2.0.0"))
    meant = [e for e in (V1, V2) if preference.may_mean(e, Reference.parse("acme/sql@^1"))]
    assert meant == [V1]


def test_what_is_told_of_a_version_names_the_one_that_is_used_instead() -> None:
    usage = describe_version_usage(V2, [V1, V2], VersionPreference(yanked("2.0.0")))
    assert (usage.used, usage.used_instead, usage.yanked) == (
        False,
        "acme/sql@1.0.0",
        "wrong joins",
    )


def files(home: Path, folder: Path) -> PinFiles:
    return PinFiles(Home(home), folder)


def lock_of(expert: StoredExpert) -> str:
    return (
        f'[[expert]]\nname = "{expert.package}"\nversion = "{expert.version}"\n'
        f'content_digest = "{expert.content_digest}"\n'
    )


def test_a_lock_file_names_its_versions_where_the_list_allows_them(tmp_path: Path) -> None:
    pins = files(tmp_path / "home", tmp_path)
    (tmp_path / "experts.toml").write_text('[experts]\n"acme/sql" = "^1"\n')
    (tmp_path / "expert.lock").write_text(lock_of(V1))
    assert pins.read().versions[SQL].matches(V1)
    (tmp_path / "experts.toml").write_text('[experts]\n"acme/sql" = "^2"\n')
    assert pins.read() == VersionPins()


def test_a_lock_file_does_not_name_another_content_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "experts.toml").write_text("[experts]\n")
    other = replace(V1, content_digest=Digest.compute(b"other"))
    (tmp_path / "expert.lock").write_text(lock_of(other))
    assert not files(tmp_path / "home", tmp_path).read().versions[SQL].matches(V1)


def test_the_own_list_counts_outside_of_projects_only(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "experts.toml").write_text('[experts]\n"acme/sql" = "1.0.0"\n"acme/x" = "^1"\n')
    assert list(files(home, work).read().versions) == [SQL]
    assert list(PinFiles(Home(home)).read().versions) == [SQL]
    (work / "experts.toml").write_text("[experts]\n")
    assert files(home, work).read() == VersionPins()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("expert.lock", b"\xff", "not UTF-8 text"),
        ("expert.lock", b"<<<<<<< ours\n", "line 1 is the marker of a merge conflict"),
        ("expert.lock", b"expert = 1\n", "expert is not a list of tables"),
        ("expert.lock", b"[[expert]]\nversion = '1.0.0'\n", "an expert has no 'name'"),
        (
            "expert.lock",
            b"[[expert]]\nname='../x'\nversion='1'\ncontent_digest='2'\n",
            "not a pack",
        ),
        ("expert.lock", b"#" * (1 << 20) + b"\n", "more than 1048576 bytes"),
        ("experts.toml", b"experts = []\n", "experts is not a table"),
        ("experts.toml", b"[experts]\n'acme/sql' = 'latest'\n", "not a version constraint"),
    ],
)
def test_a_damaged_file_names_no_version_and_is_told(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / "experts.toml").write_text("")
    (tmp_path / name).write_bytes(content)
    found = files(tmp_path / "home", tmp_path).read()
    assert found.versions == {}
    [told] = found.problems
    assert told.startswith(f"{tmp_path / name} is ignored, as it cannot be read: ")
    assert problem in told


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_the_lock_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "experts.toml").write_text("")
    os.mkfifo(tmp_path / "expert.lock")
    assert "not a regular file" in files(tmp_path / "home", tmp_path).read().problems[0]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hub": 1}', '{"hub": {"acme/sql@1.0.0": 1}}'])
def test_a_damaged_record_of_yanks_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "yanked.json").write_text(text)
    assert read_yanks(tmp_path / "yanked.json") == {}


def test_what_a_registry_says_replaces_what_it_said_before_of_that_package_only(
    user_home: HomeFixture,
) -> None:
    path, other = (
        user_home.home.yanked,
        make_installed(make_manifest("acme/x"), registry=HUB).stored,
    )
    key = HUB, SQL

    def said(versions: dict[Version, str], *experts: StoredExpert) -> dict[str, dict[str, str]]:
        record_yanks(
            path,
            {key: versions},
            installed=lambda: experts,
            locked=user_home.store.begin_transaction,
        )
        return dict(json.loads(path.read_text()))

    path.write_text(json.dumps({HUB: {"acme/x@1.0.0": "old", "acme/gone@1.0.0": "old"}}))
    assert said({V1.version: "bad", V2.version: ""}, V1, other) == {
        HUB: {"acme/sql@1.0.0": "bad", "acme/x@1.0.0": "old"}
    }
    assert said({}, V1, other) == {HUB: {"acme/x@1.0.0": "old"}}


def test_a_store_finds_the_version_that_is_preferred(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(
        package_factory.package("acme/sql", "1.0.0"), package_factory.package("acme/sql", "1.1.0")
    )
    user_home.home.yanked.write_text(json.dumps({"local": {"acme/sql@1.1.0": ""}}))
    store = replace(user_home.store, preference=read_preference(user_home.home))
    assert store.find(Reference.parse("acme/sql")).ref == "acme/sql@1.0.0"
    assert store.find(Reference.parse("acme/sql@1.1.0")).ref == "acme/sql@1.1.0"
    with pytest.raises(NotFoundError):
        store.find(Reference.parse("acme/sql@^2"))
