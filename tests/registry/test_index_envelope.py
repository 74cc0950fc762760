"""Who signed an index document, and about which package: the attacks on one signed by one key."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError, SignatureError, TrustError
from expertctl.reference import PackageName
from expertctl.registry import index_document
from expertctl.registry.index_document import INDEX_PAYLOAD_TYPE, open_index, sign_index
from expertctl.trust.dsse import DsseEnvelope
from tests.registry.indexes import SQL, make_index_document, make_named_key

KEY = make_named_key("index")


def opened(envelope: bytes, package: PackageName = SQL) -> object:
    return open_index(envelope, key=KEY.public, package=package)


def changed(envelope: bytes, **fields: Any) -> bytes:
    document = {**json.loads(envelope), **fields}
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def test_what_was_signed_is_opened() -> None:
    document = make_index_document(7)
    assert opened(sign_index(document, KEY)) == document


def test_the_same_document_under_the_same_key_is_the_same_file() -> None:
    assert sign_index(make_index_document(), KEY) == sign_index(make_index_document(), KEY)


def test_an_index_of_a_foreign_key_is_refused_with_both_ids() -> None:
    other = make_named_key("mallory")
    with pytest.raises(TrustError, match="the registry's index key is") as refused:
        opened(sign_index(make_index_document(), other))
    assert other.public.key_id in refused.value.message
    assert KEY.public.key_id in refused.value.message
    assert "fingerprint" in refused.value.hint


def test_a_foreign_signature_under_the_name_of_the_pinned_key_is_refused() -> None:
    envelope = json.loads(sign_index(make_index_document(), make_named_key("mallory")))
    envelope["signatures"][0]["keyid"] = KEY.public.key_id
    data = json.dumps(envelope, separators=(",", ":"), sort_keys=True).encode()
    with pytest.raises(SignatureError, match="not one by key"):
        opened(data)


def test_the_index_of_another_package_is_refused_however_well_signed() -> None:
    other = PackageName("acme", "sql-old")
    envelope = sign_index(make_index_document(package=other), KEY)
    with pytest.raises(TrustError, match="asked for the index of acme/sql, but got that of acme"):
        opened(envelope)


def test_a_payload_that_was_changed_is_refused() -> None:
    payload = base64.b64encode(make_index_document(8).encode()).decode()
    with pytest.raises(SignatureError, match="not one by key"):
        opened(changed(sign_index(make_index_document(7), KEY), payload=payload))


def test_an_endless_envelope_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_document, "MAX_ENVELOPE", 100)
    with pytest.raises(SignatureError, match="more than 100 bytes"):
        opened(sign_index(make_index_document(), KEY))


def test_the_largest_document_fits_into_the_largest_envelope() -> None:
    payload = b"x" * index_document.MAX_BYTES
    envelope = DsseEnvelope.sign(
        payload, payload_type=INDEX_PAYLOAD_TYPE, key=make_named_key("index")
    ).encode()
    assert len(envelope) <= index_document.MAX_ENVELOPE


def test_another_kind_of_document_is_refused_though_the_key_signed_it() -> None:
    payload = make_index_document().encode()
    other = DsseEnvelope.sign(payload, payload_type="application/vnd.else+json", key=KEY).encode()
    with pytest.raises(SignatureError, match=r"signed as 'application/vnd\.else"):
        opened(other)
    with pytest.raises(SignatureError, match="not one by key"):
        opened(changed(other, payloadType=INDEX_PAYLOAD_TYPE))


@pytest.mark.parametrize("payload", [b"{}", b"not json", b""], ids=["empty", "no json", "nothing"])
def test_a_payload_that_is_no_index_is_refused_though_the_key_signed_it(payload: bytes) -> None:
    envelope = DsseEnvelope.sign(payload, payload_type=INDEX_PAYLOAD_TYPE, key=KEY).encode()
    with pytest.raises(InvalidPackageError, match="the index of acme/sql"):
        opened(envelope)


@pytest.mark.parametrize(
    "spell",
    [
        lambda document: json.dumps(document, sort_keys=True),
        lambda document: json.dumps(document, separators=(",", ":")),
        lambda document: json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n",
        lambda document: json.dumps(document, sort_keys=True, separators=(",", ":")).replace(
            "SQL", "\\u0053QL"
        ),
    ],
    ids=["spaces", "unsorted", "line end", "escaped"],
)
def test_a_document_that_is_signed_and_not_canonical_is_refused(
    spell: Callable[[Any], str],
) -> None:
    """Two spellings of one document would be two documents with one revision."""
    document = json.loads(make_index_document().encode())
    document = dict(reversed(sorted(document.items())))
    data = DsseEnvelope.sign(
        spell(document).encode(), payload_type=INDEX_PAYLOAD_TYPE, key=KEY
    ).encode()
    with pytest.raises(InvalidPackageError, match="not canonical JSON"):
        opened(data)


def test_a_canonical_document_of_any_text_is_opened() -> None:
    text = '\u00e9 \u2028 \U0001f600 \x7f \\ / " <'
    document = replace(make_index_document(), description=text)
    assert opened(sign_index(document, KEY)) == document
