"""The statement by which one publisher key vouches for another of the same namespace.

A client that pinned the older key accepts the newer one without asking the user.
"""

from collections.abc import Iterable

import msgspec

from expertctl.errors import InvalidPackageError, SignatureError, TrustError
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import canonical, load_object
from expertctl.trust.dsse import Envelope
from expertctl.trust.keys import PrivateKey, PublicKey

PAYLOAD_TYPE = "application/vnd.expertctl.key-statement.v1+json"
MAX_BYTES = 8192


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    key_id: str
    namespace: str
    public_key: str


def sign_statement(*, namespace: str, new: PublicKey, by: PrivateKey) -> bytes:
    """Vouch with an older key for a new one; the same bytes for the same arguments."""
    payload = canonical(msgspec.to_builtins(_about(namespace, new)))
    return Envelope.seal(payload, payload_type=PAYLOAD_TYPE, key=by).encode()


def statement_signer(
    data: bytes, *, namespace: str, new: PublicKey, keys: Iterable[PublicKey]
) -> str:
    """Return the id of the key, one of ``keys``, that vouches for ``new`` in this namespace.

    Raises:
        SignatureError: when the statement is malformed or its signature is wrong.
        TrustError: when it is about another key or namespace, or none of ``keys`` signed it.
    """
    what = f"the statement about key {new.key_id} of {namespace}"
    opened = Envelope.parse(data, payload_type=PAYLOAD_TYPE, max_bytes=MAX_BYTES, what=what)
    if opened.key_id == new.key_id:
        raise TrustError(f"{what} is signed by that key itself, which proves nothing")
    signer = next((key for key in keys if key.key_id == opened.key_id), None)
    if signer is None:
        raise TrustError(f"{what} is signed by {opened.key_id[:80]!r}, which may not vouch for it")
    opened.verify(signer, what=what)
    if _parse(opened.payload, what) != _about(namespace, new):
        raise TrustError(f"{what} vouches for another key or namespace")
    return signer.key_id


def claimed_signer(data: bytes) -> str:
    """Return the key id that a statement names, unverified; empty when it is malformed."""
    try:
        what = "a key statement"
        return Envelope.parse(
            data, payload_type=PAYLOAD_TYPE, max_bytes=MAX_BYTES, what=what
        ).key_id
    except SignatureError:
        return ""


def _about(namespace: str, key: PublicKey) -> _Stored:
    return _Stored(key.key_id, namespace, key.pem().decode("ascii"))


def _parse(payload: bytes, what: str) -> _Stored:
    try:
        document = load_object(payload, what=what, max_bytes=MAX_BYTES)
        return shape(document, _Stored)
    except (InvalidPackageError, msgspec.ValidationError) as error:
        raise SignatureError(f"{what} is malformed: {error}") from error
