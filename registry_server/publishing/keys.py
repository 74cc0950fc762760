"""The publisher keys of a namespace: owners add and revoke them; every index document says so.

The first key needs nobody's word: whoever installs from the namespace for the first time pins it.
Users who pinned an older key believe a later one when the older one vouches for it; without such a
statement they have to decide themselves. A revoked key stays revoked, and vouches for nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, insert, update

from expertctl.errors import BudgetError, NotFoundError, RevokedError
from expertctl.registry.key_statement import statement_signer
from expertctl.trust.keys import PublicKey
from registry_server.access import audit, rights
from registry_server.access.identity import Action, Identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import NAMESPACE_KEYS
from registry_server.publishing.index import rewrite_namespace
from registry_server.publishing.namespace_key import NamespaceKey, key_of, namespace_keys
from registry_server.publishing.yank import reason_of
from registry_server.registry import Registry

MAX_KEYS = 200
"""Of one namespace, revoked ones included: every index document holds them all."""


@dataclass(frozen=True, slots=True)
class AddedKey:
    """A key of the namespace, whether it was new or there before."""

    key_id: str
    vouched_by: str | None
    """The id of the older key whose statement is published with it."""
    warnings: tuple[str, ...]


def add_key(
    registry: Registry,
    identity: Identity,
    *,
    namespace: str,
    public_key: bytes,
    statement: bytes | None,
) -> AddedKey:
    """Let a key sign for a namespace; one that is there may get its statement now.

    Raises:
        InvalidPackageError: when it is not a public key of a kind that is used.
        RevokedError: when it was revoked here: that is for good.
        TrustError: when no key of the namespace signed the statement.
        BudgetError: when the namespace has too many keys.
    """
    key, now = PublicKey.from_pem(public_key), time.time()
    with registry.database.write() as connection:
        row = rights.authorise(connection, identity, Action.MANAGE, namespace)
        known = namespace_keys(connection, row.id)
        existing = key_of(known, key.key_id)
        _demand_usable(existing, key.key_id, row, known)
        signer = _vouching(statement, row, key, known)
        if existing is None or statement not in {None, existing.statement}:
            _store(connection, row, key, statement, existing, now)
            rewrite_namespace(connection, row, signer=registry.index_signer, now=now)
            audit.record(connection, identity, "keys.add", namespace, key.key_id)
        signer = signer or _vouched_before(existing, row, known)
    return AddedKey(key.key_id, signer, _warnings(signer, row, key.key_id, known))


def revoke_key(
    registry: Registry, identity: Identity, *, namespace: str, key_id: str, reason: str
) -> None:
    """Revoke a key for good; what it signed stays listed, and clients refuse it.

    Raises:
        UsageError: when the reason is empty, too long or not printable.
        NotFoundError: when the namespace has no such key.
    """
    text, now = reason_of(reason), time.time()
    with registry.database.write() as connection:
        row = rights.authorise(connection, identity, Action.MANAGE, namespace)
        existing = key_of(namespace_keys(connection, row.id), key_id)
        if existing is None:
            raise NotFoundError(f"{namespace} has no key {key_id[:80]}")
        if existing.revoked is not None:
            return
        connection.execute(
            update(NAMESPACE_KEYS)
            .where(NAMESPACE_KEYS.c.namespace_id == row.id, NAMESPACE_KEYS.c.key_id == key_id)
            .values(revoked=now, reason=text)
        )
        rewrite_namespace(connection, row, signer=registry.index_signer, now=now)
        audit.record(connection, identity, "keys.revoke", namespace, f"{key_id} {text}")


def _demand_usable(
    existing: NamespaceKey | None,
    key_id: str,
    namespace: NamespaceRow,
    known: Sequence[NamespaceKey],
) -> None:
    if existing is not None and existing.revoked is not None:
        raise RevokedError(
            f"key {key_id} was revoked in {namespace.name}: {existing.reason}",
            hint="make another with `expertctl keys new NAME`",
        )
    if existing is None and len(known) >= MAX_KEYS:
        raise BudgetError(f"{namespace.name} has {len(known)} keys, {MAX_KEYS} are allowed")


def _vouching(
    statement: bytes | None,
    namespace: NamespaceRow,
    key: PublicKey,
    known: Sequence[NamespaceKey],
) -> str | None:
    """Return the id of the key that vouches for ``key``."""
    if statement is None:
        return None
    older = [k.key for k in known if k.revoked is None and k.key_id != key.key_id]
    return statement_signer(statement, namespace=namespace.name, new=key, keys=older)


def _vouched_before(
    existing: NamespaceKey | None, namespace: NamespaceRow, known: Sequence[NamespaceKey]
) -> str | None:
    """Return the id of the key that vouches already, unless it was revoked since."""
    if existing is None or existing.statement is None:
        return None
    keys = [key.key for key in known]
    signer = statement_signer(
        existing.statement, namespace=namespace.name, new=existing.key, keys=keys
    )
    return signer if any(k.key_id == signer and k.revoked is None for k in known) else None


def _store(
    connection: Connection,
    namespace: NamespaceRow,
    key: PublicKey,
    statement: bytes | None,
    existing: NamespaceKey | None,
    now: float,
) -> None:
    columns = NAMESPACE_KEYS.c
    if existing is not None:
        where = (columns.namespace_id == namespace.id, columns.key_id == key.key_id)
        connection.execute(update(NAMESPACE_KEYS).where(*where).values(statement=statement))
        return
    row = {
        "namespace_id": namespace.id,
        "key_id": key.key_id,
        "public_key": key.pem().decode("ascii"),
        "statement": statement,
        "added": now,
    }
    connection.execute(insert(NAMESPACE_KEYS).values(row))


def _warnings(
    signer: str | None, namespace: NamespaceRow, key_id: str, known: Sequence[NamespaceKey]
) -> tuple[str, ...]:
    others = [key for key in known if key.key_id != key_id]
    if signer is not None or not others:
        return ()
    return (
        f"no older key of {namespace.name} vouches for {key_id}: whoever has pinned one is asked "
        f"for `expertctl trust add KEY.pem --namespace {namespace.name}`",
    )
