"""The index key: the file that signs every index document of this registry.

It is made once, by ``registry init``. A registry whose key is gone, damaged or another than the one
that signed so far publishes nothing: clients believe only the key whose fingerprint they pinned.
"""

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, select

from expertctl.errors import ExpertError, SignatureError, StoreError
from expertctl.registry.index_envelope import MAX_ENVELOPE, PAYLOAD_TYPE
from expertctl.trust.dsse import Envelope
from expertctl.trust.keys import KeyRing, PrivateKey
from registry_server.database.tables import PACKAGES
from registry_server.settings import DAY

_RESTORE = "put it back from a backup: clients have pinned this key and believe no other"


@dataclass(frozen=True, slots=True)
class IndexSigner:
    """What index documents are signed with, and the interval that they state."""

    key: PrivateKey
    interval_days: int

    @property
    def renewal_seconds(self) -> float:
        """The age from which on a document is signed again: half of the interval."""
        return self.interval_days * DAY / 2


def create_index_key(path: Path) -> PrivateKey:
    """Make the key of a new registry.

    Raises:
        UsageError: when there is a key already, which is never overwritten.
    """
    return KeyRing(path.parent).create(path.stem)


def load_index_key(path: Path) -> PrivateKey:
    """Read the key of a registry.

    Raises:
        StoreError: when it is missing, damaged, or others could read it.
    """
    try:
        return KeyRing(path.parent).private(path.stem)
    except ExpertError as error:
        message = f"the registry's index key cannot be used: {error.message}"
        raise StoreError(message, hint=error.hint if path.exists() else _RESTORE) from error
    except OSError as error:
        message = f"the registry's index key {path} cannot be read: {error.strerror}"
        raise StoreError(message, hint=_RESTORE) from error


def demand_index_key(path: Path, expected: str) -> None:
    """Demand that the key file is still there and is the one with this id.

    Raises:
        StoreError: when it is not.
    """
    found = load_index_key(path).public.key_id
    if found != expected:
        message = f"{path} holds the key {found}, but this registry signs with {expected}"
        raise StoreError(message, hint=_RESTORE)


def demand_same_signer(connection: Connection, key: PrivateKey) -> None:
    """Demand that this key signed what was published so far.

    Raises:
        StoreError: when another did.
    """
    query = select(PACKAGES.c.index_document).order_by(PACKAGES.c.id).limit(1)
    document = connection.execute(query).scalar_one_or_none()
    if document is None:
        return
    try:
        signed = Envelope.parse(
            document, payload_type=PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE, what="an index document"
        )
    except SignatureError as error:
        raise StoreError(f"the database is damaged: {error.message}") from error
    if signed.key_id != key.public.key_id:
        raise StoreError(
            f"the index key is {key.public.key_id}, but packages were signed by {signed.key_id}",
            hint=_RESTORE,
        )
