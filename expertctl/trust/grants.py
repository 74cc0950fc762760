"""The content of ``trust.json``: keys with their grants, revocations, and known registries.

A grant without a registry was given by the user and applies wherever a package comes from. A grant
with one was pinned from that registry's index and applies to packages from there only; so does a
revocation with one.

The bytes (``schemas/trust.schema.json``) are read strictly. Fields that files lacked before
registries were known have defaults, and defaults are not written: so old files can be read, and
older programs can read a file without registries.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError, TrustError, UsageError
from expertctl.reference import NAME_PATTERN
from expertctl.schema.strict_json import load_object
from expertctl.schema.validation import convert_document, find_problems
from expertctl.trust.keys import MAX_NAME, PublicKey

_NAMESPACE = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to sign one namespace; ``content_digests`` limits it, None does not."""

    namespace: str
    content_digests: tuple[str, ...] | None = None
    registry: str | None = None
    """The host from whose index it was pinned; None: given by the user, applies everywhere."""

    @property
    def sort_key(self) -> tuple[str, str]:
        """Namespace and registry; a key has one grant for each pair."""
        return self.namespace, self.registry or ""

    def union(self, other: "Grant") -> "Grant":
        """Return the wider of two grants for one namespace."""
        if self.content_digests is None or other.content_digests is None:
            return replace(self, content_digests=None)
        both = {*self.content_digests, *other.content_digests}
        return replace(self, content_digests=tuple(sorted(both)))

    def allows(self, content_digest: Digest) -> bool:
        """Tell whether this content may be signed."""
        return self.content_digests is None or str(content_digest) in self.content_digests

    def covers(self, namespace: str, hosts: Collection[str]) -> bool:
        """Tell whether it applies to a namespace where these hosts are the authorities."""
        return self.namespace == namespace and (self.registry is None or self.registry in hosts)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key, the user's name for it, and what it may sign."""

    key: PublicKey
    name: str
    grants: tuple[Grant, ...]

    @property
    def key_id(self) -> str:
        """The id of the key."""
        return self.key.key_id

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that the key may sign, wholly or in part, each once."""
        return tuple(dict.fromkeys(grant.namespace for grant in self.grants))

    def merge(self, other: "TrustedKey") -> "TrustedKey":
        """Return this key with the grants of both, under the newer name."""
        grants = {grant.sort_key: grant for grant in self.grants}
        for grant in other.grants:
            mine = grants.get(grant.sort_key)
            grants[grant.sort_key] = mine.union(grant) if mine else grant
        return replace(other, grants=tuple(sorted(grants.values(), key=lambda g: g.sort_key)))

    def without_registry(self, registry: str) -> "TrustedKey":
        """Return this key without the grants pinned from a registry."""
        return replace(self, grants=tuple(g for g in self.grants if g.registry != registry))


@dataclass(frozen=True, slots=True)
class Revocation:
    """A key that can never again authorise anything, and why.

    With a registry and a namespace it applies only to packages of that namespace from there.
    """

    key_id: str
    reason: str
    registry: str | None = None
    namespace: str | None = None

    @property
    def scope(self) -> tuple[str, str] | None:
        """Registry and namespace; None for a total revocation."""
        return None if self.registry is None else (self.registry, self.namespace or "")


@dataclass(frozen=True, slots=True)
class KnownRegistry:
    """A registry whose index key the user accepted."""

    host: str
    url: str
    index_key: PublicKey
    namespaces: tuple[str, ...] = ()
    """Namespaces that the user assigned to this registry."""
    pinned: tuple[str, ...] = ()
    """Namespaces whose publisher keys were pinned from its index."""


def parse_namespace(text: str) -> str:
    """Return the namespace that ``acme`` or ``acme/*`` names.

    Raises:
        UsageError: for anything else; no pattern covers more than one namespace.
    """
    name = text.removesuffix("/*")
    if len(name) <= MAX_NAME and _NAMESPACE.fullmatch(name):
        return name
    hint = "a namespace is the part before the slash: `acme` (or `acme/*`) for acme/sql"
    raise UsageError(f"{text[:80]!r} is not a namespace", hint=hint)


def make_grants(
    namespaces: Iterable[str], content_digests: Sequence[str] | None, *, registry: str | None = None
) -> tuple[Grant, ...]:
    """Return one grant for each namespace, all with the same limits.

    Raises:
        UsageError: when there is no namespace, a bad one, or an empty list of contents.
        DigestError: when a content is not named by a digest.
    """
    names = sorted({parse_namespace(text) for text in namespaces})
    if not names:
        raise UsageError("a key is trusted for a namespace", hint="add `--namespace NAME`")
    if content_digests is None:
        return tuple(Grant(name, None, registry) for name in names)
    limits = tuple(sorted({str(Digest.parse(text)) for text in content_digests}))
    if not limits:
        raise UsageError("a key limited to no content at all could sign nothing")
    return tuple(Grant(name, limits, registry) for name in names)


TRUST_SCHEMA = 1
MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TrustFileContent:
    """The parsed content of the file."""

    keys: tuple[TrustedKey, ...]
    revoked: tuple[Revocation, ...]
    registries: tuple[KnownRegistry, ...]


def parse_trust(data: bytes, *, what: str) -> TrustFileContent:
    """Parse the bytes of ``trust.json``.

    Raises:
        InvalidPackageError: with every problem, when they are not exactly such a document.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    if problems := find_problems(document, "trust"):
        raise InvalidPackageError(what, problems)
    try:
        stored = convert_document(document, _StoredTrust)
    except msgspec.ValidationError as error:  # 1.0 is an integer for JSON Schema, not for us
        raise InvalidPackageError(what, [str(error)]) from error
    file = TrustFileContent(
        tuple(_parse_key(entry, what) for entry in stored.keys),
        tuple(Revocation(r.key_id, r.reason, r.registry, r.namespace) for r in stored.revoked),
        tuple(_parse_registry(entry, what) for entry in stored.registries),
    )
    if problems := list(_find_inconsistencies(stored, file)):
        raise InvalidPackageError(what, problems)
    return file


def encode_trust(file: TrustFileContent) -> bytes:
    """Return the bytes of ``trust.json``.

    Raises:
        TrustError: when they could not be read again.
    """
    stored = _StoredTrust(
        TRUST_SCHEMA,
        [_store_key(trusted) for trusted in file.keys],
        [_StoredRevocation(r.key_id, r.reason, r.registry, r.namespace) for r in file.revoked],
        [_store_registry(known) for known in file.registries],
    )
    data = json.dumps(msgspec.to_builtins(stored), indent=2).encode() + b"\n"
    if len(data) > MAX_BYTES:
        hint = "see `expertctl trust list`: a registry may list too many keys"
        raise TrustError(f"what is trusted and revoked fills {MAX_BYTES:,} bytes", hint=hint)
    return data


class _StoredGrant(msgspec.Struct, omit_defaults=True):
    namespace: str
    content_digests: tuple[str, ...] | None
    registry: str | None = None


class _StoredKey(msgspec.Struct):
    key_id: str
    name: str
    public_key: str
    grants: list[_StoredGrant]


class _StoredRevocation(msgspec.Struct, omit_defaults=True):
    key_id: str
    reason: str
    registry: str | None = None
    namespace: str | None = None


class _StoredRegistry(msgspec.Struct):
    host: str
    url: str
    index_key: str
    namespaces: tuple[str, ...]
    pinned: tuple[str, ...]


class _StoredTrust(msgspec.Struct, omit_defaults=True):
    schema: int
    keys: list[_StoredKey]
    revoked: list[_StoredRevocation]
    registries: list[_StoredRegistry] = []


def _parse_key(entry: _StoredKey, what: str) -> TrustedKey:
    key = PublicKey.from_pem(entry.public_key.encode(), what=f"{what}: key {entry.name!r}")
    grants = (Grant(g.namespace, g.content_digests, g.registry) for g in entry.grants)
    return TrustedKey(key, entry.name, tuple(grants))


def _store_key(trusted: TrustedKey) -> _StoredKey:
    grants = [_StoredGrant(g.namespace, g.content_digests, g.registry) for g in trusted.grants]
    return _StoredKey(trusted.key_id, trusted.name, trusted.key.pem().decode("ascii"), grants)


def _parse_registry(entry: _StoredRegistry, what: str) -> KnownRegistry:
    key = PublicKey.from_pem(entry.index_key.encode(), what=f"{what}: registry {entry.host!r}")
    return KnownRegistry(entry.host, entry.url, key, entry.namespaces, entry.pinned)


def _store_registry(known: KnownRegistry) -> _StoredRegistry:
    pem = known.index_key.pem().decode("ascii")
    return _StoredRegistry(known.host, known.url, pem, known.namespaces, known.pinned)


def _find_inconsistencies(stored: _StoredTrust, file: TrustFileContent) -> Iterator[str]:
    """Yield the problems that the JSON schema cannot express."""
    for entry, trusted in zip(stored.keys, file.keys, strict=True):
        if entry.key_id != trusted.key_id:
            yield f"key {entry.name!r}: key_id is {entry.key_id}, its key has {trusted.key_id}"
        if len({grant.sort_key for grant in trusted.grants}) != len(trusted.grants):
            yield f"key {entry.name!r}: two grants for one namespace"
    yield from find_repeated("keys", (k.key_id for k in file.keys))
    yield from find_repeated("revoked", (_describe_scope(r) for r in file.revoked))
    yield from find_repeated("registries", (known.host for known in file.registries))
    meant = (name for known in file.registries for name in known.namespaces)
    yield from find_repeated("namespaces of registries", meant)


def _describe_scope(revocation: Revocation) -> str:
    return " of ".join((revocation.key_id, *reversed(revocation.scope or ())))


def find_repeated(what: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each name that occurs more than once, sorted by name."""
    counted = sorted(Counter(names).items())
    yield from (f"{what}: {name} is there twice" for name, count in counted if count > 1)
