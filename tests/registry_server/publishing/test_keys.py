"""Publisher keys of a namespace, and what the index documents say of them."""

import pytest

from expertctl.errors import (
    BudgetError,
    ForbiddenError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    SignatureError,
    TrustError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.trust.dsse import sign_key_statement, verify_key_statement
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import ANONYMOUS, Action, Identity, TokenScope
from registry_server.publishing.index import find_key, load_publisher_keys
from registry_server.publishing.releases import KeyRegistration, add_key, revoke_key
from registry_server.registry import Registry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    read_published_index,
    upload_and_publish,
)


def add(
    registry: Registry, identity: Identity, key: PrivateKey, statement: bytes | None = None
) -> KeyRegistration:
    return add_key(
        registry, identity, namespace="acme", public_key=key.public.pem(), statement=statement
    )


def revoke(registry: Registry, identity: Identity, key: PrivateKey, reason: str = "lost") -> None:
    revoke_key(registry, identity, namespace="acme", key_id=key.public.key_id, reason=reason)


@pytest.fixture(autouse=True)
def two_packages(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    for name in ("acme/sql", "acme/chat"):
        upload_and_publish(registry, owner, template.make_package(name, key=alice))


def test_the_first_key_needs_nobody(
    served: RegistryHarness, registry: Registry, owner: Identity, alice: PrivateKey
) -> None:
    served.create_namespace("corp", kind="expert", owner="olga")
    added = add_key(
        registry, owner, namespace="corp", public_key=alice.public.pem(), statement=None
    )
    assert added == KeyRegistration(alice.public.key_id, None, ())


def test_a_later_key_with_a_statement_is_vouched_for_in_every_index(
    registry: Registry, owner: Identity, alice: PrivateKey, bob: PrivateKey
) -> None:
    statement = sign_key_statement(namespace="acme", new=bob.public, by=alice)
    added = add(registry, owner, bob, statement)
    assert added == KeyRegistration(bob.public.key_id, alice.public.key_id, ())
    for name in ("acme/sql", "acme/chat"):
        index = read_published_index(registry, owner, name)
        assert index.revision == 2
        first, second = index.keys
        assert (first.key, first.statement) == (alice.public, None)
        assert second.statement == statement
        signer = verify_key_statement(statement, namespace="acme", new=second.key, keys=[first.key])
        assert signer == alice.public.key_id


def test_a_later_key_without_a_statement_is_taken_with_a_warning(
    registry: Registry, owner: Identity, bob: PrivateKey
) -> None:
    added = add(registry, owner, bob)
    assert added.vouched_by is None
    [warning] = added.warnings
    assert "trust add" in warning
    assert bob.public.key_id in warning


def test_a_statement_can_come_later(
    registry: Registry, owner: Identity, alice: PrivateKey, bob: PrivateKey
) -> None:
    add(registry, owner, bob)
    statement = sign_key_statement(namespace="acme", new=bob.public, by=alice)
    assert add(registry, owner, bob, statement).vouched_by == alice.public.key_id
    index = read_published_index(registry, owner)
    assert (index.revision, index.keys[1].statement) == (3, statement)


def test_the_same_key_again_changes_nothing(
    registry: Registry, owner: Identity, alice: PrivateKey, bob: PrivateKey
) -> None:
    statement = sign_key_statement(namespace="acme", new=bob.public, by=alice)
    first = add(registry, owner, bob, statement)
    assert add(registry, owner, bob, statement) == first
    assert add(registry, owner, bob) == first
    assert read_published_index(registry, owner).revision == 2


def test_a_statement_about_something_else_is_refused(
    registry: Registry, owner: Identity, alice: PrivateKey, bob: PrivateKey
) -> None:
    stranger = PrivateKey.generate()
    for statement, error in (
        (sign_key_statement(namespace="corp", new=bob.public, by=alice), TrustError),
        (sign_key_statement(namespace="acme", new=stranger.public, by=alice), TrustError),
        (sign_key_statement(namespace="acme", new=bob.public, by=stranger), TrustError),
        (sign_key_statement(namespace="acme", new=bob.public, by=bob), TrustError),
        (b"{}", SignatureError),
        (b"\xff" * 100_000, SignatureError),
    ):
        with pytest.raises(error):
            add(registry, owner, bob, statement)
    assert read_published_index(registry, owner).revision == 1


def test_a_revoked_key_vouches_for_nothing(
    registry: Registry, owner: Identity, alice: PrivateKey, bob: PrivateKey
) -> None:
    revoke(registry, owner, alice)
    statement = sign_key_statement(namespace="acme", new=bob.public, by=alice)
    with pytest.raises(TrustError, match="may not vouch"):
        add(registry, owner, bob, statement)
    assert add(registry, owner, bob).warnings


def test_a_voucher_that_was_revoked_since_no_longer_counts(
    registry: Registry, owner: Identity, alice: PrivateKey, bob: PrivateKey
) -> None:
    add(registry, owner, bob, sign_key_statement(namespace="acme", new=bob.public, by=alice))
    revoke(registry, owner, alice)
    again = add(registry, owner, bob)
    assert (again.vouched_by, len(again.warnings)) == (None, 1)


def test_a_revocation_is_in_every_index_of_the_namespace_and_nowhere_else(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    served.create_namespace("corp", kind="expert", owner="olga")
    add_key(registry, owner, namespace="corp", public_key=alice.public.pem(), statement=None)
    upload_and_publish(registry, owner, template.make_package("corp/sql", key=alice))
    revoke(registry, owner, alice, "stolen laptop")
    for name in ("acme/sql", "acme/chat"):
        index = read_published_index(registry, owner, name)
        assert index.revision == 2
        assert index.keys == ()
        assert [(r.key_id, r.reason) for r in index.revoked] == [
            (alice.public.key_id, "stolen laptop")
        ]
        assert [f.signer for f in index.releases[0].forms] == [alice.public.key_id]
    other = read_published_index(registry, owner, "corp/sql")
    assert (other.revision, other.revoked) == (1, ())


def test_a_revocation_is_for_good(registry: Registry, owner: Identity, alice: PrivateKey) -> None:
    revoke(registry, owner, alice, "first reason")
    revoke(registry, owner, alice, "second reason")
    with pytest.raises(RevokedError, match="first reason") as caught:
        add(registry, owner, alice)
    assert "keys new" in caught.value.hint
    index = read_published_index(registry, owner)
    assert (index.revision, index.revoked[0].reason) == (2, "first reason")


def test_a_key_that_the_namespace_does_not_have_cannot_be_revoked(
    registry: Registry, owner: Identity, bob: PrivateKey
) -> None:
    with pytest.raises(NotFoundError, match="acme has no key"):
        revoke(registry, owner, bob)
    with pytest.raises(NotFoundError):
        revoke_key(registry, owner, namespace="nowhere", key_id="sha256:0", reason="x")


@pytest.mark.parametrize("reason", ["", "\n", "a\x00b", "y" * 501])
def test_a_revocation_needs_a_reason_that_can_be_shown(
    registry: Registry, owner: Identity, alice: PrivateKey, reason: str
) -> None:
    with pytest.raises(UsageError, match="reason"):
        revoke(registry, owner, alice, reason)


@pytest.mark.parametrize("data", [b"", b"ssh-ed25519 AAAA", b"\x00" * 100_000])
def test_what_is_no_public_key_is_refused(registry: Registry, owner: Identity, data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        add_key(registry, owner, namespace="acme", public_key=data, statement=None)


def test_a_private_key_is_refused_and_not_kept(
    registry: Registry, owner: Identity, bob: PrivateKey
) -> None:
    with pytest.raises(InvalidPackageError, match="private key"):
        add_key(registry, owner, namespace="acme", public_key=bob.pem(), statement=None)
    with registry.database.read() as connection:
        assert find_key(load_publisher_keys(connection, 1), bob.public.key_id) is None


def test_only_owners_change_keys(
    served: RegistryHarness, registry: Registry, alice: PrivateKey, bob: PrivateKey
) -> None:
    served.create_user("eve")
    stranger = served.authenticate(served.create_token("eve"))
    pushing = served.authenticate(served.create_token("olga", TokenScope(Action.PUSH)))
    with pytest.raises(UnauthenticatedError):
        add(registry, ANONYMOUS, bob)
    for identity in (stranger, pushing):
        with pytest.raises(ForbiddenError):
            add(registry, identity, bob)
        with pytest.raises(ForbiddenError):
            revoke(registry, identity, alice)


def test_a_namespace_has_a_bounded_number_of_keys(
    registry: Registry,
    owner: Identity,
    bob: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("registry_server.publishing.releases.MAX_NAMESPACE_KEYS", 1)
    with pytest.raises(BudgetError, match="1 keys, 1 are allowed"):
        add(registry, owner, bob)


def test_an_ed25519_key_signs_too(
    registry: Registry, owner: Identity, template: PackageTemplate
) -> None:
    key = PrivateKey.generate("ed25519")
    add(registry, owner, key)
    upload_and_publish(registry, owner, template.make_package(version="2.0.0", key=key))
    assert read_published_index(registry, owner).releases[-1].forms[-1].signer == key.public.key_id
