"""Whether the registry can do its work: looked at when asked, and named when it cannot.

Nothing here trusts an earlier answer: a disk that went away or filled is seen at the next look.
"""

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select

from expertctl.errors import ExpertError
from registry_server.database.tables import USERS
from registry_server.publishing.index_key import demand_index_key
from registry_server.registry import Registry


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; ``problem`` is for the log, it may hold paths."""

    name: str
    fact: str
    problem: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.problem is None


def look(registry: Registry) -> tuple[Check, ...]:
    """Look at everything that a publish needs."""
    return tuple(
        _checked(name, fact, probe, registry)
        for name, fact, probe in (
            ("database", "the database cannot be written", _write_database),
            ("storage", "blobs cannot be written", _write_storage),
            ("space", "there is too little free space", _demand_space),
            ("index_key", "the index key cannot be used", _read_index_key),
        )
    )


def _checked(
    name: str, fact: str, probe: Callable[[Registry], str | None], registry: Registry
) -> Check:
    try:
        return Check(name, fact, probe(registry))
    except ExpertError as error:
        return Check(name, fact, error.message)
    except OSError as error:
        return Check(name, fact, str(error))


def _write_database(registry: Registry) -> None:
    """Take the write lock and read a row, on the file that is there now."""
    if not registry.settings.database.exists():
        raise FileNotFoundError("the file of the database is gone")
    with registry.database.write() as connection:
        connection.execute(select(USERS.c.id).limit(1)).all()


def _write_storage(registry: Registry) -> None:
    """Write and flush a byte in each folder; a folder that is gone is not made again."""
    for folder in (registry.settings.uploads, registry.settings.blobs):
        probe = folder / f".probe-{secrets.token_hex(8)}"
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)
            probe.unlink(missing_ok=True)


def _demand_space(registry: Registry) -> str | None:
    free = shutil.disk_usage(registry.settings.data).free
    floor = registry.settings.limits.free_bytes
    return None if free >= floor else f"{free} bytes are free, {floor} must be"


def _read_index_key(registry: Registry) -> None:
    demand_index_key(registry.settings.index_key, registry.index_key.public.key_id)
