"""The index document: everything that a registry says of one package, and its signed envelope.

It is the only statement of a registry that a client trusts, and only inside the envelope that the
registry's index key signed. The form is ``schemas/index.schema.json``; the bytes are canonical JSON
(RFC 8785).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Literal, Self

import msgspec

from expertctl.digest import Digest
from expertctl.errors import ExpertError, InvalidPackageError, TrustError
from expertctl.reference import PackageName, Reference, Version
from expertctl.schema.manifest import AdapterKind, BaseRequirement
from expertctl.schema.strict_json import JsonObject, encode_canonical, load_object
from expertctl.schema.validation import convert_document, find_problems
from expertctl.trust.dsse import DsseEnvelope, from_base64, to_base64
from expertctl.trust.grants import find_repeated
from expertctl.trust.keys import PrivateKey, PublicKey

INDEX_SCHEMA = 1
MAX_BYTES = 16 << 20
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class SignedForm:
    """One signed form of a version: the content with one signature."""

    package_digest: Digest
    signer: str
    """The id of the key."""
    size: int
    """Bytes of the OCI manifest."""


@dataclass(frozen=True, slots=True)
class Release:
    """One published version."""

    version: Version
    content_digest: Digest
    forms: tuple[SignedForm, ...]
    """The newest last; older ones can still be pulled."""
    size: int
    """Bytes of all files."""
    published: str
    """RFC 3339 in UTC, to the second."""
    yanked: str | None
    """Why it was yanked, which may be empty; None when it was not."""
    kinds: tuple[AdapterKind, ...]
    base: BaseRequirement
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    description: str = ""

    @property
    def published_at(self) -> datetime:
        """When it was published."""
        return parse_time(self.published)

    def find_form(self, digest: Digest) -> SignedForm | None:
        """Return the form with a package digest."""
        return next((form for form in self.forms if form.package_digest == digest), None)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A publisher key of the namespace."""

    key: PublicKey
    statement: bytes | None
    """The envelope in which an older key vouches for it (`expertctl.trust.dsse`)."""


@dataclass(frozen=True, slots=True)
class RevokedKey:
    """A key of the namespace that is no longer valid, and why."""

    key_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class IndexDocument:
    """What a registry says of one package at one revision."""

    package: PackageName
    revision: int
    updated: str
    """RFC 3339 in UTC, to the second."""
    description: str
    releases: tuple[Release, ...]
    """Sorted by version."""
    keys: tuple[KeyEntry, ...] = ()
    revoked: tuple[RevokedKey, ...] = ()
    interval_days: int | None = None
    """The longest time between two revisions, in days, where the registry states it."""

    @classmethod
    def parse(cls, data: bytes, *, what: str) -> Self:
        """Parse the bytes of an index document.

        Raises:
            InvalidPackageError: with every problem, when they are not exactly such a document.
        """
        return cls._from_json(load_object(data, what=what, max_bytes=MAX_BYTES), what)

    @classmethod
    def parse_canonical(cls, data: bytes, *, what: str) -> Self:
        """Parse the bytes of an index document in the only form that `encode` writes.

        Raises:
            InvalidPackageError: as `parse`, and when they are encoded in another way.
        """
        document = load_object(data, what=what, max_bytes=MAX_BYTES)
        index = cls._from_json(document, what)
        if _canonical_bytes(document) != data:
            raise InvalidPackageError(what, ["it is not canonical JSON (RFC 8785)"])
        return index

    @classmethod
    def _from_json(cls, document: JsonObject, what: str) -> Self:
        if problems := find_problems(document, "index"):
            raise InvalidPackageError(what, problems)
        try:
            stored = convert_document(document, _StoredIndexDocument)
            index = cls._from_stored(stored)
        except msgspec.ValidationError as error:  # 1.0 is an integer for JSON Schema, not for us
            raise InvalidPackageError(what, [str(error)]) from error
        except ExpertError as error:
            raise InvalidPackageError(what, [error.message]) from error
        if problems := list(_find_inconsistencies(index, stored)):
            raise InvalidPackageError(what, problems)
        return index

    @classmethod
    def _from_stored(cls, stored: "_StoredIndexDocument") -> Self:
        return cls(
            package=PackageName.parse(stored.package),
            revision=stored.revision,
            updated=stored.updated,
            description=stored.description,
            releases=tuple(map(_parse_release, stored.releases)),
            keys=tuple(map(_parse_key_entry, stored.keys)),
            revoked=tuple(RevokedKey(entry.key_id, entry.reason) for entry in stored.revoked),
            interval_days=stored.interval_days,
        )

    def encode(self) -> bytes:
        """Return the canonical (RFC 8785) JSON of the document.

        Raises:
            InvalidPackageError: when it would be too large for any client to read.
        """
        stored = _StoredIndexDocument(
            schema=INDEX_SCHEMA,
            package=str(self.package),
            revision=self.revision,
            updated=self.updated,
            description=self.description,
            releases=[_store_release(release) for release in self.releases],
            keys=[_store_key_entry(entry) for entry in self.keys],
            revoked=[_StoredRevoked(entry.key_id, entry.reason) for entry in self.revoked],
            interval_days=self.interval_days,
        )
        document = msgspec.to_builtins(stored)
        if self.interval_days is None:
            del document["interval_days"]
        data = encode_canonical(document)
        if len(data) > MAX_BYTES:
            problem = f"its index document has {len(data):,} bytes, at most {MAX_BYTES:,} fit"
            raise InvalidPackageError(str(self.package), [problem])
        return data

    def find_release(self, version: Version) -> Release | None:
        """Return one version."""
        return next((release for release in self.releases if release.version == version), None)

    def overdue_days(self, now: datetime) -> int | None:
        """Return its age in days where a newer revision is overdue; None where none is."""
        if self.interval_days is None:
            return None
        age = now - parse_time(self.updated)
        return age.days if age > timedelta(days=self.interval_days) else None

    def is_revoked(self, key_id: str) -> bool:
        """Tell whether a key of the namespace was revoked."""
        return any(entry.key_id == key_id for entry in self.revoked)


def format_time(moment: datetime) -> str:
    """Return a time as RFC 3339 in UTC, to the second."""
    return moment.astimezone(UTC).strftime(_TIME_FORMAT)


def format_timestamp(seconds: float) -> str:
    """Return a time in seconds since the epoch like `format_time`."""
    return format_time(datetime.fromtimestamp(seconds, UTC))


def parse_time(text: str) -> datetime:
    """Parse the output of `format_time`; another text is a bug."""
    return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC)


class _StoredForm(msgspec.Struct):
    package_digest: str
    signer: str
    size: int


class _StoredBaseRequirement(msgspec.Struct, omit_defaults=True):
    name: str
    revision: str | None
    arch: str
    weights: str | None
    tokenizer: str
    accepts: tuple[str, ...]
    tokenizer_version: Literal[1, 2] = 1


class _StoredRelease(msgspec.Struct):
    version: str
    content_digest: str
    forms: list[_StoredForm]
    size: int
    published: str
    yanked: str | None
    kinds: tuple[AdapterKind, ...]
    base: _StoredBaseRequirement
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]
    description: str


class _StoredKeyEntry(msgspec.Struct):
    key_id: str
    public_key: str
    statement: str | None


class _StoredRevoked(msgspec.Struct):
    key_id: str
    reason: str


class _StoredIndexDocument(msgspec.Struct):
    schema: int
    package: str
    revision: int
    updated: str
    description: str
    releases: list[_StoredRelease]
    keys: list[_StoredKeyEntry]
    revoked: list[_StoredRevoked]
    interval_days: int | None = None


def _parse_release(stored: _StoredRelease) -> Release:
    for text in (*stored.requires, *stored.conflicts):
        Reference.parse(text)
    return Release(
        version=Version.parse(stored.version),
        content_digest=Digest.parse(stored.content_digest),
        forms=tuple(
            SignedForm(Digest.parse(form.package_digest), form.signer, form.size)
            for form in stored.forms
        ),
        size=stored.size,
        published=stored.published,
        yanked=stored.yanked,
        kinds=stored.kinds,
        base=msgspec.convert(stored.base, BaseRequirement, from_attributes=True),
        requires=stored.requires,
        conflicts=stored.conflicts,
        description=stored.description,
    )


def _store_release(release: Release) -> _StoredRelease:
    return _StoredRelease(
        version=str(release.version),
        content_digest=str(release.content_digest),
        forms=[
            _StoredForm(str(form.package_digest), form.signer, form.size) for form in release.forms
        ],
        size=release.size,
        published=release.published,
        yanked=release.yanked,
        kinds=release.kinds,
        base=msgspec.convert(release.base, _StoredBaseRequirement, from_attributes=True),
        requires=release.requires,
        conflicts=release.conflicts,
        description=release.description,
    )


def _parse_key_entry(stored: _StoredKeyEntry) -> KeyEntry:
    key = PublicKey.from_pem(stored.public_key.encode(), what=f"key {stored.key_id}")
    statement = stored.statement
    what = f"the statement of key {stored.key_id}"
    return KeyEntry(key, None if statement is None else from_base64(statement, what))


def _store_key_entry(entry: KeyEntry) -> _StoredKeyEntry:
    statement = None if entry.statement is None else to_base64(entry.statement)
    return _StoredKeyEntry(entry.key.key_id, entry.key.pem().decode("ascii"), statement)


def _find_inconsistencies(index: IndexDocument, stored: _StoredIndexDocument) -> Iterator[str]:
    """Yield the problems that the JSON schema cannot express."""
    for before, after in pairwise(index.releases):
        if not before.version < after.version:
            yield f"releases: {after.version} does not sort after {before.version}"
    for written, entry in zip(stored.keys, index.keys, strict=True):
        if written.key_id != entry.key.key_id:
            yield f"keys: key_id is {written.key_id}, its key has {entry.key.key_id}"
    forms = [str(f.package_digest) for release in index.releases for f in release.forms]
    yield from find_repeated("package_digest", forms)
    yield from find_repeated("keys", (entry.key.key_id for entry in index.keys))
    yield from find_repeated("revoked", (entry.key_id for entry in index.revoked))
    for text in {index.updated, *(release.published for release in index.releases)}:
        if not _is_time(text):
            yield f"{text} is no moment"


def _canonical_bytes(document: JsonObject) -> bytes:
    """Return the RFC 8785 bytes of a valid document, 100 times faster than `encode_canonical`.

    Its names are ASCII and its numbers integers, so the standard library writes the same bytes.
    """
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _is_time(text: str) -> bool:
    try:
        parse_time(text)
    except ValueError:
        return False
    return True


INDEX_PAYLOAD_TYPE = "application/vnd.expertctl.index.v1+json"
MAX_ENVELOPE = MAX_BYTES * 4 // 3 + 4096
"""A document of the largest size in base64, and the envelope around it."""


def sign_index(document: IndexDocument, key: PrivateKey) -> bytes:
    """Return the envelope of a document; deterministic.

    Raises:
        InvalidPackageError: when the document is too large for any client to read.
    """
    return DsseEnvelope.sign(document.encode(), payload_type=INDEX_PAYLOAD_TYPE, key=key).encode()


def open_index(envelope: bytes, *, key: PublicKey, package: PackageName) -> IndexDocument:
    """Return the document of a package, which the registry's index key must have signed.

    Raises:
        SignatureError: when the envelope is malformed or its signature is wrong.
        TrustError: when another key signed it, or it is about another package.
        InvalidPackageError: when what was signed is no index document.
    """
    what = f"the index of {package}"
    opened = DsseEnvelope.parse(
        envelope, payload_type=INDEX_PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE, what=what
    )
    if opened.key_id != key.key_id:
        raise TrustError(
            f"{what} is signed by {opened.key_id[:80]!r}, the registry's index key is {key.key_id}",
            hint="if the registry has a new index key, ask whoever runs it for the fingerprint; "
            "see `expertctl trust registry --help`",
        )
    opened.verify(key, what=what)
    document = IndexDocument.parse_canonical(opened.payload, what=what)
    if document.package != package:
        raise TrustError(f"asked for {what}, but got that of {document.package}")
    return document
