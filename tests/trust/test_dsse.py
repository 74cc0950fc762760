"""One payload under one key is one file, and nothing else verifies."""

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import SignatureError
from expertctl.schema.strict_json import encode_canonical
from expertctl.trust.dsse import DsseEnvelope, encode_pae, from_base64
from expertctl.trust.keys import P256_ORDER, PrivateKey
from tests.trust.forged_bundles import make_rfc_key

KIND = "application/x"
KEY = make_rfc_key()
SEALED = DsseEnvelope.sign(b"payload", payload_type=KIND, key=KEY)
DATA = SEALED.encode()


def parse(data: bytes, *, max_bytes: int = 10_000) -> DsseEnvelope:
    return DsseEnvelope.parse(data, payload_type=KIND, max_bytes=max_bytes, what="it")


def again(edit: Any) -> bytes:
    document = json.loads(DATA)
    edit(document)
    return encode_canonical(document)


def test_an_envelope_is_read_as_it_was_written_in_canonical_json() -> None:
    assert parse(DATA) == SEALED
    assert encode_canonical(json.loads(DATA)) == DATA
    parse(DATA).verify(KEY.public, what="it")


def test_what_is_signed_is_the_encoding_of_the_standard() -> None:
    assert encode_pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    KEY.public.verify(SEALED.signature, encode_pae(KIND, b"payload"))


def test_length_confusion_between_type_and_payload_does_not_verify() -> None:
    shifted = DsseEnvelope("application/", b"x payload", SEALED.key_id, SEALED.signature)
    with pytest.raises(SignatureError, match="not one by key"):
        shifted.verify(KEY.public, what="it")


SPELLINGS = {
    "white space": DATA.replace(b",", b", "),
    "a line end": DATA + b"\n",
    "a key twice": DATA.replace(b'{"payload"', b'{"payload":"","payload"'),
    "an unknown key": DATA.replace(b'{"payload"', b'{"note":1,"payload"'),
    "another order": json.dumps(dict(reversed(json.loads(DATA).items()))).encode(),
    "an escaped letter": DATA.replace(b"application", b"\\u0061pplication"),
    "an array": b"[]",
    "nothing": b"",
    "no utf-8": b'"\xff"',
    "deep": b"[" * 10_000,
    "a deep unknown key": b'{"a":' + b"[" * 9000,
}


@pytest.mark.parametrize("data", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_another_spelling_is_refused(data: bytes) -> None:
    with pytest.raises(SignatureError, match=r"^it: "):
        parse(data)


def test_no_signature_and_two_are_refused() -> None:
    with pytest.raises(SignatureError, match="0 signatures, exactly one"):
        parse(again(lambda d: d["signatures"].clear()))
    with pytest.raises(SignatureError, match="2 signatures, exactly one"):
        parse(again(lambda d: d["signatures"].append(d["signatures"][0])))


def test_another_type_is_refused() -> None:
    with pytest.raises(SignatureError, match="signed as 'text/plain', not as 'application/x'"):
        parse(again(lambda d: d.update(payloadType="text/plain")))


def test_too_many_bytes_are_refused() -> None:
    assert parse(DATA, max_bytes=len(DATA)) == SEALED
    with pytest.raises(SignatureError, match="too many"):
        parse(DATA, max_bytes=len(DATA) - 1)


@pytest.mark.parametrize("text", ["QQ", "QQ=", "QR==", "Q Q==", "QQ==\n", "_-8=", "é"])
def test_base64_has_one_spelling(text: str) -> None:
    with pytest.raises(SignatureError, match="standard base64"):
        from_base64(text, "it")
    with pytest.raises(SignatureError, match="standard base64"):
        parse(again(lambda d: d.update(payload=text)))


def test_the_other_spelling_of_an_ecdsa_signature_is_refused() -> None:
    assert KEY.public.algorithm == "ecdsa-p256"
    r, s = decode_dss_signature(SEALED.signature)
    other = DsseEnvelope(KIND, b"payload", SEALED.key_id, encode_dss_signature(r, P256_ORDER - s))
    with pytest.raises(SignatureError, match="higher s"):
        parse(other.encode()).verify(KEY.public, what="it")
    for signature in (b"", SEALED.signature + b"\0", encode_dss_signature(0, s)):
        odd = DsseEnvelope(KIND, b"payload", SEALED.key_id, signature)
        with pytest.raises(SignatureError):
            parse(odd.encode()).verify(KEY.public, what="it")


def test_another_key_is_refused_by_its_name_and_by_its_signature() -> None:
    other = PrivateKey.generate("ed25519")
    with pytest.raises(SignatureError, match=r"signed by .* not by"):
        SEALED.verify(other.public, what="it")
    forged = DsseEnvelope(
        KIND, b"payload", KEY.public.key_id, other.sign(encode_pae(KIND, b"payload"))
    )
    with pytest.raises(SignatureError, match=r"^it: "):
        forged.verify(KEY.public, what="it")


@given(st.binary(max_size=200), st.integers(0, 7), st.data())
def test_one_flipped_bit_never_verifies(payload: bytes, bit: int, data: st.DataObject) -> None:
    sealed = bytearray(DsseEnvelope.sign(payload, payload_type=KIND, key=KEY).encode())
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= 1 << bit
    with pytest.raises(SignatureError):
        parse(bytes(sealed)).verify(KEY.public, what="it")


def test_the_payload_is_plain_base64_to_any_reader() -> None:
    assert base64.b64decode(json.loads(DATA)["payload"]) == b"payload"
