"""One publisher key vouches for the next: of this namespace, this key, and signed by that one."""

import pytest

from expertctl.errors import SignatureError, TrustError
from expertctl.schema.strict_json import encode_canonical
from expertctl.trust.dsse import (
    KEY_STATEMENT_TYPE,
    MAX_KEY_STATEMENT_BYTES,
    DsseEnvelope,
    read_claimed_signer,
    sign_key_statement,
    verify_key_statement,
)
from expertctl.trust.keys import PublicKey
from tests.registry.indexes import compute_named_key_id, make_named_key

OLD, NEW, OTHER = make_named_key("old"), make_named_key("new"), make_named_key("other")


def signer(data: bytes, *, new: PublicKey = NEW.public, namespace: str = "acme") -> str:
    keys = [OTHER.public, OLD.public]
    return verify_key_statement(data, namespace=namespace, new=new, keys=keys)


def statement(**about: str) -> bytes:
    pem = NEW.public.pem().decode()
    said = {"namespace": "acme", "key_id": NEW.public.key_id, "public_key": pem, **about}
    return DsseEnvelope.sign(
        encode_canonical(said), payload_type=KEY_STATEMENT_TYPE, key=OLD
    ).encode()


def test_the_signer_of_a_statement_is_told() -> None:
    data = sign_key_statement(namespace="acme", new=NEW.public, by=OLD)
    assert data == statement()
    assert signer(data) == compute_named_key_id("old")
    assert read_claimed_signer(data) == compute_named_key_id("old")


def test_a_statement_about_another_namespace_does_not_count() -> None:
    data = sign_key_statement(namespace="zoo", new=NEW.public, by=OLD)
    with pytest.raises(TrustError, match="another key or namespace"):
        signer(data)


def test_a_statement_about_another_key_does_not_count() -> None:
    data = sign_key_statement(namespace="acme", new=OTHER.public, by=OLD)
    with pytest.raises(TrustError, match="another key or namespace"):
        signer(data)


def test_a_key_cannot_vouch_for_itself() -> None:
    data = sign_key_statement(namespace="acme", new=NEW.public, by=NEW)
    with pytest.raises(TrustError, match="proves nothing"):
        verify_key_statement(data, namespace="acme", new=NEW.public, keys=[NEW.public])


def test_a_key_that_may_not_vouch_does_not_count() -> None:
    data = sign_key_statement(namespace="acme", new=NEW.public, by=make_named_key("mallory"))
    with pytest.raises(TrustError, match="may not vouch"):
        signer(data)


def test_a_forged_signature_does_not_count() -> None:
    real = sign_key_statement(namespace="acme", new=NEW.public, by=make_named_key("mallory"))
    forged = real.replace(
        compute_named_key_id("mallory").encode(), compute_named_key_id("old").encode()
    )
    assert read_claimed_signer(forged) == compute_named_key_id("old")
    with pytest.raises(SignatureError, match="not one by key"):
        signer(forged)


@pytest.mark.parametrize(
    "about",
    [{"key_id": compute_named_key_id("other")}, {"public_key": "none"}, {"namespace": "acme/*"}],
    ids=["key id", "public key", "namespace"],
)
def test_a_statement_that_contradicts_itself_does_not_count(about: dict[str, str]) -> None:
    with pytest.raises(TrustError, match="another key or namespace"):
        signer(statement(**about))


def test_a_statement_with_more_in_it_is_malformed() -> None:
    with pytest.raises(SignatureError, match="malformed"):
        signer(statement(until="2099"))


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"key_id":1}'])
def test_a_payload_that_is_no_statement_is_malformed(payload: bytes) -> None:
    data = DsseEnvelope.sign(payload, payload_type=KEY_STATEMENT_TYPE, key=OLD).encode()
    with pytest.raises(SignatureError, match="malformed"):
        signer(data)


def test_the_signature_of_another_kind_of_document_is_no_statement() -> None:
    payload = encode_canonical({"namespace": "acme"})
    data = DsseEnvelope.sign(payload, payload_type="application/x", key=OLD).encode()
    assert read_claimed_signer(data) == ""
    with pytest.raises(SignatureError, match="signed as"):
        signer(data)


def test_a_statement_is_small() -> None:
    assert (
        len(sign_key_statement(namespace="a" * 64, new=NEW.public, by=OLD))
        < MAX_KEY_STATEMENT_BYTES / 4
    )
    with pytest.raises(SignatureError, match=f"more than {MAX_KEY_STATEMENT_BYTES} bytes"):
        signer(b" " * (MAX_KEY_STATEMENT_BYTES + 1))
    assert read_claimed_signer(b" " * (MAX_KEY_STATEMENT_BYTES + 1)) == ""
