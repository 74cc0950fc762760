"""Files derived from a base: quantised copies, the usage profile, and their garbage collection.

::

    bases/<name>/quantised/<scheme>-<version>    see `expertctl.store.quantised_file`
    bases/<name>/quality-<scheme>.json           mode 0600; see `QuantisationQuality`
    bases/<name>/habits.jsonl                    mode 0600; see `UsageProfileFile`

Losing one of them only costs time, so no run fails because of them. None is trusted unchecked: it
is used only when it belongs to this user and no other user may write it.

A quantised copy is stored only if its weights were hashed while they were packed and match the
base. The folder of the copies may be a link or a mount to another disk: they are written there,
too. A copy is read into the memory where it is used and checked there; where not all routed experts
fit into memory, each is read and checked when it is first needed. A copy with any fault counts as
absent and is written again; where it cannot be written, the user gets a note. A copy is never
changed in place: it is replaced or unlinked, so processes that have it open or mapped can go on.

The usage profile says how a base's routed experts are used. It is replaced as a whole while the
bases are locked: no change of another process is lost, and a killed process leaves the old file.
"""

import logging
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.errors import (
    ConflictError,
    DiskFullError,
    ExpertError,
    Notify,
    StoreError,
    ignore_notification,
)
from expertctl.files import open_staged_file, remove_leftovers, write_atomic
from expertctl.schema.validation import decode_json
from expertctl.settings import format_size
from expertctl.store.base_folder import check_private_folder, is_private_folder, list_copies
from expertctl.store.base_record import StoredBase, check_unchanged
from expertctl.store.bases import BaseStore
from expertctl.store.disk import disk_errors
from expertctl.store.quantised_file import (
    QuantisedFile,
    QuantisedLayout,
    QuantisedPiece,
    iterate_pieces,
    write_quantised,
)
from expertctl.store.store import Store

if TYPE_CHECKING:
    from expertctl.store.transaction import FreedFiles


LOG = logging.getLogger("expertctl.store")
MAX_PROFILE_BYTES = 32 << 20
_MAX_QUALITY_BYTES = 1 << 12
LOCK_SECONDS = 5.0
"""How long to wait for the lock at most; a usage profile is not worth a longer wait."""
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class UsageProfileFile:
    """The usage profile of one base, as bytes.

    Methods that write raise as `BaseStore.lock_base`.
    """

    bases: BaseStore
    base: StoredBase

    @property
    def path(self) -> Path:
        """The path of the file, whether it exists or not."""
        return self.bases.usage_profile_path(self.base)

    def read(self) -> bytes | None:
        """Return the content of the file; None where there is none.

        Raises:
            StoreError: when others may write it, or it is too large or cannot be read.
        """
        return _read_private(self.path, max_bytes=MAX_PROFILE_BYTES)

    def update(self, change: Callable[[bytes | None], bytes]) -> None:
        """Replace the content by ``change(content)``, where an absent or unreadable one is None."""
        with self.bases.lock_base(self.base, seconds=LOCK_SECONDS):
            remove_leftovers(self.path)
            data: bytes | None = None
            with suppress(StoreError):
                data = self.read()
            with disk_errors(self.path):
                write_atomic(self.path, change(data), mode=0o600)

    def remove(self) -> bool:
        """Remove the file; return whether there was one."""
        with self.bases.lock_base(self.base, seconds=LOCK_SECONDS), disk_errors(self.path):
            remove_leftovers(self.path)
            was_there = self.path.is_symlink() or self.path.exists()
            self.path.unlink(missing_ok=True)
            return was_there


def _read_private(path: Path, *, max_bytes: int) -> bytes | None:
    """Return the content of a file that only this user may write; None where there is none.

    Raises:
        StoreError: when others may write it, or it is too large or cannot be read.
    """
    with disk_errors(path):
        try:
            handle = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        try:
            _check_private(os.fstat(handle))
            with os.fdopen(handle, "rb", closefd=False) as stream:
                data = stream.read(max_bytes + 1)
        finally:
            os.close(handle)
    if len(data) > max_bytes:
        raise StoreError(f"{path} is larger than {max_bytes} bytes", hint=f"remove {path}")
    return data


def _check_private(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    if hasattr(os, "geteuid"):
        check_private_folder(found)


VERSION = 7
"""Raised whenever the same base gives other bytes, by another packing or layout."""
_WRITE_ERRORS = (ConflictError, DiskFullError, StoreError)
"""Why a copy is not stored, besides errors of the disk."""
LARGE_BYTES = 64 << 20
"""A smaller copy is written before the user could read a message about it."""


def open_quantised_cache(
    bases: BaseStore, base: StoredBase, *, notify: Notify = ignore_notification
) -> "QuantisedCache | None":
    """Return the cache of a base; ``notify`` gets a sentence before a large copy is written.

    None where a copy could not be trusted: the weights were not hashed, or the system does not say
    who may write a file.
    """
    safe = hasattr(os, "geteuid") and hasattr(os, "preadv")
    return QuantisedCache(bases, base, notify=notify) if safe and base.identity.weights else None


def list_outdated_copies(bases: BaseStore) -> tuple[Path, ...]:
    """Return the copies of all bases that are not of this version."""
    folders = (bases.copies_folder(base) for base in bases.list_bases())
    found = (
        path for folder in folders if is_private_folder(folder) for path in list_copies(folder)
    )
    return tuple(sorted(path for path in found if not _is_current_version(path)))


class QuantisationQuality(msgspec.Struct, frozen=True, kw_only=True):
    """How far the predictions of a base in integers are from those of its own weights."""

    kl: Annotated[float, msgspec.Meta(ge=0)]
    """The mean KL divergence, in nats."""
    predictions: Annotated[int, msgspec.Meta(ge=1)]
    """The number of tokens of the text that it was measured on."""


class _QualityRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file of a quality."""

    source: str
    """What was compared, and how; anything else is measured again."""
    quality: QuantisationQuality


class QuantisedCache:
    """The owner of the copies of one base whose weights have a digest, and of their quality."""

    def __init__(
        self, bases: BaseStore, base: StoredBase, *, notify: Notify = ignore_notification
    ) -> None:
        """Keep copies beside the record of a base; they are removed with it."""
        self._bases, self._base, self._notify = bases, base, notify
        self._notes: dict[str, str] = {}

    def open(self, scheme: str, shape: QuantisedLayout) -> QuantisedFile | None:
        """Open the copy in a scheme; None when there is none that can be trusted.

        An existing copy that is not used is noted, unless there is a note about this scheme
        already.
        """
        path = self.path(scheme)
        try:
            check_private_folder(path.parent.stat())
            copy = QuantisedFile.open(path, self._copy_source(scheme))
        except FileNotFoundError:
            LOG.debug("there is no quantised copy %s", path)
            return None
        except OSError as error:
            self._notes.setdefault(
                scheme, f"{path} is not used ({_os_error_reason(error)}): made again"
            )
            return None
        if copy is not None and copy.shape == shape:
            LOG.debug("the quantised copy %s is used", path)
            return copy
        self._notes.setdefault(scheme, _damage_note(path))
        if copy is not None:
            copy.close()
        return None

    def read(
        self,
        scheme: str,
        shape: QuantisedLayout,
        memory: memoryview,
        *,
        progress: Progress = ignore_progress,
    ) -> bool:
        """Read a copy into memory, or its rest only; False when there is none that can be trusted.

        After False the content of the memory is undefined.
        """
        copy = self.open(scheme, shape)
        if copy is None:
            return False
        with closing(copy):
            try:
                whole = copy.read_all(memory, progress=progress)
            except OSError as error:
                path = self.path(scheme)
                self._notes[scheme] = f"{path} is not used ({_os_error_reason(error)}): made again"
                return False
        if not whole:
            self._notes[scheme] = _damage_note(self.path(scheme))
        return whole

    def write(
        self, scheme: str, shape: QuantisedLayout, memory: memoryview, *, weights: Digest | None
    ) -> None:
        """Store a base that is in memory for the next time, or note why that is impossible.

        ``weights`` is the digest of the bytes that were packed, taken during packing: the files may
        have changed unnoticed since the base was added.

        Raises:
            BaseMismatchError: when it is not that of the base; nothing is kept.
        """
        self._check_weights(weights)
        self._write(scheme, shape, iterate_pieces(memory, shape), min_bytes=len(memory))

    def stream(
        self,
        scheme: str,
        shape: QuantisedLayout,
        pieces: Iterable[QuantisedPiece],
        *,
        weights: Callable[[], Digest],
        min_bytes: int = 0,
    ) -> None:
        """Store a base that comes in pieces; on a failure, note it and consume no more pieces.

        ``weights`` is called after the last piece; see `write`. ``min_bytes`` is a lower bound of
        the total size: where the disk has less room, no piece is consumed.

        Raises:
            BaseMismatchError: when it is not that of the base; nothing is kept.
        """

        def checked() -> Generator[QuantisedPiece]:
            yield from pieces
            self._check_weights(weights())

        self._write(scheme, shape, checked(), min_bytes=min_bytes)

    def read_quality(self, scheme: str, *, method: Digest) -> QuantisationQuality | None:
        """Return the quality of a scheme as a method measured it; None where it did not."""
        try:
            data = _read_private(self._quality_path(scheme), max_bytes=_MAX_QUALITY_BYTES)
            record = decode_json(data or b"", _QualityRecord)
        except (msgspec.MsgspecError, ExpertError):  # it can be measured again
            return None
        return record.quality if record.source == self._quality_source(scheme, method) else None

    def write_quality(self, scheme: str, quality: QuantisationQuality, *, method: Digest) -> None:
        """Keep the quality of a scheme with the base, or note why that is impossible.

        Raises:
            BaseMismatchError: when the files of the base are not those added, so that it is the
                quality of another base.
        """
        path = self._quality_path(scheme)
        record = _QualityRecord(self._quality_source(scheme, method), quality)
        self._bases.check(self._base)
        try:
            with self._bases.lock_base(self._base, seconds=LOCK_SECONDS), disk_errors(path):
                remove_leftovers(path)
                write_atomic(path, msgspec.json.encode(record) + b"\n", mode=0o600)
        except (*_WRITE_ERRORS, OSError) as error:
            reason = _os_error_reason(error) if isinstance(error, OSError) else error.message
            self._notes[f"quality {scheme}"] = (
                f"{path} cannot be written ({reason}): measured again next time"
            )

    def _quality_path(self, scheme: str) -> Path:
        return self._bases.quality_path(self._base, scheme)

    def _quality_source(self, scheme: str, method: Digest) -> str:
        tokenizer = self._base.identity.tokenizer
        return f"{self._copy_source(scheme)}, tokenizer {tokenizer}, by {method}"

    def discard_copy(self, scheme: str, copy: QuantisedFile, *, why: str) -> None:
        """Remove an open copy, so that it is written again the next time, and note why."""
        path = self.path(scheme)
        self._notes[scheme] = f"{path} is not used any more ({why}): made again next time"
        with suppress(OSError, *_WRITE_ERRORS):
            if os.path.samestat(path.lstat(), os.fstat(copy.handle)):
                self._bases.discard_copies([path], seconds=0)  # text generation waits for this

    @property
    def weights(self) -> Digest | None:
        """The digest of the weights that the copies are made of."""
        return self._base.identity.weights

    def note(self, scheme: str, text: str) -> None:
        """Add a note for the user about the copy in a scheme."""
        self._notes[scheme] = text

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes since the last call."""
        notes, self._notes = tuple(self._notes.values()), {}
        return notes

    def path(self, scheme: str) -> Path:
        """Return the path of the copy in a scheme."""
        return self._bases.copies_folder(self._base) / f"{scheme}-{VERSION}"

    def find_problems(self) -> dict[Path, str]:
        """Read every copy; return those that will not be used, and why."""
        found = {}
        for path in list_copies(self._bases.copies_folder(self._base)):
            if problem := self._find_problem(path):
                found[path] = problem
        return found

    def check_integrity(self) -> None:
        """Assert that every copy will be used."""
        assert not self.find_problems(), self.find_problems()

    def _find_problem(self, path: Path) -> str:
        if not is_private_folder(path.parent):
            return "others may write its folder, until you `chmod go-w` it"
        if not _is_current_version(path):
            return "another version of expertctl made it"
        try:
            copy = QuantisedFile.open(path, self._copy_source(path.name.rpartition("-")[0]))
            if copy is None:
                return "it is damaged"
            with closing(copy):
                return "" if copy.is_whole() else "it is damaged"
        except OSError as error:
            return _os_error_reason(error)

    def _write(
        self,
        scheme: str,
        shape: QuantisedLayout,
        pieces: Generator[QuantisedPiece],
        *,
        min_bytes: int,
    ) -> None:
        path = self.path(scheme)
        try:
            with self._bases.stage_copy(self._base) as folder, closing(pieces):
                _check_free_space(folder, min_bytes)
                self._announce_write(path, min_bytes)
                with open_staged_file(folder / path.name, mode=0o600) as write:
                    write_quantised(write, self._copy_source(scheme), shape, pieces)
                self._bases.place_copy(self._base, folder / path.name, path)
        except (*_WRITE_ERRORS, OSError) as error:
            reason = _os_error_reason(error) if isinstance(error, OSError) else error.message
            self._notes[scheme] = f"{path} cannot be written ({reason}): tried again next time"

    def _announce_write(self, path: Path, min_bytes: int) -> None:
        """Tell the user about a write that takes long and occupies the disk."""
        if min_bytes >= LARGE_BYTES:
            size, name = format_size(min_bytes), self._base.name
            self._notify(f"copying {name} for this machine, once: at least {size} to {path}")

    def _check_weights(self, weights: Digest | None) -> None:
        if weights != self.weights:
            problems = [f"its weights are {weights}, not {self.weights}"]
            check_unchanged(self._base.name, problems)

    def _copy_source(self, scheme: str) -> str:
        identity = self._base.identity
        return f"quantised copy {identity.arch} {identity.weights} {scheme} {VERSION}"


def _damage_note(path: Path) -> str:
    return f"{path} is damaged, or not of this base: made again"


def _check_free_space(folder: Path, size: int) -> None:
    """Refuse a write that cannot succeed before it fills the disk."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DiskFullError(f"it takes {format_size(size)}, and {format_size(free)} are free there")


def _os_error_reason(error: OSError) -> str:
    return error.strerror or str(error)


def _is_current_version(path: Path) -> bool:
    return path.name.rpartition("-")[2] == str(VERSION)


def collect_garbage(store: Store, bases: BaseStore) -> "FreedFiles":
    """Remove what `find_garbage` returns, from the store and from the bases.

    Raises:
        StoreError: when a record is damaged, or something cannot be written.
    """
    copies = list_outdated_copies(bases)
    with disk_errors(bases.folder):
        size = sum(map(_disk_usage, (*bases.find_garbage(), *copies)))
    freed = store.collect_garbage()
    folders = (*freed.folders, *bases.collect_garbage())
    if copies:
        bases.discard_copies(copies)
    return replace(freed, folders=folders, copies=copies, size=freed.size + size)


def find_garbage(store: Store, bases: BaseStore) -> "FreedFiles":
    """Return what nothing needs, in the store and with the bases; changes nothing.

    Raises:
        StoreError: when a record is damaged: what it needs cannot be told from garbage.
    """
    found = store.find_garbage()
    with disk_errors(bases.folder):
        folders, copies = bases.find_garbage(), list_outdated_copies(bases)
        size = found.size + sum(map(_disk_usage, (*folders, *copies)))
    return replace(found, folders=(*found.folders, *folders), copies=copies, size=size)


def _disk_usage(path: Path) -> int:
    """Return the size of a file, or of the files in a folder, without those that vanish."""
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    size = 0
    for each in (path, *inside):  # `os.walk` passes over a folder that is gone, `rglob` does not
        with suppress(FileNotFoundError):
            found = each.lstat()
            size += 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return size
