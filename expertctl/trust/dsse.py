"""DSSE v1: one signature over one typed payload, in one spelling.

The envelope is canonical JSON with standard base64, and its one signature names the key. Whatever
else would also verify is refused, so that one payload under one key is one file.
"""

import base64
import binascii
from dataclasses import dataclass

import msgspec

from expertctl.errors import SignatureError
from expertctl.schema.shape import shape_json
from expertctl.trust.keys import PrivateKey, PublicKey


@dataclass(frozen=True, slots=True)
class Envelope:
    """A well-formed envelope; nothing in it is believed before `verify`."""

    payload_type: str
    payload: bytes
    key_id: str
    signature: bytes

    @classmethod
    def seal(cls, payload: bytes, *, payload_type: str, key: PrivateKey) -> "Envelope":
        """Sign a payload; the same for the same arguments."""
        signature = key.sign(pae(payload_type, payload))
        return cls(payload_type, payload, key.public.key_id, signature)

    @classmethod
    def parse(cls, data: bytes, *, payload_type: str, max_bytes: int, what: str) -> "Envelope":
        """Read the bytes of an envelope; what it says is not verified yet.

        Raises:
            SignatureError: for anything but the one accepted spelling and type.
        """
        if len(data) > max_bytes:
            raise SignatureError(f"{what}: more than {max_bytes} bytes are too many")
        try:
            stored = shape_json(data, _Envelope)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SignatureError(f"{what}: not a signed envelope: {str(error)[:200]}") from error
        if stored.payloadType != payload_type:
            shown = stored.payloadType[:80]
            raise SignatureError(f"{what}: signed as {shown!r}, not as {payload_type!r}")
        if len(stored.signatures) != 1:
            count = len(stored.signatures)
            raise SignatureError(f"{what}: {count} signatures, exactly one is allowed")
        [signature] = stored.signatures
        payload, proof = unbase64(stored.payload, what), unbase64(signature.sig, what)
        envelope = cls(payload_type, payload, signature.keyid, proof)
        if envelope.encode() != data:
            raise SignatureError(f"{what}: the envelope is not spelled as the format demands")
        return envelope

    def encode(self) -> bytes:
        """Return the canonical (RFC 8785) JSON of the envelope."""
        signature = _Signature(keyid=self.key_id, sig=to_base64(self.signature))
        stored = _Envelope(to_base64(self.payload), self.payload_type, [signature])
        return msgspec.json.encode(stored)

    def verify(self, key: PublicKey, *, what: str) -> None:
        """Check that ``key`` signed the payload.

        Raises:
            SignatureError: when it did not, or another key is named.
        """
        if self.key_id != key.key_id:
            raise SignatureError(f"{what}: signed by {self.key_id[:80]!r}, not by {key.key_id}")
        try:
            key.verify(self.signature, pae(self.payload_type, self.payload))
        except SignatureError as error:
            raise SignatureError(f"{what}: {error.message}", hint=error.hint) from error


class _Signature(msgspec.Struct, forbid_unknown_fields=True):
    keyid: str
    sig: str


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    payload: str
    payloadType: str  # noqa: N815 - the name that the format has
    signatures: list[_Signature]


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the DSSE v1 pre-authentication encoding: what is signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def to_base64(data: bytes) -> str:
    """Return standard base64 with padding."""
    return base64.b64encode(data).decode("ascii")


def unbase64(text: str, what: str) -> bytes:
    """Read the one base64 text of some bytes.

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
