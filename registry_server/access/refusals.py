"""Audit rows of what was refused: failed logins, and changes that were not allowed or not possible.

A refusal costs whoever causes it nothing, so the rows are bounded: one a minute for the same thing
from the same place, and `PER_MINUTE` of each kind, so that failed logins, which anybody can cause,
hide no refused change. What is not written is counted, and the next row says how many there were.
They are written after the answer, without waiting for the disk.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from expertctl.errors import DiskFullError, StoreError
from expertctl.http.rates import Rates
from registry_server.access import audit
from registry_server.access.identity import Identity
from registry_server.access.login_failures import beginning
from registry_server.database.connection import Database

LOGIN = "login.refused"
CHANGE = "change.refused"
PER_MINUTE = 20
"""Of each kind, `LOGIN` and `CHANGE`, by one process."""
_CHANGING = {"PUT", "POST", "PATCH", "DELETE"}
_PART_OF_A_TALK = {401, 408, 416, 421, 429}
"""Statuses that clients meet on their way: a challenge, a wrong offset, a limit, a broken body."""
_DISK_FULL = 507


class Refusals:
    """Writes down what was refused; its methods block, so async code calls them in threads."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        """Begin with nothing refused."""
        self._database = database
        self._alike = Rates(1, clock)
        self._of_kind = Rates(PER_MINUTE, clock)
        self._unwritten = 0
        self._counting = threading.Lock()

    def login(self, address: str, secret: str | None) -> None:
        """Write down that a secret was refused; of the secret, only its beginning."""
        target = beginning(secret) or "not a token of this registry"
        self._write(Identity(address=address), LOGIN, target, "")

    def change(self, identity: Identity, *, method: str, path: str, status: int) -> None:
        """Write down that somebody known could not make a change."""
        if is_refused_change(method, status) and identity.token_id is not None:
            self._write(identity, CHANGE, path, f"{method}: {status}")

    def _write(self, identity: Identity, action: str, target: str, detail: str) -> None:
        who = identity.token_id or identity.address
        with self._counting:
            alike = f"{who} {action} {target} {detail}"
            if self._of_kind.wait(action) or self._alike.take(alike):  # bounds what is remembered
                self._unwritten += 1
                return
            self._of_kind.take(action)
            unwritten, self._unwritten = self._unwritten, 0
        more = f"{unwritten} refusals before this one were not written down" if unwritten else ""
        text = "; ".join(part for part in (detail, more) if part)
        with suppress(StoreError, DiskFullError), self._database.jot() as connection:
            audit.record(connection, identity, action, target, text)


def is_refused_change(method: str, status: int) -> bool:
    """Tell whether an answer refuses a change."""
    refused = 400 <= status < 500 and status not in _PART_OF_A_TALK
    return method in _CHANGING and (refused or status == _DISK_FULL)
