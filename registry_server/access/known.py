"""The identities that secrets stand for, remembered until anything is written.

Every request names a secret, and most come between two writes: then the last answer still holds.
Any commit, by any worker, forgets everything, so that a revoked token is dead at once. Identities
that expire carry their expiry. Secrets are remembered by their hash.
"""

import threading
import time
from dataclasses import dataclass, field

from registry_server.access import tokens
from registry_server.access.identity import Identity
from registry_server.access.sessions import PREFIX, SessionKey
from registry_server.database.connection import Database

MAX_KNOWN = 10_000


@dataclass(slots=True)
class KnownSecrets:
    """The identities of one state of the database."""

    database: Database
    sessions: SessionKey
    _version: int = -1
    _known: dict[str, Identity] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, secret: str) -> Identity | None:
        """Return the identity that a secret stands for now, None when there is none.

        Raises:
            StoreError: when the database cannot be read; no secret is believed then.
        """
        if not self._may_be_ours(secret):
            return None
        hashed = tokens.digest(secret)
        with self._lock:
            self._forget_when_written()
            found = self._known.get(hashed)
            if found is None and (found := self._read(secret)) is not None:
                self._known[hashed] = found
        ended = found is not None and found.expires is not None and found.expires <= time.time()
        return None if ended else found

    def has_ended(self, secret: str) -> bool:
        """Tell whether a secret that is not valid now was made by this registry.

        Raises:
            StoreError: when the database cannot be read.
        """
        if not self._may_be_ours(secret):
            return False
        if secret.startswith(PREFIX):
            return True
        with self.database.read() as connection:
            return tokens.was_minted(connection, secret)

    def _may_be_ours(self, secret: str) -> bool:
        """Tell, without the database, whether this registry may have made a secret."""
        is_session = secret.startswith(PREFIX)
        return self.sessions.made(secret) if is_session else tokens.is_well_formed(secret)

    def _forget_when_written(self) -> None:
        version = self.database.version()
        if version != self._version or len(self._known) >= MAX_KNOWN:
            self._known.clear()
            self._version = version

    def _read(self, secret: str) -> Identity | None:
        with self.database.read() as connection:
            if secret.startswith(PREFIX):
                return self.sessions.find(connection, secret)
            return tokens.find(connection, secret)
