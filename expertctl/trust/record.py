"""What is trusted, as a value: keys with their grants, and revocations. Decides; does no I/O.

The document is ``trust.json`` (``schemas/trust.schema.json``). A grant lets a key sign a namespace:
any content, or only the contents listed. A revocation is total and is never taken back; it outlives
the removal of the key.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from expertctl.digest import Digest
from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.reference import NAME_PATTERN, PackageName
from expertctl.schema.strict_json import load_object
from expertctl.schema.validation import problems_of
from expertctl.trust.keys import MAX_NAME, PublicKey

MAX_BYTES = 16 << 20
MAX_REASON = 500
_NAMESPACE = re.compile(NAME_PATTERN)
_KEY_ID = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """Leave to sign one namespace; ``content_digests`` limits it, None does not."""

    namespace: str
    content_digests: tuple[str, ...] | None = None

    def joined(self, other: "Grant") -> "Grant":
        """Return the wider of two grants for one namespace."""
        if self.content_digests is None or other.content_digests is None:
            return Grant(self.namespace)
        both = {*self.content_digests, *other.content_digests}
        return Grant(self.namespace, tuple(sorted(both)))

    def allows(self, content_digest: Digest) -> bool:
        """Tell whether this content may be signed."""
        return self.content_digests is None or str(content_digest) in self.content_digests


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key, the name that the person gave it, and what it may sign."""

    key: PublicKey
    name: str
    grants: tuple[Grant, ...]

    @property
    def key_id(self) -> str:
        """The id of the key."""
        return self.key.key_id

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that the key may sign, wholly or in part."""
        return tuple(grant.namespace for grant in self.grants)

    def joined(self, other: "TrustedKey") -> "TrustedKey":
        """Return this key with the grants of both, under the newer name."""
        grants = {grant.namespace: grant for grant in self.grants}
        for grant in other.grants:
            mine = grants.get(grant.namespace)
            grants[grant.namespace] = mine.joined(grant) if mine else grant
        return replace(other, grants=tuple(sorted(grants.values(), key=lambda g: g.namespace)))


@dataclass(frozen=True, slots=True)
class Revocation:
    """A key that can never authorise anything again, and why."""

    key_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """All that is trusted and revoked; changed by making another."""

    keys: tuple[TrustedKey, ...] = ()
    revoked: tuple[Revocation, ...] = ()

    @classmethod
    def parse(cls, data: bytes, *, what: str) -> Self:
        """Read the bytes of ``trust.json``.

        Raises:
            InvalidPackageError: with every problem, when it is not exactly such a document.
        """
        try:
            return cls._read(data, what)
        except InvalidPackageError as error:
            hint = f"restore {what} from a backup; without it nothing is trusted"
            raise InvalidPackageError(error.what, error.problems, hint=hint) from error

    @classmethod
    def _read(cls, data: bytes, what: str) -> Self:
        document = load_object(data, what=what, max_bytes=MAX_BYTES)
        if problems := problems_of(document, "trust"):
            raise InvalidPackageError(what, problems)
        try:
            stored = msgspec.convert(document, _Stored)
        except msgspec.ValidationError as error:  # 1.0 is an integer for JSON Schema, not for us
            raise InvalidPackageError(what, [str(error)]) from error
        record = cls(
            tuple(_trusted(entry, what) for entry in stored.keys),
            tuple(Revocation(entry.key_id, entry.reason) for entry in stored.revoked),
        )
        if problems := list(_inconsistencies(stored, record)):
            raise InvalidPackageError(what, problems)
        return record

    def encode(self) -> bytes:
        """Return the bytes of ``trust.json``."""
        keys = [
            _StoredKey(
                trusted.key_id,
                trusted.name,
                trusted.key.pem().decode("ascii"),
                [_StoredGrant(g.namespace, g.content_digests) for g in trusted.grants],
            )
            for trusted in self.keys
        ]
        revoked = [_StoredRevocation(r.key_id, r.reason) for r in self.revoked]
        document = msgspec.to_builtins(_Stored(1, keys, revoked))
        return json.dumps(document, indent=2).encode() + b"\n"

    def revocation(self, key_id: str) -> Revocation | None:
        """Return why a key is revoked; None when it is not."""
        return next((r for r in self.revoked if r.key_id == key_id), None)

    def trusted(self, key_id: str) -> TrustedKey | None:
        """Return a trusted key by its id; a revoked one too, for display."""
        return next((k for k in self.keys if k.key_id == key_id), None)

    def with_key(self, trusted: TrustedKey) -> "TrustRecord":
        """Return this with a key added, or with more grants for it.

        Raises:
            RevokedError: when the key was revoked.
        """
        if revocation := self.revocation(trusted.key_id):
            hint = "a revocation is final; ask the publisher for the key that replaces it"
            raise RevokedError(f"{_told(trusted.key_id, revocation)}", hint=hint)
        present = self.trusted(trusted.key_id)
        if present is None:
            return replace(self, keys=(*self.keys, trusted))
        joined = present.joined(trusted)
        return replace(self, keys=tuple(joined if k is present else k for k in self.keys))

    def without_key(self, key_id: str) -> "TrustRecord":
        """Return this without a key; its revocation stays.

        Raises:
            NotFoundError: when it is not there.
        """
        if self.trusted(key_id) is None:
            hint = "`expertctl trust list` shows the trusted keys"
            raise NotFoundError(f"the key {key_id} is not trusted", hint=hint)
        return replace(self, keys=tuple(k for k in self.keys if k.key_id != key_id))

    def with_revocation(self, key_id: str, reason: str) -> "TrustRecord":
        """Return this with a key revoked, known or not; the first reason stays.

        Raises:
            UsageError: when the id is not one, or the reason is too long or not printable.
        """
        if not _KEY_ID.fullmatch(key_id):
            raise UsageError(f"{key_id[:80]!r} is not a key id such as sha256:<64 hex digits>")
        if len(reason) > MAX_REASON or not reason.isprintable():
            raise UsageError(f"a reason is one line of at most {MAX_REASON} characters")
        if self.revocation(key_id):
            return self
        return replace(self, revoked=(*self.revoked, Revocation(key_id, reason)))

    def authorise(self, key_id: str, *, package: PackageName, content_digest: Digest) -> PublicKey:
        """Return the key when it may vouch for this content under this name.

        Raises:
            RevokedError: when the key was revoked, whatever else is known of it.
            TrustError: when it is not trusted, or not for this namespace or content.
        """
        if revocation := self.revocation(key_id):
            hint = f"wait for a version of {package} that is signed with another key"
            raise RevokedError(f"{package}: {_told(key_id, revocation)}", hint=hint)
        trusted = self.trusted(key_id)
        if trusted is None:
            use = f"`expertctl trust add KEY.pem --namespace {package.namespace}`"
            message = f"{package}: key {key_id} is not trusted"
            raise TrustError(message, hint=f"if you know whose it is: {use}")
        _demand_grant(trusted, package, content_digest)
        return trusted.key


def namespace_of(text: str) -> str:
    """Return the namespace that ``acme`` and ``acme/*`` name.

    Raises:
        UsageError: for anything else; no pattern covers more than one namespace.
    """
    name = text.removesuffix("/*")
    if len(name) <= MAX_NAME and _NAMESPACE.fullmatch(name):
        return name
    hint = "a namespace is the part before the slash: `acme` (or `acme/*`) for acme/sql"
    raise UsageError(f"{text[:80]!r} is not a namespace", hint=hint)


def grants_for(
    namespaces: Iterable[str], content_digests: Sequence[str] | None
) -> tuple[Grant, ...]:
    """Return one grant for each namespace, all with the same limits.

    Raises:
        UsageError: when there is no namespace, a bad one, or an empty list of contents.
        DigestError: when a content is not named by a digest.
    """
    names = sorted({namespace_of(text) for text in namespaces})
    if not names:
        raise UsageError("a key is trusted for a namespace", hint="add `--namespace NAME`")
    if content_digests is None:
        return tuple(Grant(name) for name in names)
    limits = tuple(sorted({str(Digest.parse(text)) for text in content_digests}))
    if not limits:
        raise UsageError("a key limited to no content at all could sign nothing")
    return tuple(Grant(name, limits) for name in names)


class _StoredGrant(msgspec.Struct):
    namespace: str
    content_digests: tuple[str, ...] | None


class _StoredKey(msgspec.Struct):
    key_id: str
    name: str
    public_key: str
    grants: list[_StoredGrant]


class _StoredRevocation(msgspec.Struct):
    key_id: str
    reason: str


class _Stored(msgspec.Struct):
    schema: int
    keys: list[_StoredKey]
    revoked: list[_StoredRevocation]


def _trusted(entry: _StoredKey, what: str) -> TrustedKey:
    key = PublicKey.from_pem(entry.public_key.encode(), what=f"{what}: key {entry.name!r}")
    grants = (Grant(g.namespace, g.content_digests) for g in entry.grants)
    return TrustedKey(key, entry.name, tuple(grants))


def _inconsistencies(stored: _Stored, record: TrustRecord) -> Iterable[str]:
    """Yield what a schema cannot say."""
    for entry, trusted in zip(stored.keys, record.keys, strict=True):
        if entry.key_id != trusted.key_id:
            yield f"key {entry.name!r}: key_id is {entry.key_id}, its key has {trusted.key_id}"
        if len(set(trusted.namespaces)) != len(trusted.namespaces):
            yield f"key {entry.name!r}: two grants for one namespace"
    for what, ids in (
        ("keys", [k.key_id for k in record.keys]),
        ("revoked", [r.key_id for r in record.revoked]),
    ):
        yield from (f"{what}: {i} is there twice" for i, n in sorted(Counter(ids).items()) if n > 1)


def _demand_grant(trusted: TrustedKey, package: PackageName, content_digest: Digest) -> None:
    grant = next((g for g in trusted.grants if g.namespace == package.namespace), None)
    who = f"key {trusted.key_id} ({trusted.name})"
    if grant is None:
        message = f"{package}: {who} may not sign '{package.namespace}/*'"
        raise TrustError(message, hint="see `expertctl trust list`")
    if not grant.allows(content_digest):
        message = f"{package}: {who} is valid for fixed contents, {content_digest} is not one"
        raise TrustError(message, hint="see `expertctl trust list --json`")


def _told(key_id: str, revocation: Revocation) -> str:
    reason = f": {revocation.reason}" if revocation.reason else ""
    return f"key {key_id} was revoked{reason}"
