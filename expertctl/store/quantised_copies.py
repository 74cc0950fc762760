"""`QuantisedCopies`: a base as it was quantised, for the next time; never believed unchecked.

::

    bases/<name>/quantised/<scheme>-<version>    a seal of 32 bytes, then the memory of the base

A copy is kept only of bytes that were hashed while they were quantised, and are those of the base.
The folder of the copies may be a link, or a mount, to another disk: they are written there, too.
The seal is a sha256 over what this is a copy of and the digests of its pieces. A copy is read once,
into the memory where it is used, and hashed there, in threads. Losing one costs time, nothing else:
whatever is odd about it counts as absent, then it is written anew; where it cannot be written, a
person is told and nothing more.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from expertctl.digest import Digest, Progress, no_progress
from expertctl.durable import staged_file
from expertctl.errors import ExpertError
from expertctl.store.base_files import refuse_changes
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.copies_folder import copies_in, demand_own, is_own

VERSION = 2
"""To be raised with whatever gives other bytes for the same base: quantising, or the layout."""
_SEAL_BYTES = 32
_PIECE = 4 << 20
_THREADS = 4
_HashPiece = Callable[[int, int], bytes]
"""From where a piece begins and its size to its digest."""


def copies_of(bases: BaseStore, base: StoredBase) -> "QuantisedCopies | None":
    """Return the owner of a base's copies.

    None where a copy could not be told from another: weights that nobody hashed, or a system that
    does not say who may write a file.
    """
    safe = hasattr(os, "geteuid") and hasattr(os, "preadv")
    return QuantisedCopies(bases, base) if safe and base.identity.weights else None


def outdated_copies(bases: BaseStore) -> tuple[Path, ...]:
    """Return what lies among the copies of every base and is none of this version's."""
    folders = (bases.copies_of(base) for base in bases.bases())
    found = (path for folder in folders if is_own(folder) for path in copies_in(folder))
    return tuple(sorted(path for path in found if not _is_of_this_version(path)))


class QuantisedCopies:
    """The owner of the copies of one base whose weights have a digest."""

    def __init__(self, bases: BaseStore, base: StoredBase) -> None:
        """Keep copies beside the record of a base; they go with it."""
        self._bases, self._base = bases, base
        self._notes: dict[str, str] = {}

    def read(self, scheme: str, memory: memoryview, *, progress: Progress = no_progress) -> bool:
        """Fill memory with the copy in a scheme; False when there is none that can be believed.

        Then anything may be in the memory.
        """
        path, size = self.path(scheme), len(memory)
        try:
            demand_own(path.parent.stat())
            with _opened(path) as handle:
                whole = self._is_whole(
                    handle,
                    scheme,
                    size,
                    lambda begin, count: _read(handle, begin, memory[begin : begin + count]),
                    progress,
                )
        except FileNotFoundError:
            return False
        except OSError as error:
            self._notes[scheme] = f"{path} is not used ({error.strerror or error}): made again"
            return False
        if not whole:
            self._notes[scheme] = f"{path} is damaged, or not of this base: made again"
        return whole

    def write(self, scheme: str, memory: memoryview, *, weights: Digest) -> None:
        """Keep a base for the next time, or note why that cannot be.

        ``weights`` is the digest of the bytes that were quantised, taken while that was done: the
        files may have become others since the base was added, unseen.

        Raises:
            BaseMismatchError: when it is not that of the base; nothing is kept.
        """
        if weights != self.weights:
            problems = [f"its weights are {weights}, not {self.weights}"]
            refuse_changes(self._base.name, problems)
        path = self.path(scheme)
        pieces = _digests(len(memory), lambda begin, count: _hash(memory[begin : begin + count]))
        seal = self._seal(scheme, len(memory), b"".join(pieces))
        try:
            with self._bases.staging(self._base) as folder:
                with staged_file(folder / path.name, mode=0o600) as write:
                    write(memoryview(seal))
                    write(memory)
                self._bases.keep(self._base, folder / path.name, path)
        except (ExpertError, OSError) as error:
            told = error.message if isinstance(error, ExpertError) else error.strerror or error
            self._notes[scheme] = f"{path} cannot be written ({told}): made again next time"

    @property
    def weights(self) -> Digest | None:
        """What the copies are of."""
        return self._base.identity.weights

    def take_notes(self) -> tuple[str, ...]:
        """Return what went wrong since the last call, for a person to know."""
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
        scheme = path.name.rpartition("-")[0]
        if not is_own(path.parent):
            return "others may write its folder, until you `chmod go-w` it"
        if not _is_of_this_version(path):
            return "another version of expertctl made it"
        try:
            with _opened(path) as handle:
                size = os.fstat(handle).st_size - _SEAL_BYTES
                whole = self._is_whole(
                    handle,
                    scheme,
                    size,
                    lambda begin, count: _read(handle, begin, memoryview(bytearray(count))),
                )
        except OSError as error:
            return error.strerror or str(error)
        return "" if whole else "it is damaged"

    def _is_whole(
        self,
        handle: int,
        scheme: str,
        size: int,
        hash_piece: _HashPiece,
        progress: Progress = no_progress,
    ) -> bool:
        if os.fstat(handle).st_size != _SEAL_BYTES + size:
            return False
        seal = os.pread(handle, _SEAL_BYTES, 0)
        digests = b"".join(_digests(size, hash_piece, progress))
        return seal == self._seal(scheme, size, digests)

    def _seal(self, scheme: str, size: int, digests: bytes) -> bytes:
        identity = self._base.identity
        of = f"quantised copy {identity.arch} {identity.weights} {scheme} {VERSION} {size}\n"
        return hashlib.sha256(of.encode() + digests).digest()


def _is_of_this_version(path: Path) -> bool:
    return path.name.rpartition("-")[2] == str(VERSION)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file that only this user writes.

    Raises:
        OSError: when it is not there, or not such a file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no file")
        demand_own(found)
        yield handle
    finally:
        os.close(handle)


def _digests(
    size: int, hash_piece: _HashPiece, progress: Progress = no_progress
) -> Iterator[bytes]:
    """Hash piece after piece, in threads: reading and hashing leave the interpreter free."""
    begins = range(0, size, _PIECE)
    sizes = [min(_PIECE, size - begin) for begin in begins]
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        for count, digest in zip(sizes, pool.map(hash_piece, begins, sizes), strict=True):
            progress(count)
            yield digest
    finally:
        pool.shutdown(cancel_futures=True)


def _read(handle: int, begin: int, piece: memoryview) -> bytes:
    """Fill a piece from a file and return its digest, taken where the piece is used."""
    done = 0
    while done < len(piece):
        count = os.preadv(handle, [piece[done:]], _SEAL_BYTES + begin + done)
        if not count:
            raise OSError("it is cut short")
        done += count
    return _hash(piece)


def _hash(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
