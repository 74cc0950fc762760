"""Lists and lock files against a live registry: what they may do, and what they may not."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import (
    ConflictError,
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    TrustError,
    UsageError,
)
from expertctl.install.project_file import LockFile, require_lock
from expertctl.install.requirement_list import require_project
from expertctl.reference import Reference
from tests.install.fixtures import (
    InstallClient,
    ProjectFixture,
    PublishingRegistry,
    run_publishing_registry,
)
from tests.registry_server.publishing.package_fixtures import PackageTemplate
from tests.store.fixtures import PackageFactory


@pytest.fixture
def team(buyer: InstallClient, publisher: PublishingRegistry, tmp_path: Path) -> ProjectFixture:
    """A project that wants an expert, which requires another."""
    publisher.publish("acme/low@1.0.0")
    publisher.publish("acme/top@1.0.0", requires=["acme/low@^1"])
    return ProjectFixture(tmp_path / "project", buyer).write_project(
        '[experts]\n"acme/top" = "^1"\n'
    )


@pytest.fixture
def newcomer(publisher: PublishingRegistry, tmp_path: Path) -> InstallClient:
    return InstallClient.create(tmp_path / "second-home", publisher)


def refuses(team: ProjectFixture, error: type[ExpertError], match: str) -> None:
    before = team.client.user_home.read_files()
    with pytest.raises(error, match=match):
        team.install_locked()
    assert team.client.user_home.read_files() == before


def edit(team: ProjectFixture, old: str, new: str) -> None:
    text = team.lock_path.read_text()
    assert old in text
    team.lock_path.write_text(text.replace(old, new))


def test_a_project_is_locked_without_installing(team: ProjectFixture) -> None:
    assert team.lock() == ["+ acme/low@1.0.0", "+ acme/top@1.0.0"]
    assert team.lock() == []
    assert team.client.refs() == []
    assert not team.client.user_home.trust.read().list_registries_for("acme")


def test_what_is_locked_is_installed_elsewhere_though_there_is_newer(
    team: ProjectFixture, publisher: PublishingRegistry, newcomer: InstallClient
) -> None:
    team.install()
    publisher.publish("acme/low@1.1.0")
    publisher.publish("acme/top@1.1.0")
    other = team.with_client(newcomer)
    done = other.install_locked()
    assert [i.expert.ref for i in done.installed] == ["acme/low@1.0.0", "acme/top@1.0.0"]
    newcomer.user_home.check_integrity()
    again = ProjectFixture(team.folder, newcomer.offline()).install_locked()
    assert {i.outcome for i in again.installed} == {"already installed"}


def test_a_lock_is_kept_by_install_and_moved_by_update(
    team: ProjectFixture, publisher: PublishingRegistry
) -> None:
    team.install()
    publisher.publish("acme/low@1.1.0")
    publisher.publish("acme/top@1.1.0", requires=["acme/low@^1"])
    assert team.install()[1] == []
    assert team.install("acme/top")[1] == ["~ acme/top@1.0.0 -> 1.1.0"]
    assert team.install(everything=True)[1] == ["~ acme/low@1.0.0 -> 1.1.0"]
    assert len(team.client.refs()) == 4


def test_a_part_of_what_is_locked_comes_with_what_it_requires(
    team: ProjectFixture, publisher: PublishingRegistry, newcomer: InstallClient
) -> None:
    publisher.publish("acme/other@1.0.0")
    team.write_project('[experts]\n"acme/top" = "^1"\n"acme/other" = "*"\n').lock()
    other = team.with_client(newcomer)
    other.install_locked("acme/top")
    assert newcomer.refs() == ["acme/low@1.0.0", "acme/top@1.0.0"]
    with pytest.raises(NotFoundError, match=r"acme/other@\^2: locked is acme/other@1\.0\.0"):
        other.install_locked("acme/other@^2")
    with pytest.raises(NotFoundError, match="it is not locked"):
        other.install_locked("acme/absent")


def test_a_yanked_version_is_installed_by_the_lock_with_a_warning(
    team: ProjectFixture, publisher: PublishingRegistry, newcomer: InstallClient
) -> None:
    team.lock()
    publisher.yank("acme/low@1.0.0", "wrong licence")
    done = team.with_client(newcomer).install_locked()
    warnings = [warning for item in done.installed for warning in item.warnings]
    assert any("acme/low@1.0.0 was yanked: wrong licence" in warning for warning in warnings)


def test_a_lock_of_another_experts_toml_is_refused(team: ProjectFixture) -> None:
    team.lock()
    team.write_project('[experts]\n"acme/top" = "^2"\n')
    refuses(team, ConflictError, "does not fit experts.toml")


def test_a_lock_that_is_not_there_is_told(team: ProjectFixture) -> None:
    refuses(team, NotFoundError, "expert.lock")


@pytest.mark.parametrize(
    ("field", "match"),
    [
        ("content_digest", r"acme/low@1\.0\.0 has another content than before: expert\.lock has"),
        ("package_digest", r"another package_digest of acme/low@1\.0\.0"),
    ],
)
def test_an_edited_hash_is_refused(team: ProjectFixture, field: str, match: str) -> None:
    team.lock()
    lock = require_lock(team.lock_path)
    digest = getattr(lock.experts[0], field)
    edit(team, str(digest), f"sha256:{'0' * 64}")
    refuses(team, DigestError, match)


def test_the_hashes_of_another_version_are_refused(
    team: ProjectFixture, publisher: PublishingRegistry
) -> None:
    """A downgrade: the version says 1.1.0, the digests are those of 1.0.0."""
    publisher.publish("acme/low@1.1.0")
    team.lock()
    edit(team, 'version = "1.1.0"', 'version = "1.0.0"')
    refuses(team, DigestError, "acme/low@1.0.0 has another content than before: expert.lock has")


def test_a_requirement_that_was_edited_away_is_refused(team: ProjectFixture) -> None:
    team.lock()
    lock = require_lock(team.lock_path)
    text = LockFile(lock.wanted, lock.experts[1:]).encode()
    team.lock_path.write_text(text.replace('requires = ["acme/low@^1"]', "requires = []"))
    refuses(team, DigestError, "another requires of acme/top@1.0.0")


def test_a_swapped_registry_is_refused_known_or_not(
    team: ProjectFixture, publisher: PublishingRegistry, template: PackageTemplate, tmp_path: Path
) -> None:
    team.lock()
    text = team.lock_path.read_text()
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("acme")
        for parcel in publisher.published.values():
            other.publish(parcel.ref)
        for known in (False, True):
            if known:
                team.client.user_home.trust.add_registry(other.known)
            team.lock_path.write_text(text.replace(publisher.host, other.host))
            refuses(team, TrustError, f"but acme/\\* belongs to {publisher.host}")


def test_a_half_merged_lock_is_refused(team: ProjectFixture) -> None:
    team.lock()
    edit(team, "[[expert]]", "<<<<<<< HEAD\n[[expert]]")
    refuses(team, InvalidPackageError, "marker of a merge conflict")


def test_a_project_cannot_send_to_a_registry_that_the_user_does_not_know(
    team: ProjectFixture, template: PackageTemplate, tmp_path: Path
) -> None:
    """Attacks 99 and 104: experts.toml of a stranger redirects a namespace, or adds a registry."""
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("acme").publish("acme/top@1.9.0")
        for text in (
            f'[experts]\n"acme/top" = "*"\n[registries]\nacme = "{other.host}"\n',
            f'[experts]\n"{other.host}/acme/top" = "*"\n',
        ):
            with pytest.raises(TrustError, match=r"index key of .* is not known"):
                team.write_project(text).install()
    assert team.client.refs() == []


def test_a_project_cannot_move_a_namespace_that_belongs_elsewhere(
    team: ProjectFixture, template: PackageTemplate, tmp_path: Path
) -> None:
    team.install()
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("acme").publish("acme/top@1.9.0")
        team.client.user_home.trust.add_registry(other.known)
        text = f'[experts]\n"acme/top" = "*"\n[registries]\nacme = "{other.host}"\n'
        with pytest.raises(TrustError, match="would take the namespace acme"):
            team.write_project(text).install()


def test_a_project_may_name_a_registry_that_the_user_knows_and_it_is_said(
    team: ProjectFixture, template: PackageTemplate, tmp_path: Path
) -> None:
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("beta").publish("beta/low@1.0.0")
        other.publish("beta/top@1.0.0", requires=["beta/low"])
        team.client.user_home.trust.add_registry(other.known)
        text = f'[experts]\n"beta/top" = "*"\n[registries]\nbeta = "{other.host}"\n'
        done, _ = team.write_project(text).install()
        assert f"beta/* comes from {other.host}, says experts.toml" in done.notes
        assert {i.expert.registry for i in done.installed} == {other.host}
        team.install_locked()


def test_the_users_own_list_is_what_counts_outside_a_project(
    buyer: InstallClient, publisher: PublishingRegistry, tmp_path: Path
) -> None:
    publisher.publish("acme/sql@1.0.0")
    own = ProjectFixture(tmp_path / "anywhere", buyer)
    with pytest.raises(UsageError, match="nothing to install"):
        own.install()
    with pytest.raises(NotFoundError, match=r"no experts\.toml"):
        require_project(buyer.user_home.home, own.folder)
    reference = Reference.parse("acme/sql@^1")
    own.requirements.file.update({reference.package: reference})
    assert own.install()[1] == ["+ acme/sql@1.0.0"]
    assert not own.lock_path.exists()
    publisher.publish("acme/sql@1.1.0")
    assert own.install(everything=True)[1] == ["+ acme/sql@1.1.0"]


def test_what_is_outdated_is_told_with_what_is_wanted(
    team: ProjectFixture, publisher: PublishingRegistry
) -> None:
    team.install()
    assert not any(standing.is_behind for standing in team.outdated())
    publisher.publish("acme/low@1.1.0")
    publisher.publish("acme/top@2.0.0-rc.1")
    publisher.publish("acme/top@2.0.0")
    publisher.yank("acme/top@1.0.0", "old")
    found = {
        str(s.package): (str(s.current), str(s.wanted), str(s.newest), s.yanked)
        for s in team.outdated()
    }
    assert found == {
        "acme/low": ("1.0.0", "1.1.0", "1.1.0", None),
        "acme/top": ("1.0.0", "1.0.0", "2.0.0", "old"),
    }


def test_outside_a_project_what_is_installed_is_compared(
    buyer: InstallClient, publisher: PublishingRegistry, tmp_path: Path
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    publisher.publish("acme/sql@1.1.0")
    (standing,) = ProjectFixture(tmp_path / "anywhere", buyer).outdated()
    assert (str(standing.current), str(standing.newest)) == ("1.0.0", "1.1.0")


def test_what_was_locked_from_a_file_must_be_given_as_one(
    team: ProjectFixture, newcomer: InstallClient, package_factory: PackageFactory
) -> None:
    team.client.user_home.trust_keys("acme").install(package_factory.package("local/own"))
    team.write_project('[experts]\n"local/own" = "*"\n').lock()
    assert 'registry = "local"' in team.lock_path.read_text()
    team.install_locked()
    refuses(team.with_client(newcomer), NotFoundError, "was installed from a file")


def test_a_locked_version_that_the_registry_never_had_is_told(
    team: ProjectFixture, publisher: PublishingRegistry
) -> None:
    team.lock()
    edit(team, 'version = "1.0.0"', 'version = "1.0.7"')
    refuses(team, NotFoundError, r"has no acme/low@1\.0\.7, which is locked")


def test_a_lock_file_needs_no_registry_to_be_set(
    team: ProjectFixture, newcomer: InstallClient
) -> None:
    team.lock()
    buyer = replace(newcomer, settings=replace(newcomer.settings, registry=None))
    team.with_client(buyer).install_locked()
    assert buyer.refs() == ["acme/low@1.0.0", "acme/top@1.0.0"]
