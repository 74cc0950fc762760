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
from registry_server.access import audit
from registry_server.access.identity import ANONYMOUS, Action, Identity, Scope
from registry_server.publishing.yank import unyank, yank
from registry_server.registry import Registry
from tests.registry_server.publishing.parcels import Template, pulled, push, read
from tests.registry_server.served import Served

SQL = PackageName("acme", "sql")


@pytest.fixture(autouse=True)
def two_versions(
    registry: Registry, owner: Identity, template: Template, alice: PrivateKey
) -> None:
    for version in ("1.0.0", "1.1.0"):
        push(registry, owner, template.parcel(version=version, key=alice, description=version))


def test_a_yanked_version_stays_in_the_index_and_can_be_pulled(
    registry: Registry, owner: Identity
) -> None:
    yank(registry, owner, name=SQL, version="1.1.0", reason="  answers in French  ")
    index = read(registry, owner)
    assert [(str(r.version), r.yanked) for r in index.releases] == [
        ("1.0.0", None),
        ("1.1.0", "answers in French"),
    ]
    assert index.revision == 3
    pulled(registry, SQL, index.releases[1].forms[-1].package_digest)


def test_a_yanked_version_no_longer_speaks_for_the_package(
    registry: Registry, owner: Identity
) -> None:
    assert read(registry, owner).description == "1.1.0"
    yank(registry, owner, name=SQL, version="1.1.0", reason="bad")
    assert read(registry, owner).description == "1.0.0"
    unyank(registry, owner, name=SQL, version="1.1.0")
    assert read(registry, owner).description == "1.1.0"


def test_the_same_yank_again_changes_nothing(registry: Registry, owner: Identity) -> None:
    for _ in range(2):
        yank(registry, owner, name=SQL, version="1.1.0", reason="bad")
    unyank(registry, owner, name=SQL, version="1.0.0")
    assert read(registry, owner).revision == 3


def test_another_reason_replaces_the_one_before(registry: Registry, owner: Identity) -> None:
    yank(registry, owner, name=SQL, version="1.1.0", reason="bad")
    yank(registry, owner, name=SQL, version="1.1.0", reason="worse")
    index = read(registry, owner)
    assert (index.revision, index.releases[1].yanked) == (4, "worse")


def test_a_yank_can_be_taken_back(registry: Registry, owner: Identity) -> None:
    yank(registry, owner, name=SQL, version="1.1.0", reason="bad")
    unyank(registry, owner, name=SQL, version="1.1.0")
    index = read(registry, owner)
    assert (index.revision, index.releases[1].yanked) == (4, None)


@pytest.mark.parametrize(
    "reason",
    ["", "   ", "x" * 501, "two\nlines", "bell\a", "\x1b[31mred", "over\u202eride", "a\u2028b"],
)
def test_a_reason_that_cannot_be_shown_is_refused(
    registry: Registry, owner: Identity, reason: str
) -> None:
    with pytest.raises(UsageError, match="reason"):
        yank(registry, owner, name=SQL, version="1.0.0", reason=reason)
    assert read(registry, owner).revision == 2


def test_markup_in_a_reason_is_kept_as_the_text_that_it_is(
    registry: Registry, owner: Identity
) -> None:
    """Who shows it escapes it; the index says what the owner wrote (attack 79)."""
    yank(registry, owner, name=SQL, version="1.0.0", reason="<script>alert(1)</script>")
    assert read(registry, owner).releases[0].yanked == "<script>alert(1)</script>"


@pytest.mark.parametrize("version", ["9.9.9", "1.0", "v1.0.0", "", "x" * 5000])
def test_a_version_that_is_not_there_cannot_be_yanked(
    registry: Registry, owner: Identity, version: str
) -> None:
    with pytest.raises(NotFoundError, match="acme/sql@"):
        yank(registry, owner, name=SQL, version=version, reason="bad")
    with pytest.raises(NotFoundError):
        yank(registry, owner, name=PackageName("acme", "none"), version="1.0.0", reason="bad")


def test_only_owners_yank(served: Served, registry: Registry, owner: Identity) -> None:
    served.user("eve")
    stranger = served.identity(served.token("eve"))
    pushing = served.identity(served.token("olga", Scope(Action.PUSH)))
    with pytest.raises(UnauthenticatedError):
        yank(registry, ANONYMOUS, name=SQL, version="1.0.0", reason="bad")
    for identity in (stranger, pushing):
        with pytest.raises(ForbiddenError):
            yank(registry, identity, name=SQL, version="1.0.0", reason="bad")
        with pytest.raises(ForbiddenError):
            unyank(registry, identity, name=SQL, version="1.0.0")
    assert read(registry, owner).revision == 2


def test_a_publisher_may_not_yank(
    served: Served, registry: Registry, template: Template, alice: PrivateKey
) -> None:
    identity = served.identity(served.user("pat"))
    served.namespace("team", kind="expert", owner="olga", publisher="pat")
    with pytest.raises(ForbiddenError, match="pat may not yank"):
        yank(registry, identity, name=PackageName("team", "x"), version="1.0.0", reason="bad")


def test_yanks_are_in_the_audit_log(registry: Registry, owner: Identity) -> None:
    yank(registry, owner, name=SQL, version="1.0.0", reason="bad")
    unyank(registry, owner, name=SQL, version="1.0.0")
    with registry.database.read() as connection:
        newest = [
            (e.actor, e.action, e.target, e.detail) for e in audit.entries(connection, limit=2)
        ]
    assert newest == [
        ("olga", "unyank", "acme/sql@1.0.0", ""),
        ("olga", "yank", "acme/sql@1.0.0", "bad"),
    ]
