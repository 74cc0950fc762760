"""The bytes of ``trust.json`` (``schemas/trust.schema.json``), read strictly.

Fields that files lacked before registries were known have defaults, and defaults are not written:
so old files can be read, and a file without registries can be read by an older program.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from expertctl.errors import InvalidPackageError, TrustError
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import load_object
from expertctl.schema.validation import problems_of
from expertctl.trust.grant import Grant, KnownRegistry, Revocation, TrustedKey
from expertctl.trust.keys import PublicKey

SCHEMA = 1
MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TrustFile:
    """What the file holds."""

    keys: tuple[TrustedKey, ...]
    revoked: tuple[Revocation, ...]
    registries: tuple[KnownRegistry, ...]


def read_trust(data: bytes, *, what: str) -> TrustFile:
    """Read the bytes of ``trust.json``.

    Raises:
        InvalidPackageError: with every problem, when it is not exactly such a document.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    if problems := problems_of(document, "trust"):
        raise InvalidPackageError(what, problems)
    try:
        stored = shape(document, _Stored)
    except msgspec.ValidationError as error:  # 1.0 is an integer for JSON Schema, not for us
        raise InvalidPackageError(what, [str(error)]) from error
    file = TrustFile(
        tuple(_key(entry, what) for entry in stored.keys),
        tuple(Revocation(r.key_id, r.reason, r.registry, r.namespace) for r in stored.revoked),
        tuple(_registry(entry, what) for entry in stored.registries),
    )
    if problems := list(_inconsistencies(stored, file)):
        raise InvalidPackageError(what, problems)
    return file


def write_trust(file: TrustFile) -> bytes:
    """Return the bytes of ``trust.json``.

    Raises:
        TrustError: when they could not be read again.
    """
    stored = _Stored(
        SCHEMA,
        [_stored_key(trusted) for trusted in file.keys],
        [_StoredRevocation(r.key_id, r.reason, r.registry, r.namespace) for r in file.revoked],
        [_stored_registry(known) for known in file.registries],
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


class _Stored(msgspec.Struct, omit_defaults=True):
    schema: int
    keys: list[_StoredKey]
    revoked: list[_StoredRevocation]
    registries: list[_StoredRegistry] = []


def _key(entry: _StoredKey, what: str) -> TrustedKey:
    key = PublicKey.from_pem(entry.public_key.encode(), what=f"{what}: key {entry.name!r}")
    grants = (Grant(g.namespace, g.content_digests, g.registry) for g in entry.grants)
    return TrustedKey(key, entry.name, tuple(grants))


def _stored_key(trusted: TrustedKey) -> _StoredKey:
    grants = [_StoredGrant(g.namespace, g.content_digests, g.registry) for g in trusted.grants]
    return _StoredKey(trusted.key_id, trusted.name, trusted.key.pem().decode("ascii"), grants)


def _registry(entry: _StoredRegistry, what: str) -> KnownRegistry:
    key = PublicKey.from_pem(entry.index_key.encode(), what=f"{what}: registry {entry.host!r}")
    return KnownRegistry(entry.host, entry.url, key, entry.namespaces, entry.pinned)


def _stored_registry(known: KnownRegistry) -> _StoredRegistry:
    pem = known.index_key.pem().decode("ascii")
    return _StoredRegistry(known.host, known.url, pem, known.namespaces, known.pinned)


def _inconsistencies(stored: _Stored, file: TrustFile) -> Iterator[str]:
    """Yield what a schema cannot say."""
    for entry, trusted in zip(stored.keys, file.keys, strict=True):
        if entry.key_id != trusted.key_id:
            yield f"key {entry.name!r}: key_id is {entry.key_id}, its key has {trusted.key_id}"
        if len({grant.order for grant in trusted.grants}) != len(trusted.grants):
            yield f"key {entry.name!r}: two grants for one namespace"
    yield from _repeated("keys", (k.key_id for k in file.keys))
    yield from _repeated("revoked", (_scoped(r) for r in file.revoked))
    yield from _repeated("registries", (known.host for known in file.registries))
    meant = (name for known in file.registries for name in known.namespaces)
    yield from _repeated("namespaces of registries", meant)


def _scoped(revocation: Revocation) -> str:
    return " of ".join((revocation.key_id, *reversed(revocation.scope or ())))


def _repeated(what: str, names: Iterable[str]) -> Iterator[str]:
    counted = sorted(Counter(names).items())
    yield from (f"{what}: {name} is there twice" for name, count in counted if count > 1)
