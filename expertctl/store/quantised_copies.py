"""`QuantisedCopies`: packed bases, kept for the next time; never believed unchecked.

::

    bases/<name>/quantised/<scheme>-<version>    see `copy_file`

A copy is kept only of bytes that were hashed while they were packed and match the base. The folder
of the copies may be a link, or a mount, to another disk: they are written there, too. A copy is
read into the memory where it is used, and checked there; where not all routed experts fit into
memory, each is read and checked when it is first needed. Losing a copy costs time, nothing else: a
copy with any fault counts as absent and is written anew; where it cannot be written, the user is
told and nothing more. A copy is never changed: another file replaces it, or it is unlinked, so
processes that have it open or mapped read on.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from pathlib import Path

from expertctl.digest import Digest, Progress, no_progress
from expertctl.durable import staged_file
from expertctl.errors import ConflictError, DiskFullError, StoreError
from expertctl.settings import human_size
from expertctl.store.base_files import refuse_changes
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.copies_folder import copies_in, demand_own, is_own
from expertctl.store.copy_file import CopyFile, CopyShape, Piece, pieces_in, write_copy
from expertctl.telling import Tell, tell_nobody

VERSION = 4
"""Raised whenever the same base gives other bytes, by another packing or layout."""
_UNKEPT = (ConflictError, DiskFullError, StoreError)
"""Why a copy is not kept, besides errors of the disk."""
_LARGE = 64 << 20
"""A smaller copy is written before the user could read a message about it."""


def copies_of(
    bases: BaseStore, base: StoredBase, *, tell: Tell = tell_nobody
) -> "QuantisedCopies | None":
    """Return the owner of a base's copies; ``tell`` gets a sentence when a large one is begun.

    None where a copy could not be trusted: the weights were not hashed, or the system does not say
    who may write a file.
    """
    safe = hasattr(os, "geteuid") and hasattr(os, "preadv")
    return QuantisedCopies(bases, base, tell=tell) if safe and base.identity.weights else None


def outdated_copies(bases: BaseStore) -> tuple[Path, ...]:
    """Return the copies of all bases that are not of this version."""
    folders = (bases.copies_of(base) for base in bases.bases())
    found = (path for folder in folders if is_own(folder) for path in copies_in(folder))
    return tuple(sorted(path for path in found if not _is_of_this_version(path)))


class QuantisedCopies:
    """The owner of the copies of one base whose weights have a digest."""

    def __init__(self, bases: BaseStore, base: StoredBase, *, tell: Tell = tell_nobody) -> None:
        """Keep copies beside the record of a base; they are removed with it."""
        self._bases, self._base, self._tell = bases, base, tell
        self._notes: dict[str, str] = {}

    def open(self, scheme: str, shape: CopyShape) -> CopyFile | None:
        """Open the copy in a scheme; None when there is none that can be trusted.

        A copy that is there and not used is noted, unless a note about this scheme is kept already.
        """
        path = self.path(scheme)
        try:
            demand_own(path.parent.stat())
            copy = CopyFile.open(path, self._of(scheme))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._notes.setdefault(scheme, f"{path} is not used ({_reason(error)}): made again")
            return None
        if copy is not None and copy.shape == shape:
            return copy
        self._notes.setdefault(scheme, _damaged(path))
        if copy is not None:
            copy.close()
        return None

    def read(
        self, scheme: str, shape: CopyShape, memory: memoryview, *, progress: Progress = no_progress
    ) -> bool:
        """Fill memory with a copy, or with its rest; False when there is none that can be trusted.

        After False the content of the memory is undefined.
        """
        copy = self.open(scheme, shape)
        if copy is None:
            return False
        with closing(copy):
            try:
                whole = copy.fill_all(memory, progress=progress)
            except OSError as error:
                path = self.path(scheme)
                self._notes[scheme] = f"{path} is not used ({_reason(error)}): made again"
                return False
        if not whole:
            self._notes[scheme] = _damaged(self.path(scheme))
        return whole

    def write(
        self, scheme: str, shape: CopyShape, memory: memoryview, *, weights: Digest | None
    ) -> None:
        """Keep a base that is in memory for the next time, or note why that cannot be.

        ``weights`` is the digest of the bytes that were packed, taken during packing: the files may
        have changed unnoticed since the base was added.

        Raises:
            BaseMismatchError: when it is not that of the base; nothing is kept.
        """
        self._demand(weights)
        self._write(scheme, shape, pieces_in(memory, shape), least=len(memory))

    def stream(
        self,
        scheme: str,
        shape: CopyShape,
        pieces: Iterable[Piece],
        *,
        weights: Callable[[], Digest],
        least: int = 0,
    ) -> None:
        """Keep a base that comes in pieces; where that fails, note why and take no more pieces.

        ``weights`` is called after the last piece; see `write`. ``least`` is the least number of
        bytes of all pieces: where the disk has less room, no piece is taken.

        Raises:
            BaseMismatchError: when it is not that of the base; nothing is kept.
        """

        def checked() -> Generator[Piece]:
            yield from pieces
            self._demand(weights())

        self._write(scheme, shape, checked(), least=least)

    def give_up(self, scheme: str, copy: CopyFile, *, why: str) -> None:
        """Remove an open copy, so that it is made again the next time; note why."""
        path = self.path(scheme)
        self._notes[scheme] = f"{path} is not used any more ({why}): made again next time"
        with suppress(OSError, *_UNKEPT):
            if os.path.samestat(path.lstat(), os.fstat(copy.handle)):
                self._bases.discard([path], seconds=0)  # text generation waits for this

    @property
    def weights(self) -> Digest | None:
        """The digest of the weights that the copies are made of."""
        return self._base.identity.weights

    def note(self, scheme: str, text: str) -> None:
        """Note something about the copy in a scheme, for the user."""
        self._notes[scheme] = text

    def take_notes(self) -> tuple[str, ...]:
        """Return what went wrong since the last call, for the user."""
        notes, self._notes = tuple(self._notes.values()), {}
        return notes

    def path(self, scheme: str) -> Path:
        """Where the copy in a scheme is, if there is one."""
        return self._bases.copies_of(self._base) / f"{scheme}-{VERSION}"

    def problems(self) -> dict[Path, str]:
        """Read every copy; return those that will not be used, and why."""
        found = {}
        for path in copies_in(self._bases.copies_of(self._base)):
            if problem := self._problem(path):
                found[path] = problem
        return found

    def check_integrity(self) -> None:
        """Assert that every copy will be used."""
        assert not self.problems(), self.problems()

    def _problem(self, path: Path) -> str:
        if not is_own(path.parent):
            return "others may write its folder, until you `chmod go-w` it"
        if not _is_of_this_version(path):
            return "another version of expertctl made it"
        try:
            copy = CopyFile.open(path, self._of(path.name.rpartition("-")[0]))
            if copy is None:
                return "it is damaged"
            with closing(copy):
                return "" if copy.is_whole() else "it is damaged"
        except OSError as error:
            return _reason(error)

    def _write(
        self, scheme: str, shape: CopyShape, pieces: Generator[Piece], *, least: int
    ) -> None:
        path = self.path(scheme)
        try:
            with self._bases.staging(self._base) as folder, closing(pieces):
                _demand_room(folder, least)
                self._tell_begun(path, least)
                with staged_file(folder / path.name, mode=0o600) as write:
                    write_copy(write, self._of(scheme), shape, pieces)
                self._bases.keep(self._base, folder / path.name, path)
        except (*_UNKEPT, OSError) as error:
            told = _reason(error) if isinstance(error, OSError) else error.message
            self._notes[scheme] = f"{path} cannot be written ({told}): tried again next time"

    def _tell_begun(self, path: Path, least: int) -> None:
        """Tell the user what takes a while and stays on the disk."""
        if least >= _LARGE:
            size, name = human_size(least), self._base.name
            self._tell(f"copying {name} for this machine, once: at least {size} to {path}")

    def _demand(self, weights: Digest | None) -> None:
        if weights != self.weights:
            problems = [f"its weights are {weights}, not {self.weights}"]
            refuse_changes(self._base.name, problems)

    def _of(self, scheme: str) -> str:
        identity = self._base.identity
        return f"quantised copy {identity.arch} {identity.weights} {scheme} {VERSION}"


def _damaged(path: Path) -> str:
    return f"{path} is damaged, or not of this base: made again"


def _demand_room(folder: Path, size: int) -> None:
    """Refuse early, before a disk that is needed for other things is filled for nothing."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DiskFullError(f"it takes {human_size(size)}, and {human_size(free)} are free there")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _is_of_this_version(path: Path) -> bool:
    return path.name.rpartition("-")[2] == str(VERSION)
