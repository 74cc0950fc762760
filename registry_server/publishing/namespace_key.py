"""The publisher keys of a namespace, as the database knows them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from expertctl.trust.keys import PublicKey
from registry_server.database.tables import NAMESPACE_KEYS


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """One key that was registered; ``revoked`` is when it was, None when it counts."""

    key: PublicKey
    statement: bytes | None
    added: float
    revoked: float | None
    reason: str

    @property
    def key_id(self) -> str:
        """The id of the key."""
        return self.key.key_id


def namespace_keys(connection: Connection, namespace_id: int) -> tuple[NamespaceKey, ...]:
    """Return every key of a namespace, revoked ones too, in the order in which they came."""
    columns = NAMESPACE_KEYS.c
    rows = connection.execute(
        select(
            columns.public_key,
            columns.statement,
            columns.added,
            columns.revoked,
            columns.reason,
        )
        .where(columns.namespace_id == namespace_id)
        .order_by(columns.added, columns.key_id)
    )
    return tuple(
        NamespaceKey(PublicKey.from_pem(pem.encode()), statement, added, revoked, reason)
        for pem, statement, added, revoked, reason in rows
    )


def key_of(keys: Iterable[NamespaceKey], key_id: str) -> NamespaceKey | None:
    """Return the key with an id."""
    return next((key for key in keys if key.key_id == key_id), None)


def revocation_reason(signers: Sequence[str], keys: Iterable[NamespaceKey]) -> str | None:
    """Return why a version does not count any more; None while one of its signers still does.

    ``signers`` are the ids of the keys of its signed forms, the newest last.
    """
    revoked = {key.key_id: key.reason for key in keys if key.revoked is not None}
    return revoked[signers[-1]] if all(signer in revoked for signer in signers) else None
