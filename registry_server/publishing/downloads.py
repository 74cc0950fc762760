"""How often a version was fetched: counted in memory, written now and then.

A counter that wrote to the database at each request would make readers wait for writers: so the
first fetch after a while is written at once, and those that follow are written together. What was
not written when the process is killed is lost, which is acceptable for statistics.
"""

import time
from collections import Counter
from collections.abc import Callable
from threading import Lock

from sqlalchemy import Connection, select, update

from registry_server.database.connection import Database
from registry_server.database.tables import NAMESPACES, PACKAGES, RELEASES, SIGNED_FORMS

MAX_PENDING = 1000
"""How many manifests are counted before all are written."""

SECONDS = 10.0
"""How long at least between two writes, while there are few."""

Fetched = tuple[str, str]
"""A repository and the package digest that was fetched from it."""


class DownloadCounts:
    """Fetches of manifests that the database does not know yet."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none."""
        self._pending: Counter[Fetched] = Counter()
        self._lock = Lock()
        self._clock = clock
        self._written: float | None = None

    def count(self, repository: str, digest: str) -> bool:
        """Count one fetch; tell whether it is time to `flush`."""
        with self._lock:
            self._pending[repository, digest] += 1
            return len(self._pending) >= MAX_PENDING or self._is_time()

    def flush(self, database: Database) -> None:
        """Write what was counted; when that fails it stays counted."""
        taken = self._take()
        try:
            if taken:
                with database.jot() as connection:
                    for (repository, digest), times in sorted(taken.items()):
                        _add(connection, repository, digest, times)
        except BaseException:
            with self._lock:
                self._pending.update(taken)
            raise

    def _is_time(self) -> bool:
        return self._written is None or self._clock() - self._written >= SECONDS

    def _take(self) -> Counter[Fetched]:
        with self._lock:
            self._written = self._clock()
            taken, self._pending = self._pending, Counter()
            return taken


def _add(connection: Connection, repository: str, digest: str, times: int) -> None:
    """Count fetches of packages; fetches of anything else are not downloads."""
    namespace, _, name = repository.partition("/")
    release = (
        select(SIGNED_FORMS.c.release_id)
        .join(RELEASES, RELEASES.c.id == SIGNED_FORMS.c.release_id)
        .join(PACKAGES, PACKAGES.c.id == RELEASES.c.package_id)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(NAMESPACES.c.name == namespace, PACKAGES.c.name == name)
        .where(SIGNED_FORMS.c.package_digest == digest)
    )
    connection.execute(
        update(RELEASES)
        .where(RELEASES.c.id.in_(release))
        .values(downloads=RELEASES.c.downloads + times)
    )
