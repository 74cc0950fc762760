"""The signed statement: which files, with which digests. An in-toto statement of OMS v1.0.

The OpenSSF Model Signing predicate lists every file with its sha256; its subject carries one
digest over all of them. Reading is stricter than that standard: unknown keys, other hash types,
shards, symlinks, names that two systems could take for different files, and paths that are left
unsigned are refused.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from expertctl.digest import Digest, FileDigest
from expertctl.errors import DigestError, InvalidPackageError, SignatureError
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical, load_object

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
SIGNATURE_FILE = "model.sig"
MAX_BYTES = 4 << 20
MAX_NAME = 1024
_GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
"""What the public tool leaves unsigned by default; no file that we verify may lie there."""
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f\\:\ud800-\udfff]")


@dataclass(frozen=True, slots=True, order=True)
class SignedFile:
    """One file that a signature covers."""

    path: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Statement:
    """What is signed: a name, for people, and every file, sorted as the public tool sorts."""

    name: str
    files: tuple[SignedFile, ...]

    @classmethod
    def about(cls, files: Iterable[FileDigest], *, name: str) -> Self:
        """State these files.

        Raises:
            SignatureError: when a name among them cannot be signed.
        """
        signed = sorted((SignedFile(f.path, f.digest) for f in files), key=_order)
        _check_subject_name(name)
        _check_files(signed)
        return cls(name, tuple(signed))

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        """Read the payload of an envelope.

        Raises:
            SignatureError: for anything but one strict statement about files.
        """
        try:
            document = load_object(payload, what="model.sig payload", max_bytes=MAX_BYTES)
        except InvalidPackageError as error:
            raise SignatureError(error.message) from error
        take(document, {"_type", "subject", "predicateType", "predicate"}, "the statement")
        demand(document["_type"], STATEMENT_TYPE, "the statement's _type")
        demand(document["predicateType"], PREDICATE_TYPE, "the predicateType")
        predicate = take(document["predicate"], {"serialization", "resources"}, "the predicate")
        ignored = _parse_serialization(predicate["serialization"])
        files = _parse_resources(predicate["resources"])
        _check_ignored(ignored, files)
        name = _parse_subject(document["subject"], files)
        return cls(name, tuple(files))

    def payload(self) -> bytes:
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
            "subject": [{"name": self.name, "digest": {"sha256": _root(self.files)}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"serialization": serialization, "resources": resources},
        }
        return canonical(document)


def take(value: JsonValue, keys: set[str], what: str, *, optional: str = "") -> JsonObject:
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


def demand(value: JsonValue, expected: str | bool, what: str) -> None:
    """Refuse any value but one.

    Raises:
        SignatureError: when it is another, or of another type.
    """
    if type(value) is not type(expected) or value != expected:
        raise SignatureError(f"model.sig: {what} is {str(value)[:80]!r}, not {str(expected)!r}")


def only(value: JsonValue, what: str) -> JsonValue:
    """Return the one item of an array of one.

    Raises:
        SignatureError: when there are fewer or more.
    """
    if not isinstance(value, list):
        raise SignatureError(f"model.sig: {what} is not an array")
    if len(value) != 1:
        raise SignatureError(f"model.sig: {len(value)} entries in {what}, exactly one is allowed")
    return value[0]


def text(value: JsonValue, what: str) -> str:
    """Return a string.

    Raises:
        SignatureError: when it is none.
    """
    if not isinstance(value, str):
        raise SignatureError(f"model.sig: {what} is not a string")
    return value


def _parse_subject(value: JsonValue, files: Sequence[SignedFile]) -> str:
    subject = take(only(value, "the subject"), {"name", "digest"}, "the subject")
    digest = take(subject["digest"], {"sha256"}, "the subject's digest")
    if digest["sha256"] != _root(files):
        raise SignatureError("model.sig: the subject's digest is not that of the listed files")
    name = text(subject["name"], "the subject's name")
    _check_subject_name(name)
    return name


def _parse_resources(value: JsonValue) -> list[SignedFile]:
    if not isinstance(value, list):
        raise SignatureError("model.sig: the resources are not an array")
    files = [_parse_resource(item) for item in value]
    _check_files(files)
    return files


def _parse_resource(value: JsonValue) -> SignedFile:
    resource = take(value, {"name", "algorithm", "digest"}, "a resource")
    name = text(resource["name"], "a resource's name")
    demand(resource["algorithm"], "sha256", f"the algorithm of {name[:80]!r}")
    digest = text(resource["digest"], f"the digest of {name[:80]!r}")
    try:
        return SignedFile(name, Digest.parse(f"sha256:{digest}"))
    except DigestError as error:
        message = f"model.sig: the digest of {name[:80]!r} is not 64 lower-case hex digits"
        raise SignatureError(message) from error


def _parse_serialization(value: JsonValue) -> list[str]:
    """Return the ignored paths; all else in it has one allowed value."""
    keys = {"method", "hash_type", "allow_symlinks"}
    what = "the serialization"
    method = value.get("method") if isinstance(value, dict) else "files"
    demand(method, "files", "the serialization method")
    serialization = take(value, keys, what, optional="ignore_paths")
    demand(serialization["hash_type"], "sha256", "the hash_type")
    demand(serialization["allow_symlinks"], False, "allow_symlinks")
    ignored = serialization.get("ignore_paths", [])
    if not isinstance(ignored, list):
        raise SignatureError("model.sig: ignore_paths is not an array")
    return [text(item, "an ignored path") for item in ignored]


def _check_ignored(ignored: Sequence[str], files: Sequence[SignedFile]) -> None:
    """Allow what the public tool leaves unsigned by itself, and nothing that hides a file."""
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
        if _order(before) > _order(after):
            raise SignatureError(f"model.sig: {after.path!r} is not in sorted order")
    _check_distinct([file.path for file in files])


def check_path(path: str) -> None:
    """Refuse a file name that is not plain, relative, normalised and the same everywhere.

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


def _order(file: SignedFile) -> list[str]:
    return file.path.split("/")


def _root(files: Iterable[SignedFile]) -> str:
    """Return the sha256 over all digests in order, as OMS defines the subject's digest."""
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(bytes.fromhex(file.digest.hex))
    return hasher.hexdigest()
