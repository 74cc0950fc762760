"""`Catalogue`: what is installed, in the tables of ``index.db``, and the history beside it.

It may be deleted at any time: `rebuild` makes the table of experts again from the store, and the
history starts anew. A damaged file is moved aside, and `notes` says so. Where nothing can be
written, reading still works and uses are not recorded.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sqlite_utils import Database

from expertctl.digest import Digest
from expertctl.schema.manifest import Manifest
from expertctl.store.history import History, Usage
from expertctl.store.index_database import IndexDatabase, advance, immediately
from expertctl.store.ref import StoredExpert
from expertctl.store.success import SuccessRates


class Catalogue:
    """The owner of the table of experts; `history` owns the rest of the same file."""

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is read yet."""
        self.path = path
        self.database = IndexDatabase(path)
        self.history = History(self.database)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the file; grows."""
        return self.database.notes

    def add(self, expert: StoredExpert, manifest: Manifest) -> None:
        """Remember an expert.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        self.add_all([(expert, manifest)])

    def add_all(self, experts: Iterable[tuple[StoredExpert, Manifest]]) -> None:
        """Remember several experts by one write.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        rows = [_row(expert, manifest) for expert, manifest in experts]
        self._change(lambda db: db.table("experts").upsert_all(rows, pk="ref"))

    def remove(self, expert: StoredExpert) -> None:
        """Forget an expert; its history stays, should it come back.

        Raises:
            StoreError: when the file cannot be written.
        """
        self._change(lambda db: db.table("experts").delete_where("ref = ?", [expert.ref]))

    def rebuild(self, experts: Iterable[tuple[StoredExpert, Manifest]]) -> None:
        """Replace all experts; the history stays.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        rows = [_row(expert, manifest) for expert, manifest in experts]

        def replace(db: Database) -> None:
            db.table("experts").delete_where()
            db.table("experts").insert_all(rows, pk="ref")

        self._change(replace)

    def refs(self) -> list[str]:
        """Return the refs that are remembered, sorted."""
        rows = self.database.rows("experts", "SELECT ref FROM experts")
        return sorted(str(row["ref"]) for row in rows)

    def revision(self) -> int:
        """Return a number that changes with what a decision of the router may depend on here.

        That is: experts that come and go, judgements, failed runs and gains, by any process. It
        costs a few microseconds where nothing was written since it was asked for last.
        """
        return self.database.revision()

    def success_rates(self) -> SuccessRates:
        """Return the current success rates; looking one up does not read the file again."""
        return self.history.success_rates()

    def success_rate(self, content_digest: Digest, *, task: str | None = None) -> float | None:
        """Return how well an expert did of late at such tasks, 0 to 1; None: not known."""
        return self.success_rates().of(content_digest, task=task)

    def gains(self, *, base: str | None = None) -> Mapping[tuple[Digest, Digest], float]:
        """Return what chains of two experts surely gain over the better one of the two.

        A pair is (first, second) of the chain. With ``base`` only gains measured on it count.
        """
        return self.history.gains(base=base)

    def record_use(self, content_digest: Digest) -> bool:
        """Count one use; return False where the history cannot be written."""
        return self.history.count_use(content_digest)

    def usage(self, content_digest: Digest) -> Usage | None:
        """Return how often an expert was used; None when never."""
        return self.history.usages().get(content_digest)

    def problems(self) -> list[str]:
        """Return what is wrong with the file, without changing it."""
        return self.database.problems()

    def check_integrity(self) -> None:
        """Raise unless the file is whole and says what it must."""
        assert self.problems() == []

    def _change(self, action: Callable[[Database], object]) -> None:
        def change(db: Database) -> None:
            with immediately(db):
                action(db)
                advance(db)

        self.database.write(change)


def _row(expert: StoredExpert, manifest: Manifest) -> dict[str, object]:
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "name": str(expert.package),
        "version": str(expert.version),
        "description": manifest.description,
        "task": manifest.routing.task,
        "base": expert.base.name,
        "signer": expert.signer,
        "size": expert.size,
    }
