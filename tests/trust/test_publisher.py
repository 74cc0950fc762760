"""Own keys: trusted from the start, refused for signing once revoked."""

from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    UsageError,
)
from expertctl.reference import PackageName
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.policy import TrustStore
from expertctl.trust.publisher import Publisher
from tests.trust.forge import rfc_key

CONTENT = Digest.of(b"content")


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(KeyRing(tmp_path / "keys"), TrustStore(tmp_path / "trust.json"))


@pytest.mark.parametrize("namespace", ["local", "acme"])
def test_a_new_key_is_trusted_for_local_and_the_namespaces_given(
    publisher: Publisher, namespace: str
) -> None:
    trusted = publisher.create("me", namespaces=["acme/*"])
    assert trusted.namespaces == ("acme", "local")
    assert trusted.key == publisher.ring.public("me")
    package = PackageName(namespace, "sql")
    found = publisher.trust.authorise(trusted.key_id, package=package, content_digest=CONTENT)
    assert found == trusted.key
    signature = publisher.signing_key("me").sign(b"data")
    found.verify(signature, b"data")


def test_an_imported_key_is_trusted_in_the_same_way(publisher: Publisher) -> None:
    trusted = publisher.import_("work", rfc_key().pem(), namespaces=["acme"])
    assert trusted.key == rfc_key().public
    assert trusted.namespaces == ("acme", "local")


@pytest.mark.parametrize("namespaces", [["*"], ["acme/sql"], ["Acme"]])
def test_a_bad_namespace_leaves_no_key_behind(publisher: Publisher, namespaces: list[str]) -> None:
    with pytest.raises(UsageError, match="is not a namespace"):
        publisher.create("me", namespaces=namespaces)
    assert publisher.keys() == []
    assert publisher.trust.entries() == []


def test_a_damaged_record_of_trust_leaves_no_key_behind(publisher: Publisher) -> None:
    publisher.trust.path.write_bytes(b"{}")
    publisher.trust.path.chmod(0o600)
    with pytest.raises(InvalidPackageError):
        publisher.create("me")
    assert publisher.ring.names() == []


def test_a_taken_name_adds_no_trust(publisher: Publisher) -> None:
    publisher.create("me")
    with pytest.raises(UsageError, match="exists already"):
        publisher.create("me", namespaces=["acme"])
    (own,) = publisher.keys()
    assert own.namespaces == ("local",)


def test_a_revoked_key_signs_nothing_more(publisher: Publisher) -> None:
    publisher.create("me")
    publisher.revoke("me", "stolen")
    with pytest.raises(RevokedError, match="'me' was revoked") as refused:
        publisher.signing_key("me")
    assert "keys new" in refused.value.hint
    (own,) = publisher.keys()
    assert own.revoked


def test_a_revoked_key_cannot_come_back_by_import(publisher: Publisher) -> None:
    publisher.trust.revoke(rfc_key().public.key_id, "leaked")
    with pytest.raises(RevokedError, match="leaked"):
        publisher.import_("again", rfc_key().pem())
    assert publisher.ring.names() == []


def test_own_keys_tell_what_they_are_trusted_for(publisher: Publisher) -> None:
    publisher.create("two", algorithm="ed25519")
    trusted = publisher.create("one", namespaces=["acme"])
    publisher.trust.remove(publisher.ring.public("two").key_id)
    one, two = publisher.keys()
    assert (one.name, one.key, one.namespaces, one.revoked) == (
        "one",
        trusted.key,
        ("acme", "local"),
        False,
    )
    assert (two.name, two.key.algorithm, two.namespaces) == ("two", "ed25519", ())


def test_a_key_is_revoked_by_its_own_name_a_trusted_name_or_its_id(publisher: Publisher) -> None:
    own = publisher.create("me").key_id
    other = PrivateKey.generate("ed25519").public
    publisher.trust.add(other, name="acme", namespaces=["acme"])
    unknown = f"sha256:{'ab' * 32}"
    assert publisher.revoke("acme").key_id == other.key_id
    assert publisher.revoke(unknown).key_id == unknown
    publisher.trust.remove(own)
    assert publisher.revoke("me").key_id == own
    assert len(publisher.trust.revocations()) == 3


def test_a_name_that_means_nothing_or_two_keys_revokes_nothing(publisher: Publisher) -> None:
    own = publisher.create("me").key_id
    other = PrivateKey.generate("ed25519").public
    publisher.trust.add(other, name="me", namespaces=["acme"])
    with pytest.raises(UsageError, match="2 keys are called 'me'") as refused:
        publisher.revoke("me")
    assert own in refused.value.hint
    with pytest.raises(NotFoundError, match="'nobody'"):
        publisher.revoke("nobody")
    assert publisher.trust.revocations() == []
