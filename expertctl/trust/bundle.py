"""The signature file ``model.sig``: an OpenSSF Model Signing v1.0 bundle in key mode.

A Sigstore bundle v0.3 around a DSSE envelope around an in-toto statement, made with
``cryptography`` alone; ``model_signing verify key`` accepts it. The statement lists every file with
its sha256; its subject carries one digest over all of them.

Reading is stricter than the standard: unknown keys, other hash types, shards, symlinks, names that
two systems could take for different files, and paths that are left unsigned are refused. A
signature has one accepted encoding: the compact JSON of the public tool, standard base64, one DER
form. Every other encoding that would also verify is refused, so nobody but the key's holder can
make a second file for the same content.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from expertctl.errors import DigestError, InvalidPackageError, SignatureError
from expertctl.reference import Digest, FileDigest
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, load_object
from expertctl.trust.dsse import encode_pae, from_base64, to_base64
from expertctl.trust.keys import PrivateKey, PublicKey

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
SIGNATURE_FILE = "model.sig"
MAX_BYTES = 4 << 20
MAX_NAME = 1024
_GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
"""Paths that the public tool leaves unsigned by default; no file that we verify may lie there."""
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f\\:\ud800-\udfff]")


@dataclass(frozen=True, slots=True, order=True)
class SignedFile:
    """One file that a signature covers."""

    path: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class SignedStatement:
    """The signed content: a name, for people, and every file, in the order of the public tool."""

    name: str
    files: tuple[SignedFile, ...]

    @classmethod
    def from_files(cls, files: Iterable[FileDigest], *, name: str) -> Self:
        """Make the statement about some files.

        Raises:
            SignatureError: when a name among them cannot be signed.
        """
        signed = sorted((SignedFile(f.path, f.digest) for f in files), key=_sort_key)
        _check_subject_name(name)
        _check_files(signed)
        return cls(name, tuple(signed))

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        """Parse the payload of an envelope.

        Raises:
            SignatureError: for anything but one strict statement about files.
        """
        try:
            document = load_object(payload, what="model.sig payload", max_bytes=MAX_BYTES)
        except InvalidPackageError as error:
            raise SignatureError(error.message) from error
        require_keys(document, {"_type", "subject", "predicateType", "predicate"}, "the statement")
        require_value(document["_type"], STATEMENT_TYPE, "the statement's _type")
        require_value(document["predicateType"], PREDICATE_TYPE, "the predicateType")
        predicate = require_keys(
            document["predicate"], {"serialization", "resources"}, "the predicate"
        )
        ignored = _parse_serialization(predicate["serialization"])
        files = _parse_resources(predicate["resources"])
        _check_ignored(ignored, files)
        name = _parse_subject(document["subject"], files)
        return cls(name, tuple(files))

    def encode(self) -> bytes:
        """Return the canonical (RFC 8785) JSON of the statement."""
        resources = [
            {"algorithm": "sha256", "digest": f.digest.hex, "name": f.path} for f in self.files
        ]
        serialization = {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": [SIGNATURE_FILE],
        }
        document = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": self.name, "digest": {"sha256": _root_digest(self.files)}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"serialization": serialization, "resources": resources},
        }
        return encode_canonical(document)


def require_keys(value: JsonValue, keys: set[str], what: str, *, optional: str = "") -> JsonObject:
    """Return an object that has exactly these keys.

    Raises:
        SignatureError: when it is no object, or has fewer or other keys.
    """
    if not isinstance(value, dict):
        raise SignatureError(f"model.sig: {what} is not an object")
    if missing := sorted(keys - value.keys()):
        raise SignatureError(f"model.sig: {what} has no {missing[0]!r}")
    if unknown := sorted(value.keys() - keys - {optional}):
        raise SignatureError(f"model.sig: {what} has an unknown key {unknown[0][:80]!r}")
    return value


def require_value(value: JsonValue, expected: str | bool, what: str) -> None:
    """Require one exact value.

    Raises:
        SignatureError: when it is another value, or of another type.
    """
    if type(value) is not type(expected) or value != expected:
        raise SignatureError(f"model.sig: {what} is {str(value)[:80]!r}, not {str(expected)!r}")


def require_single(value: JsonValue, what: str) -> JsonValue:
    """Return the only item of an array.

    Raises:
        SignatureError: when there are fewer or more.
    """
    if not isinstance(value, list):
        raise SignatureError(f"model.sig: {what} is not an array")
    if len(value) != 1:
        raise SignatureError(f"model.sig: {len(value)} entries in {what}, exactly one is allowed")
    return value[0]


def require_text(value: JsonValue, what: str) -> str:
    """Return a string.

    Raises:
        SignatureError: when it is none.
    """
    if not isinstance(value, str):
        raise SignatureError(f"model.sig: {what} is not a string")
    return value


def _parse_subject(value: JsonValue, files: Sequence[SignedFile]) -> str:
    subject = require_keys(require_single(value, "the subject"), {"name", "digest"}, "the subject")
    digest = require_keys(subject["digest"], {"sha256"}, "the subject's digest")
    if digest["sha256"] != _root_digest(files):
        raise SignatureError("model.sig: the subject's digest is not that of the listed files")
    name = require_text(subject["name"], "the subject's name")
    _check_subject_name(name)
    return name


def _parse_resources(value: JsonValue) -> list[SignedFile]:
    if not isinstance(value, list):
        raise SignatureError("model.sig: the resources are not an array")
    files = [_parse_resource(item) for item in value]
    _check_files(files)
    return files


def _parse_resource(value: JsonValue) -> SignedFile:
    resource = require_keys(value, {"name", "algorithm", "digest"}, "a resource")
    name = require_text(resource["name"], "a resource's name")
    require_value(resource["algorithm"], "sha256", f"the algorithm of {name[:80]!r}")
    digest = require_text(resource["digest"], f"the digest of {name[:80]!r}")
    try:
        return SignedFile(name, Digest.parse(f"sha256:{digest}"))
    except DigestError as error:
        message = f"model.sig: the digest of {name[:80]!r} is not 64 lower-case hex digits"
        raise SignatureError(message) from error


def _parse_serialization(value: JsonValue) -> list[str]:
    """Return the ignored paths; every other field has one allowed value."""
    keys = {"method", "hash_type", "allow_symlinks"}
    what = "the serialization"
    method = value.get("method") if isinstance(value, dict) else "files"
    require_value(method, "files", "the serialization method")
    serialization = require_keys(value, keys, what, optional="ignore_paths")
    require_value(serialization["hash_type"], "sha256", "the hash_type")
    require_value(serialization["allow_symlinks"], False, "allow_symlinks")
    ignored = serialization.get("ignore_paths", [])
    if not isinstance(ignored, list):
        raise SignatureError("model.sig: ignore_paths is not an array")
    return [require_text(item, "an ignored path") for item in ignored]


def _check_ignored(ignored: Sequence[str], files: Sequence[SignedFile]) -> None:
    """Allow the paths that the public tool ignores by default, and none that hides a file."""
    for path in ignored:
        if path not in {SIGNATURE_FILE, *_GIT_PATHS}:
            raise SignatureError(f"model.sig: ignore_paths would leave {path[:80]!r} unsigned")
    if len(set(ignored)) != len(ignored):
        raise SignatureError("model.sig: ignore_paths names a path twice")
    for file in files:
        if file.path.split("/")[0] in ignored:
            raise SignatureError(f"model.sig: {file.path!r} is both listed and ignored")


def _check_subject_name(name: str) -> None:
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise SignatureError("model.sig: the subject's name is empty, too long or not printable")


def _check_files(files: Sequence[SignedFile]) -> None:
    if not files:
        raise SignatureError("model.sig: no file is listed")
    for file in files:
        check_path(file.path)
    for before, after in pairwise(files):
        if before.path == after.path:
            raise SignatureError(f"model.sig: {after.path!r} is listed twice")
        if _sort_key(before) > _sort_key(after):
            raise SignatureError(f"model.sig: {after.path!r} is not in sorted order")
    _check_distinct([file.path for file in files])


def check_path(path: str) -> None:
    """Require a plain, relative, normalised file name that is the same on every system.

    Raises:
        SignatureError: with what is wrong with it.
    """
    shown = repr(path[:80])
    if len(path) > MAX_NAME:
        raise SignatureError(f"model.sig: the file name {shown}… is too long")
    if _NOT_IN_NAMES.search(path):
        raise SignatureError(
            f"model.sig: {shown} holds a backslash, a colon, a control character or a surrogate"
        )
    if not unicodedata.is_normalized("NFC", path):
        raise SignatureError(f"model.sig: {shown} is not in Unicode normal form C")
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise SignatureError(f"model.sig: {shown} is not a plain relative path")
    if path == SIGNATURE_FILE:
        raise SignatureError(f"model.sig: {shown} is the signature itself and cannot be signed")


def _check_distinct(paths: Sequence[str]) -> None:
    """Refuse two names that are one file on some disks, and a file that is also a folder."""
    folded: dict[str, str] = {}
    for path in paths:
        other = folded.setdefault(path.casefold(), path)
        if other != path:
            raise SignatureError(f"model.sig: {other!r} and {path!r} differ in case alone")
    for path in paths:
        parts = path.casefold().split("/")
        for depth in range(1, len(parts)):
            if (file := folded.get("/".join(parts[:depth]))) is not None:
                raise SignatureError(f"model.sig: {file!r} is a file and the folder of {path!r}")


def _sort_key(file: SignedFile) -> list[str]:
    return file.path.split("/")


def _root_digest(files: Iterable[SignedFile]) -> str:
    """Return the sha256 over all digests in order, as OMS defines the subject's digest."""
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(bytes.fromhex(file.digest.hex))
    return hasher.hexdigest()


MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BUNDLE = 2 * MAX_BYTES
_RESIGN_HINT = "get it again from its publisher, who may have to `expertctl sign` it again"
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class SignatureBundle:
    """A well-formed ``model.sig``; its content is not trusted before `verify_bundle`."""

    key_id: str
    statement: SignedStatement
    payload: bytes
    signature: bytes

    @property
    def name(self) -> str:
        """The signer's name for the signed files; for people, not a proof of identity."""
        return self.statement.name

    @property
    def files(self) -> tuple[SignedFile, ...]:
        """The files that the signature covers."""
        return self.statement.files

    def encode(self) -> bytes:
        """Return the bytes of ``model.sig``, encoded as the public tool does."""
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
    """Return the bytes of ``model.sig`` for these files; deterministic.

    Raises:
        SignatureError: when a file name cannot be signed.
    """
    statement = SignedStatement.from_files(files, name=name)
    payload = statement.encode()
    signature = key.sign(encode_pae(PAYLOAD_TYPE, payload))
    return SignatureBundle(key.public.key_id, statement, payload, signature).encode()


def read_bundle(data: bytes) -> SignatureBundle:
    """Parse the bytes of a ``model.sig``; its content is not verified yet.

    Raises:
        SignatureError: for anything outside the one accepted form.
    """
    document = require_keys(
        _parse_document(data), {"mediaType", "verificationMaterial", "dsseEnvelope"}, "the bundle"
    )
    require_value(document["mediaType"], MEDIA_TYPE, "the mediaType")
    key_id = _parse_hint(document["verificationMaterial"])
    payload, signature = _parse_envelope(document["dsseEnvelope"])
    bundle = SignatureBundle(key_id, SignedStatement.parse(payload), payload, signature)
    if bundle.encode() != data:
        message = "model.sig: the JSON is not spelled as the format demands"
        raise SignatureError(message, hint=_RESIGN_HINT)
    return bundle


def verify_bundle(bundle: SignatureBundle, files: Sequence[FileDigest], key: PublicKey) -> None:
    """Check that ``key`` signed exactly these files: no fewer, no more, no other bytes.

    Raises:
        SignatureError: when it did not, naming the files that differ.
    """
    if bundle.key_id != key.key_id:
        message = f"model.sig names the key {bundle.key_id}, not {key.key_id}"
        raise SignatureError(message)
    try:
        key.verify(bundle.signature, encode_pae(PAYLOAD_TYPE, bundle.payload))
    except SignatureError as error:
        raise SignatureError(
            f"model.sig: {error.message}", hint=error.hint or _RESIGN_HINT
        ) from error
    _check_same_files(bundle, files)


def _check_same_files(bundle: SignatureBundle, files: Sequence[FileDigest]) -> None:
    actual = {file.path: file.digest for file in files if file.path != SIGNATURE_FILE}
    signed = {file.path: file.digest for file in bundle.files}
    differing = [path for path in signed if path in actual and signed[path] != actual[path]]
    problems = [
        _name_paths("not signed", sorted(actual.keys() - signed.keys())),
        _name_paths("missing", sorted(signed.keys() - actual.keys())),
        _name_paths("changed since it was signed", differing),
    ]
    if found := "; ".join(filter(None, problems)):
        raise SignatureError(f"model.sig does not fit the files: {found}", hint=_RESIGN_HINT)
    if len(actual) != sum(file.path != SIGNATURE_FILE for file in files):
        raise SignatureError("model.sig does not fit the files: two of them have one name")


def _name_paths(what: str, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return f"{what}: {', '.join(map(repr, paths[:_MAX_NAMED]))}{more}"


def _parse_document(data: bytes) -> JsonObject:
    try:
        return load_object(data, what=SIGNATURE_FILE, max_bytes=MAX_BUNDLE)
    except InvalidPackageError as error:
        raise SignatureError(error.message, hint=_RESIGN_HINT) from error


def _parse_hint(value: JsonValue) -> str:
    """Return the key id. Log entries are refused: in key mode they would prove nothing."""
    material = require_keys(value, {"publicKey", "tlogEntries"}, "the verificationMaterial")
    if material["tlogEntries"] != []:
        message = "model.sig: tlogEntries must be empty, a log proves nothing about a key"
        raise SignatureError(message, hint=_RESIGN_HINT)
    public_key = require_keys(material["publicKey"], {"hint"}, "the publicKey")
    hint = require_text(public_key["hint"], "the key hint")
    try:
        return str(Digest.parse(f"sha256:{hint}"))
    except DigestError as error:
        message = f"model.sig: the key hint {hint[:80]!r} is not 64 lower-case hex digits"
        raise SignatureError(message, hint=_RESIGN_HINT) from error


def _parse_envelope(value: JsonValue) -> tuple[bytes, bytes]:
    envelope = require_keys(value, {"payload", "payloadType", "signatures"}, "the dsseEnvelope")
    require_value(envelope["payloadType"], PAYLOAD_TYPE, "the payloadType")
    only_one = require_single(envelope["signatures"], "the signatures")
    signature = require_keys(only_one, {"sig", "keyid"}, "the signature")
    require_value(signature["keyid"], "", "the keyid")
    return (
        _decode_bytes(envelope["payload"], "the payload"),
        _decode_bytes(signature["sig"], "the signature"),
    )


def _decode_bytes(value: JsonValue, what: str) -> bytes:
    return from_base64(require_text(value, what), f"model.sig: {what}")
