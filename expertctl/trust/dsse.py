"""DSSE v1 envelopes with one signature in one accepted encoding, and key statements.

An envelope is canonical JSON with standard base64, and its one signature names the key. Every other
encoding that would also verify is refused, so one payload under one key is one file.

A key statement is an envelope by which one publisher key vouches for another of the same namespace.
A client that pinned the older key accepts the newer one without asking the user.
"""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from expertctl.errors import InvalidPackageError, SignatureError, TrustError
from expertctl.schema.strict_json import encode_canonical, load_object
from expertctl.schema.validation import convert_document, decode_json
from expertctl.trust.keys import PrivateKey, PublicKey


@dataclass(frozen=True, slots=True)
class DsseEnvelope:
    """A well-formed envelope; its content is not trusted before `verify`."""

    payload_type: str
    payload: bytes
    key_id: str
    signature: bytes

    @classmethod
    def sign(cls, payload: bytes, *, payload_type: str, key: PrivateKey) -> "DsseEnvelope":
        """Sign a payload; deterministic."""
        signature = key.sign(encode_pae(payload_type, payload))
        return cls(payload_type, payload, key.public.key_id, signature)

    @classmethod
    def parse(cls, data: bytes, *, payload_type: str, max_bytes: int, what: str) -> "DsseEnvelope":
        """Parse the bytes of an envelope; its content is not verified yet.

        Raises:
            SignatureError: for anything but the one accepted spelling and type.
        """
        if len(data) > max_bytes:
            raise SignatureError(f"{what}: more than {max_bytes} bytes are too many")
        try:
            stored = decode_json(data, _StoredEnvelope)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SignatureError(f"{what}: not a signed envelope: {str(error)[:200]}") from error
        if stored.payloadType != payload_type:
            shown = stored.payloadType[:80]
            raise SignatureError(f"{what}: signed as {shown!r}, not as {payload_type!r}")
        if len(stored.signatures) != 1:
            count = len(stored.signatures)
            raise SignatureError(f"{what}: {count} signatures, exactly one is allowed")
        [signature] = stored.signatures
        payload, proof = from_base64(stored.payload, what), from_base64(signature.sig, what)
        envelope = cls(payload_type, payload, signature.keyid, proof)
        if envelope.encode() != data:
            raise SignatureError(f"{what}: the envelope is not spelled as the format demands")
        return envelope

    def encode(self) -> bytes:
        """Return the canonical (RFC 8785) JSON of the envelope."""
        signature = _StoredSignature(keyid=self.key_id, sig=to_base64(self.signature))
        stored = _StoredEnvelope(to_base64(self.payload), self.payload_type, [signature])
        return msgspec.json.encode(stored)

    def verify(self, key: PublicKey, *, what: str) -> None:
        """Check that ``key`` signed the payload.

        Raises:
            SignatureError: when it did not, or another key is named.
        """
        if self.key_id != key.key_id:
            raise SignatureError(f"{what}: signed by {self.key_id[:80]!r}, not by {key.key_id}")
        try:
            key.verify(self.signature, encode_pae(self.payload_type, self.payload))
        except SignatureError as error:
            raise SignatureError(f"{what}: {error.message}", hint=error.hint) from error


class _StoredSignature(msgspec.Struct, forbid_unknown_fields=True):
    keyid: str
    sig: str


class _StoredEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    payload: str
    payloadType: str  # noqa: N815 - the name that the format has
    signatures: list[_StoredSignature]


def encode_pae(payload_type: str, payload: bytes) -> bytes:
    """Return the DSSE v1 pre-authentication encoding: the bytes that are signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def to_base64(data: bytes) -> str:
    """Return standard base64 with padding."""
    return base64.b64encode(data).decode("ascii")


def from_base64(text: str, what: str) -> bytes:
    """Decode standard base64, only in the encoding that `to_base64` makes.

    Raises:
        SignatureError: for the URL alphabet, white space, bad padding and unused bits.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise SignatureError(f"{what} is not standard base64") from error
    if to_base64(data) != text:
        raise SignatureError(f"{what} is not standard base64")
    return data


KEY_STATEMENT_TYPE = "application/vnd.expertctl.key-statement.v1+json"
MAX_KEY_STATEMENT_BYTES = 8192


class _StoredKeyStatement(msgspec.Struct, forbid_unknown_fields=True):
    key_id: str
    namespace: str
    public_key: str


def sign_key_statement(*, namespace: str, new: PublicKey, by: PrivateKey) -> bytes:
    """Vouch for a new key with an older one; deterministic."""
    payload = encode_canonical(msgspec.to_builtins(_make_key_statement(namespace, new)))
    return DsseEnvelope.sign(payload, payload_type=KEY_STATEMENT_TYPE, key=by).encode()


def verify_key_statement(
    data: bytes, *, namespace: str, new: PublicKey, keys: Iterable[PublicKey]
) -> str:
    """Return the id of the key, one of ``keys``, that vouches for ``new`` in this namespace.

    Raises:
        SignatureError: when the statement is malformed or its signature is wrong.
        TrustError: when it is about another key or namespace, or none of ``keys`` signed it.
    """
    what = f"the statement about key {new.key_id} of {namespace}"
    opened = DsseEnvelope.parse(
        data, payload_type=KEY_STATEMENT_TYPE, max_bytes=MAX_KEY_STATEMENT_BYTES, what=what
    )
    if opened.key_id == new.key_id:
        raise TrustError(f"{what} is signed by that key itself, which proves nothing")
    signer = next((key for key in keys if key.key_id == opened.key_id), None)
    if signer is None:
        raise TrustError(f"{what} is signed by {opened.key_id[:80]!r}, which may not vouch for it")
    opened.verify(signer, what=what)
    if _parse_key_statement(opened.payload, what) != _make_key_statement(namespace, new):
        raise TrustError(f"{what} vouches for another key or namespace")
    return signer.key_id


def read_claimed_signer(data: bytes) -> str:
    """Return the key id that a statement names, unverified; empty when it is malformed."""
    try:
        what = "a key statement"
        return DsseEnvelope.parse(
            data, payload_type=KEY_STATEMENT_TYPE, max_bytes=MAX_KEY_STATEMENT_BYTES, what=what
        ).key_id
    except SignatureError:
        return ""


def _make_key_statement(namespace: str, key: PublicKey) -> _StoredKeyStatement:
    return _StoredKeyStatement(key.key_id, namespace, key.pem().decode("ascii"))


def _parse_key_statement(payload: bytes, what: str) -> _StoredKeyStatement:
    try:
        document = load_object(payload, what=what, max_bytes=MAX_KEY_STATEMENT_BYTES)
        return convert_document(document, _StoredKeyStatement)
    except (InvalidPackageError, msgspec.ValidationError) as error:
        raise SignatureError(f"{what} is malformed: {error}") from error
