"""Own keys: trusted from the start, refused for signing once revoked."""

from pathlib import Path

import pytest

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    UsageError,
)
from expertctl.reference import Digest, PackageName
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.trust_store import PublisherIdentity, TrustStore
from tests.trust.forged_bundles import make_rfc_key

CONTENT = Digest.compute(b"content")


@pytest.fixture
def publisher(tmp_path: Path) -> PublisherIdentity:
    return PublisherIdentity(KeyRing(tmp_path / "keys"), TrustStore(tmp_path / "trust.json"))


@pytest.mark.parametrize("namespace", ["local", "acme"])
def test_a_new_key_is_trusted_for_local_and_the_namespaces_given(
    publisher: PublisherIdentity, namespace: str
) -> None:
    trusted = publisher.create_key("me", namespaces=["acme/*"])
    assert trusted.namespaces == ("acme", "local")
    assert trusted.key == publisher.ring.read_public("me")
    package = PackageName(namespace, "sql")
    found = publisher.trust.authorise(trusted.key_id, package=package, content_digest=CONTENT)
    assert found == trusted.key
    signature = publisher.read_signing_key("me").sign(b"data")
    found.verify(signature, b"data")


def test_an_imported_key_is_trusted_in_the_same_way(publisher: PublisherIdentity) -> None:
    trusted = publisher.import_key("work", make_rfc_key().pem(), namespaces=["acme"])
    assert trusted.key == make_rfc_key().public
    assert trusted.namespaces == ("acme", "local")


@pytest.mark.parametrize("namespaces", [["*"], ["acme/sql"], ["Acme"]])
def test_a_bad_namespace_leaves_no_key_behind(
    publisher: PublisherIdentity, namespaces: list[str]
) -> None:
    with pytest.raises(UsageError, match="is not a namespace"):
        publisher.create_key("me", namespaces=namespaces)
    assert publisher.list_keys() == []
    assert publisher.trust.list_keys() == []


def test_a_damaged_record_of_trust_leaves_no_key_behind(publisher: PublisherIdentity) -> None:
    publisher.trust.path.write_bytes(b"{}")
    publisher.trust.path.chmod(0o600)
    with pytest.raises(InvalidPackageError):
        publisher.create_key("me")
    assert publisher.ring.list_names() == []


def test_a_taken_name_adds_no_trust(publisher: PublisherIdentity) -> None:
    publisher.create_key("me")
    with pytest.raises(UsageError, match="exists already"):
        publisher.create_key("me", namespaces=["acme"])
    (own,) = publisher.list_keys()
    assert own.namespaces == ("local",)


def test_a_revoked_key_signs_nothing_more(publisher: PublisherIdentity) -> None:
    publisher.create_key("me")
    publisher.revoke_key("me", "stolen")
    with pytest.raises(RevokedError, match="'me' was revoked") as refused:
        publisher.read_signing_key("me")
    assert "keys new" in refused.value.hint
    (own,) = publisher.list_keys()
    assert own.revoked


def test_a_revoked_key_cannot_come_back_by_import(publisher: PublisherIdentity) -> None:
    publisher.trust.revoke(make_rfc_key().public.key_id, "leaked")
    with pytest.raises(RevokedError, match="leaked"):
        publisher.import_key("again", make_rfc_key().pem())
    assert publisher.ring.list_names() == []


def test_own_keys_tell_what_they_are_trusted_for(publisher: PublisherIdentity) -> None:
    publisher.create_key("two", algorithm="ed25519")
    trusted = publisher.create_key("one", namespaces=["acme"])
    publisher.trust.remove(publisher.ring.read_public("two").key_id)
    one, two = publisher.list_keys()
    assert (one.name, one.key, one.namespaces, one.revoked) == (
        "one",
        trusted.key,
        ("acme", "local"),
        False,
    )
    assert (two.name, two.key.algorithm, two.namespaces) == ("two", "ed25519", ())


def test_a_key_is_revoked_by_its_own_name_a_trusted_name_or_its_id(
    publisher: PublisherIdentity,
) -> None:
    own = publisher.create_key("me").key_id
    other = PrivateKey.generate("ed25519").public
    publisher.trust.add(other, name="acme", namespaces=["acme"])
    unknown = f"sha256:{'ab' * 32}"
    assert publisher.revoke_key("acme").key_id == other.key_id
    assert publisher.revoke_key(unknown).key_id == unknown
    publisher.trust.remove(own)
    assert publisher.revoke_key("me").key_id == own
    assert len(publisher.trust.read().revoked) == 3


def test_a_name_that_means_nothing_or_two_keys_revokes_nothing(
    publisher: PublisherIdentity,
) -> None:
    own = publisher.create_key("me").key_id
    other = PrivateKey.generate("ed25519").public
    publisher.trust.add(other, name="me", namespaces=["acme"])
    with pytest.raises(UsageError, match="2 keys are called 'me'") as refused:
        publisher.revoke_key("me")
    assert own in refused.value.hint
    with pytest.raises(NotFoundError, match="'nobody'"):
        publisher.revoke_key("nobody")
    assert publisher.trust.read().revoked == ()
