"""Yanking: by owners alone, with a reason that can be shown, and never a removal."""

import pytest

from expertctl.errors import (
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.reference import PackageName
from expertctl.trust.keys import PrivateKey
from registry_server.access import rights
from registry_server.access.rights import ANONYMOUS, Action, Identity, TokenScope
from registry_server.publishing.releases import unyank_release, yank_release
from registry_server.registry import Registry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    pull_package,
    read_published_index,
    upload_and_publish,
)

SQL = PackageName("acme", "sql")


@pytest.fixture(autouse=True)
def two_versions(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    for version in ("1.0.0", "1.1.0"):
        upload_and_publish(
            registry, owner, template.make_package(version=version, key=alice, description=version)
        )


def test_a_yanked_version_stays_in_the_index_and_can_be_pulled(
    registry: Registry, owner: Identity
) -> None:
    yank_release(registry, owner, name=SQL, version="1.1.0", reason="  answers in French  ")
    index = read_published_index(registry, owner)
    assert [(str(r.version), r.yanked) for r in index.releases] == [
        ("1.0.0", None),
        ("1.1.0", "answers in French"),
    ]
    assert index.revision == 3
    pull_package(registry, SQL, index.releases[1].forms[-1].package_digest)


def test_a_yanked_version_no_longer_speaks_for_the_package(
    registry: Registry, owner: Identity
) -> None:
    assert read_published_index(registry, owner).description == "1.1.0"
    yank_release(registry, owner, name=SQL, version="1.1.0", reason="bad")
    assert read_published_index(registry, owner).description == "1.0.0"
    unyank_release(registry, owner, name=SQL, version="1.1.0")
    assert read_published_index(registry, owner).description == "1.1.0"


def test_the_same_yank_again_changes_nothing(registry: Registry, owner: Identity) -> None:
    for _ in range(2):
        yank_release(registry, owner, name=SQL, version="1.1.0", reason="bad")
    unyank_release(registry, owner, name=SQL, version="1.0.0")
    assert read_published_index(registry, owner).revision == 3


def test_another_reason_replaces_the_one_before(registry: Registry, owner: Identity) -> None:
    yank_release(registry, owner, name=SQL, version="1.1.0", reason="bad")
    yank_release(registry, owner, name=SQL, version="1.1.0", reason="worse")
    index = read_published_index(registry, owner)
    assert (index.revision, index.releases[1].yanked) == (4, "worse")


def test_a_yank_can_be_taken_back(registry: Registry, owner: Identity) -> None:
    yank_release(registry, owner, name=SQL, version="1.1.0", reason="bad")
    unyank_release(registry, owner, name=SQL, version="1.1.0")
    index = read_published_index(registry, owner)
    assert (index.revision, index.releases[1].yanked) == (4, None)


@pytest.mark.parametrize(
    "reason",
    ["", "   ", "x" * 501, "two\nlines", "bell\a", "\x1b[31mred", "over\u202eride", "a\u2028b"],
)
def test_a_reason_that_cannot_be_shown_is_refused(
    registry: Registry, owner: Identity, reason: str
) -> None:
    with pytest.raises(UsageError, match="reason"):
        yank_release(registry, owner, name=SQL, version="1.0.0", reason=reason)
    assert read_published_index(registry, owner).revision == 2


def test_markup_in_a_reason_is_kept_as_the_text_that_it_is(
    registry: Registry, owner: Identity
) -> None:
    """Who shows it escapes it; the index says what the owner wrote (attack 79)."""
    yank_release(registry, owner, name=SQL, version="1.0.0", reason="<script>alert(1)</script>")
    assert read_published_index(registry, owner).releases[0].yanked == "<script>alert(1)</script>"


@pytest.mark.parametrize("version", ["9.9.9", "1.0", "v1.0.0", "", "x" * 5000])
def test_a_version_that_is_not_there_cannot_be_yanked(
    registry: Registry, owner: Identity, version: str
) -> None:
    with pytest.raises(NotFoundError, match="acme/sql@"):
        yank_release(registry, owner, name=SQL, version=version, reason="bad")
    with pytest.raises(NotFoundError):
        yank_release(
            registry, owner, name=PackageName("acme", "none"), version="1.0.0", reason="bad"
        )


def test_only_owners_yank(served: RegistryHarness, registry: Registry, owner: Identity) -> None:
    served.create_user("eve")
    stranger = served.authenticate(served.create_token("eve"))
    pushing = served.authenticate(served.create_token("olga", TokenScope(Action.PUSH)))
    with pytest.raises(UnauthenticatedError):
        yank_release(registry, ANONYMOUS, name=SQL, version="1.0.0", reason="bad")
    for identity in (stranger, pushing):
        with pytest.raises(ForbiddenError):
            yank_release(registry, identity, name=SQL, version="1.0.0", reason="bad")
        with pytest.raises(ForbiddenError):
            unyank_release(registry, identity, name=SQL, version="1.0.0")
    assert read_published_index(registry, owner).revision == 2


def test_a_publisher_may_not_yank(
    served: RegistryHarness, registry: Registry, template: PackageTemplate, alice: PrivateKey
) -> None:
    identity = served.authenticate(served.create_user("pat"))
    served.create_namespace("team", kind="expert", owner="olga", publisher="pat")
    with pytest.raises(ForbiddenError, match="pat may not yank"):
        yank_release(
            registry, identity, name=PackageName("team", "x"), version="1.0.0", reason="bad"
        )


def test_yanks_are_in_the_audit_log(registry: Registry, owner: Identity) -> None:
    yank_release(registry, owner, name=SQL, version="1.0.0", reason="bad")
    unyank_release(registry, owner, name=SQL, version="1.0.0")
    with registry.database.read() as connection:
        newest = [
            (e.actor, e.action, e.target, e.detail)
            for e in rights.list_audit_rows(connection, limit=2)
        ]
    assert newest == [
        ("olga", "unyank", "acme/sql@1.0.0", ""),
        ("olga", "yank", "acme/sql@1.0.0", "bad"),
    ]
