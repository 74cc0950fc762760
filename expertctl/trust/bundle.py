"""The signature file ``model.sig``: an OpenSSF Model Signing v1.0 bundle in key mode.

A Sigstore bundle v0.3 around a DSSE envelope around an in-toto statement, made with
``cryptography`` alone; ``model_signing verify key`` accepts it. One signature has one spelling: the
compact JSON that the public tool writes, standard base64, one DER encoding. Whatever else would
also verify is refused, so nobody but the key's holder can make a second file for the same content.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.digest import Digest, FileDigest
from expertctl.errors import DigestError, InvalidPackageError, SignatureError
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.trust.dsse import pae, to_base64, unbase64
from expertctl.trust.keys import PrivateKey, PublicKey
from expertctl.trust.statement import (
    MAX_BYTES,
    SIGNATURE_FILE,
    SignedFile,
    Statement,
    demand,
    only,
    take,
    text,
)

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BUNDLE = 2 * MAX_BYTES
_RESIGN = "get it again from its publisher, who may have to `expertctl sign` it again"
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Bundle:
    """A well-formed ``model.sig``; nothing in it is believed before `verify_bundle`."""

    key_id: str
    statement: Statement
    payload: bytes
    signature: bytes

    @property
    def name(self) -> str:
        """What the signer called the signed files; for people, not a proof of identity."""
        return self.statement.name

    @property
    def files(self) -> tuple[SignedFile, ...]:
        """The files that the signature covers."""
        return self.statement.files

    def encode(self) -> bytes:
        """Return the bytes of ``model.sig``, spelled as the public tool does."""
        hint = self.key_id.removeprefix("sha256:")
        signature = {"sig": to_base64(self.signature), "keyid": ""}
        document = {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": to_base64(self.payload),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [signature],
            },
        }
        return json.dumps(document, separators=(",", ":")).encode()


def sign_files(files: Sequence[FileDigest], *, name: str, key: PrivateKey) -> bytes:
    """Return the bytes of ``model.sig`` for these files, the same for the same arguments.

    Raises:
        SignatureError: when a file name cannot be signed.
    """
    statement = Statement.about(files, name=name)
    payload = statement.payload()
    signature = key.sign(pae(PAYLOAD_TYPE, payload))
    return Bundle(key.public.key_id, statement, payload, signature).encode()


def read_bundle(data: bytes) -> Bundle:
    """Read the bytes of a ``model.sig``; what it says is not verified yet.

    Raises:
        SignatureError: for anything outside the one accepted form.
    """
    document = take(
        _load(data), {"mediaType", "verificationMaterial", "dsseEnvelope"}, "the bundle"
    )
    demand(document["mediaType"], MEDIA_TYPE, "the mediaType")
    key_id = _parse_hint(document["verificationMaterial"])
    payload, signature = _parse_envelope(document["dsseEnvelope"])
    bundle = Bundle(key_id, Statement.parse(payload), payload, signature)
    if bundle.encode() != data:
        message = "model.sig: the JSON is not spelled as the format demands"
        raise SignatureError(message, hint=_RESIGN)
    return bundle


def verify_bundle(bundle: Bundle, files: Sequence[FileDigest], key: PublicKey) -> None:
    """Check that ``key`` signed exactly these files: no fewer, no more, no other bytes.

    Raises:
        SignatureError: when it did not, naming the files that differ.
    """
    if bundle.key_id != key.key_id:
        message = f"model.sig names the key {bundle.key_id}, not {key.key_id}"
        raise SignatureError(message)
    try:
        key.verify(bundle.signature, pae(PAYLOAD_TYPE, bundle.payload))
    except SignatureError as error:
        raise SignatureError(f"model.sig: {error.message}", hint=error.hint or _RESIGN) from error
    _demand_same_files(bundle, files)


def _demand_same_files(bundle: Bundle, files: Sequence[FileDigest]) -> None:
    actual = {file.path: file.digest for file in files if file.path != SIGNATURE_FILE}
    signed = {file.path: file.digest for file in bundle.files}
    differing = [path for path in signed if path in actual and signed[path] != actual[path]]
    problems = [
        _named("not signed", sorted(actual.keys() - signed.keys())),
        _named("missing", sorted(signed.keys() - actual.keys())),
        _named("changed since it was signed", differing),
    ]
    if found := "; ".join(filter(None, problems)):
        raise SignatureError(f"model.sig does not fit the files: {found}", hint=_RESIGN)
    if len(actual) != sum(file.path != SIGNATURE_FILE for file in files):
        raise SignatureError("model.sig does not fit the files: two of them have one name")


def _named(what: str, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return f"{what}: {', '.join(map(repr, paths[:_MAX_NAMED]))}{more}"


def _load(data: bytes) -> JsonObject:
    try:
        return load_object(data, what=SIGNATURE_FILE, max_bytes=MAX_BUNDLE)
    except InvalidPackageError as error:
        raise SignatureError(error.message, hint=_RESIGN) from error


def _parse_hint(value: JsonValue) -> str:
    """Return the key id. The log entries must be none: in key mode they would prove nothing."""
    material = take(value, {"publicKey", "tlogEntries"}, "the verificationMaterial")
    if material["tlogEntries"] != []:
        message = "model.sig: tlogEntries must be empty, a log proves nothing about a key"
        raise SignatureError(message, hint=_RESIGN)
    public_key = take(material["publicKey"], {"hint"}, "the publicKey")
    hint = text(public_key["hint"], "the key hint")
    try:
        return str(Digest.parse(f"sha256:{hint}"))
    except DigestError as error:
        message = f"model.sig: the key hint {hint[:80]!r} is not 64 lower-case hex digits"
        raise SignatureError(message, hint=_RESIGN) from error


def _parse_envelope(value: JsonValue) -> tuple[bytes, bytes]:
    envelope = take(value, {"payload", "payloadType", "signatures"}, "the dsseEnvelope")
    demand(envelope["payloadType"], PAYLOAD_TYPE, "the payloadType")
    only_one = only(envelope["signatures"], "the signatures")
    signature = take(only_one, {"sig", "keyid"}, "the signature")
    demand(signature["keyid"], "", "the keyid")
    return (
        _bytes(envelope["payload"], "the payload"),
        _bytes(signature["sig"], "the signature"),
    )


def _bytes(value: JsonValue, what: str) -> bytes:
    return unbase64(text(value, what), f"model.sig: {what}")
