"""Models of a hub in the cache of its client: what is there, and downloads of the rest.

The cache is that of ``huggingface_hub``, so a file is stored once, whichever program downloaded it.
Files are received by this module, because the client deletes what a killed download has left: an
unfinished one stays as ``blobs/<etag>.incomplete``, and the next attempt asks for the rest of it.
No file gets its name before its size and its digest are those that the hub listed.
"""

import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import READ_CHUNK, Digest, Progress
from expertctl.errors import (
    DigestError,
    DiskFullError,
    ExpertError,
    RegistryError,
    StoreError,
    UnreachableError,
)
from expertctl.files import (
    NO_SPACE_ERRORS,
    make_folders,
    open_staged_file,
    publish_file,
    write_atomic,
)
from expertctl.install.hub_connection import CHANGED_HINT, RESUME_HINT, HubConnection
from expertctl.install.hub_files import (
    ENDPOINT_HINT,
    HubFile,
    HubListing,
    HubName,
    is_commit,
    match_weights,
    require_one_form,
)
from expertctl.package.base_model import read_base_config
from expertctl.package.base_tensors import INDEX_FILE
from expertctl.package.config_document import CONFIG_FILE
from expertctl.routing.encoder import find_hub_cache
from expertctl.settings import format_size
from expertctl.store.base_record import COPIED_GGUF, OPTIONAL_FILES, list_base_files
from expertctl.store.disk import disk_errors
from expertctl.store.locks import exclusive_lock

_PAUSES = (0.2, 0.4, 0.8, 1.6)
"""Seconds before each further attempt, while none brings a byte."""
_LOCK_SECONDS = 2.0
"""After which it is said that another process downloads the same file."""
_LONG_LOCK_SECONDS = 6 * 3600.0
_CACHE_HINT = "free some space, or set HF_HOME to a folder of your own, on another disk"
_NO_FILES = ".no_exist"
"""The folder in which the client of the hub notes which files a commit lacks."""
_OBJECT_NAME = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_LFS_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubCache:
    """The models of one hub on this machine.

    Methods that download raise what `HubConnection` raises, and `DiskFullError` and `StoreError`
    for the disk.
    """

    folder: Path
    connection: HubConnection

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, is_offline: bool) -> "HubCache":
        """Return the cache that the variables of ``huggingface_hub`` describe."""
        connection = HubConnection.from_environment(environment, is_offline=is_offline)
        return cls(find_hub_cache(environment), connection)

    def find_cached(self, name: HubName) -> Path | None:
        """Return the folder of a revision that the cache has; nothing is sent."""
        folder = self._repository(name)
        commit = name.wanted_revision
        if not is_commit(commit):
            with suppress(OSError, UnicodeDecodeError):
                commit = (folder / "refs" / commit).read_text(encoding="ascii").strip()
        snapshot = folder / "snapshots" / commit
        return snapshot if is_commit(commit) and snapshot.is_dir() else None

    def find_complete(self, name: HubName, pattern: str | None = None) -> Path | None:
        """Return the folder of a revision if the cache has every file of a base in it.

        With a pattern for GGUF files, return the only such file that the cache has.

        Raises:
            ExpertError: when the pattern matches more than one form of the weights.
        """
        snapshot = self.find_cached(name)
        if snapshot is None:
            return None
        matched = None if pattern is None else _match_cached(snapshot, pattern)
        if matched == [] or (matched and matched[0].endswith(".gguf")):
            return snapshot / matched[0] if matched else None
        with suppress(ExpertError, OSError):
            files = list_base_files(snapshot)
            weights = [name for name in files if name.endswith(".safetensors")]
            return snapshot if matched in (None, weights) else None
        return None

    def list_unknown(self, snapshot: Path) -> list[str]:
        """Return the optional files of a base of which the cache does not tell whether they exist.

        Another program may have downloaded only what it needed.
        """
        if snapshot.is_file():
            return []
        lacking = snapshot.parent.parent / _NO_FILES / snapshot.name
        names = [name for name in OPTIONAL_FILES if name != INDEX_FILE]
        return [n for n in names if not (snapshot / n).is_file() and not (lacking / n).exists()]

    def count_missing(self, listing: HubListing, files: tuple[HubFile, ...]) -> int:
        """Return how many bytes of these files must be downloaded."""
        missing = (file for file in files if not self._path(listing, file).is_file())
        return sum(file.size - self._count_partial(listing, file) for file in missing)

    def require_space(
        self, listing: HubListing, files: tuple[HubFile, ...], *, copy_to: Path | None = None
    ) -> None:
        """Require the space for what is missing, and for a copy of all files in a folder.

        Raises:
            DiskFullError: when a disk has less.
        """
        needed = self.count_missing(listing, files)
        copied = sum(file.size for file in files) if copy_to is not None else 0
        hint = "free some space, or set HF_HOME to a folder on another disk"
        if copy_to is not None and not _is_same_disk(self.folder, copy_to):
            home_hint = "free some space, or leave out --copy"
            _require_free(copy_to, copied, f"a copy of {listing.name}", hint=home_hint)
            copied = 0
        what = f"{listing.name} with its copy" if copied else str(listing.name)
        _require_free(self.folder, needed + copied, what, hint=hint)

    def download(
        self,
        listing: HubListing,
        files: tuple[HubFile, ...],
        *,
        progress: Progress,
        notify: Callable[[str], None],
    ) -> Path:
        """Download what the cache lacks of these files; return the folder of the commit.

        The configuration comes first, so that weights are downloaded only for a base that some
        engine runs. ``progress`` gets the bytes received, ``notify`` what a user should know.

        Raises:
            DigestError: when a file is not the one that the hub listed.
            IncompatibleError: when no engine runs such a base.
        """
        snapshot = self._snapshot(listing)
        for file in files:
            if not self._path(listing, file).is_file():
                self._download_file(listing, file, progress, notify)
            self._check_git_file(listing, file)
            if file.name == CONFIG_FILE:
                read_base_config(snapshot)
        try:
            self._record_listing(listing)
        except OSError as error:
            notify(f"warning: the cache of the hub was not updated: {error}")
        return snapshot

    def _record_listing(self, listing: HubListing) -> None:
        """Write which commit a revision is and which optional files it lacks, where that is new."""
        folder, revision = self._repository(listing.name), listing.name.wanted_revision
        commit, reference = listing.commit.encode(), folder / "refs" / revision
        for name in self.list_unknown(self._snapshot(listing)):
            if listing.find(name) is None:
                with suppress(OSError):  # only a hint for the next time
                    make_folders(folder / _NO_FILES / listing.commit)
                    (folder / _NO_FILES / listing.commit / name).touch()
        if not is_commit(revision) and not _has_content(reference, commit):
            make_folders(reference.parent)
            write_atomic(reference, commit)

    def _check_git_file(self, listing: HubListing, file: HubFile) -> None:
        """Require that a file that Git stores is the listed one; large files are hashed later."""
        path = self._path(listing, file)
        if file.digest is not None or file.git_id is None:
            return
        with _cache_errors(path), path.open("rb") as stream:
            is_sound = os.fstat(stream.fileno()).st_size == file.size
            is_sound = is_sound and _ReceivedFile(stream, file).is_sound(file.git_id)
        if not is_sound:
            raise DigestError(
                f"{listing.name}: {file.name} in the cache is not the file that the hub listed",
                hint=f"remove {path.resolve()}, then repeat the command",
            )

    def _repository(self, name: HubName) -> Path:
        return self.folder / f"models--{name.repository.replace('/', '--')}"

    def _snapshot(self, listing: HubListing) -> Path:
        return self._repository(listing.name) / "snapshots" / listing.commit

    def _path(self, listing: HubListing, file: HubFile) -> Path:
        return self._snapshot(listing) / file.name

    def _blob(self, name: HubName, etag: str) -> Path:
        return self._repository(name) / "blobs" / etag

    def _count_partial(self, listing: HubListing, file: HubFile) -> int:
        """Return how many bytes of a file are in the cache already, finished or not."""
        etag = file.digest.hex if file.digest else file.git_id
        if etag is None or not _OBJECT_NAME.fullmatch(etag):
            return 0
        blob = self._blob(listing.name, etag)
        for path in (blob, _partial_path(blob)):
            with suppress(OSError):
                return min(path.stat().st_size, file.size)
        return 0

    def _download_file(
        self,
        listing: HubListing,
        file: HubFile,
        progress: Progress,
        notify: Callable[[str], None],
    ) -> None:
        """Download one file, unless another revision already has it, and link it."""
        etag = self.connection.read_etag(listing, file)
        blob = self._blob(listing.name, etag)
        place = self._path(listing, file)
        with _cache_errors(self.folder):
            make_folders(blob.parent)
            with self._lock(listing.name, etag, notify):
                if place.is_file():  # another process was faster
                    return
                is_known = blob.exists()
                if not is_known:
                    self._receive_blob(listing, file, blob, progress)
                _link_file(blob, place, keeps_blob=is_known)

    @contextmanager
    def _lock(self, name: HubName, etag: str, notify: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of a blob; wait while another process downloads it."""
        folder = self.folder / ".locks" / self._repository(name).name
        make_folders(folder)
        with ExitStack() as stack:
            lock = folder / f"{etag}.lock"
            try:
                stack.enter_context(exclusive_lock(lock, seconds=_LOCK_SECONDS))
            except StoreError:
                notify(f"another process downloads {name}; waiting for it")
                stack.enter_context(self._wait_for_lock(name, lock))
            yield

    @contextmanager
    def _wait_for_lock(self, name: HubName, lock: Path) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive_lock(lock, seconds=_LONG_LOCK_SECONDS))
            except StoreError as error:
                raise StoreError(
                    f"another process still downloads {name}",
                    hint="try again when that has ended",
                ) from error
            yield

    def _receive_blob(
        self, listing: HubListing, file: HubFile, blob: Path, progress: Progress
    ) -> None:
        """Receive a file and check it; a broken connection is opened again for the rest."""
        partial = _partial_path(blob)
        with _open_partial(partial) as stream:
            received = _ReceivedFile(stream, file)
            self._receive_all(listing, received, progress)
            stream.flush()
            os.fsync(stream.fileno())
        if not received.is_sound(blob.name):
            partial.unlink(missing_ok=True)
            raise DigestError(
                f"{listing.name}: {file.name} is not the file that the hub listed: other content",
                hint=CHANGED_HINT,
            )
        publish_file(partial, blob)

    def _receive_all(
        self, listing: HubListing, received: "_ReceivedFile", progress: Progress
    ) -> None:
        failures = 0
        while received.size < received.file.size:
            before = received.size
            try:
                self._receive_rest(listing, received, progress)
            except UnreachableError:
                failures = 0 if received.size > before else failures
                if failures == len(_PAUSES):
                    raise
                time.sleep(_PAUSES[failures])
                failures += 1

    def _receive_rest(
        self, listing: HubListing, received: "_ReceivedFile", progress: Progress
    ) -> None:
        """Ask once for the bytes after those received.

        Raises:
            UnreachableError: when the connection breaks before the last one.
        """
        file = received.file
        with self.connection.open_rest(listing, file, received.size) as (is_rest, chunks):
            if not is_rest and received.size:
                progress(-received.size)
                received.truncate()
            for chunk in chunks:
                received.append(chunk)
                progress(len(chunk))
        if received.size < file.size:
            raise UnreachableError(
                f"{listing.name}: {file.name} ended after {received.size:,} of {file.size:,} bytes",
                hint=RESUME_HINT,
            )


class _ReceivedFile:
    """The bytes received of one file, and what is computed of them."""

    def __init__(self, stream: BinaryIO, file: HubFile) -> None:
        """Read what an earlier attempt left; more than the file has is discarded."""
        self.file, self.size = file, 0
        self._stream = stream
        self._start()
        stream.seek(0)
        while chunk := stream.read(READ_CHUNK):
            self._count(chunk)
        if self.size > file.size:
            self.truncate()

    def append(self, chunk: bytes) -> None:
        """Write further bytes.

        Raises:
            RegistryError: when the file would become longer than the hub stated.
        """
        if self.size + len(chunk) > self.file.size:
            raise RegistryError(
                f"the hub sends more than the {self.file.size:,} bytes that it stated for "
                f"{self.file.name}",
                hint=ENDPOINT_HINT,
            )
        self._stream.write(chunk)
        self._count(chunk)

    def truncate(self) -> None:
        """Begin again."""
        self._stream.seek(0)
        self._stream.truncate()
        self._start()

    def is_sound(self, etag: str) -> bool:
        """Tell whether all bytes are those that the hub listed."""
        if self.file.digest is not None:
            return self._sha256.hexdigest() == self.file.digest.hex
        return self._git.hexdigest() == (self.file.git_id or etag)

    def _start(self) -> None:
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        (self._git if self.file.digest is None else self._sha256).update(chunk)


def _find_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _is_same_disk(one: Path, other: Path) -> bool:
    with disk_errors(one):
        return _find_existing(one).stat().st_dev == _find_existing(other).stat().st_dev


def _require_free(folder: Path, needed: int, what: str, *, hint: str) -> None:
    there = _find_existing(folder)
    with disk_errors(there):
        free = shutil.disk_usage(there).free
    if needed > free:
        raise DiskFullError(
            f"{what} needs {format_size(needed)}, and {format_size(free)} are free in {there}",
            hint=hint,
        )


def list_expected_digests(files: tuple[HubFile, ...]) -> dict[str, Digest]:
    """Return the digests of chosen files that the hub states, as `check_digests` wants them."""
    names = {file: COPIED_GGUF if file.name.endswith(".gguf") else file.name for file in files}
    return {name: file.digest for file, name in names.items() if file.digest is not None}


def find_expected_digests(path: Path) -> dict[str, Digest]:
    """Return the digests of large files by their names in the cache, of a folder or a GGUF file.

    The cache stores such a file under its digest, and a snapshot has links to it.
    """
    found = {}
    for file in path.iterdir() if path.is_dir() else [path]:
        with suppress(OSError):  # copied rather than linked: the cache does not say
            stored = file.readlink().name
            if _LFS_NAME.fullmatch(stored):
                found[file.name if path.is_dir() else COPIED_GGUF] = Digest(stored)
    return found


def _match_cached(snapshot: Path, pattern: str) -> list[str]:
    """Return the weight files of a snapshot that match a pattern, of one form."""
    there = (path for path in snapshot.rglob("*") if path.is_file())
    matched = match_weights((path.relative_to(snapshot).as_posix() for path in there), pattern)
    if matched:
        require_one_form(matched, pattern)
    return matched


def _link_file(blob: Path, place: Path, *, keeps_blob: bool) -> None:
    """Enter a file in a snapshot: by a relative link, as the client of the hub does.

    Where links are not allowed, as on Windows for most users, the file is moved there, or copied
    if it was in the cache before: another snapshot may link to it.
    """
    make_folders(place.parent)
    if place.is_symlink():  # to what is no longer there
        place.unlink()
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError as error:
        if error.errno in NO_SPACE_ERRORS:
            raise
        if not keeps_blob:
            publish_file(blob, place)
            return
        with blob.open("rb") as stream, open_staged_file(place) as write:
            while chunk := stream.read(READ_CHUNK):
                write(memoryview(chunk))


def _open_partial(path: Path) -> BinaryIO:
    """Open an unfinished file to read and append; never through a link, and no pipe or device.

    Raises:
        StoreError: when it is something else.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    error = StoreError(f"{path} is not a regular file", hint="remove it, then repeat the command")
    if path.is_symlink():
        raise error
    handle = os.open(path, flags, 0o644)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(handle)
        raise error
    return os.fdopen(handle, "a+b")


def _has_content(path: Path, data: bytes) -> bool:
    with suppress(OSError):
        return path.read_bytes().strip() == data
    return False


@contextmanager
def _cache_errors(what: Path) -> Iterator[None]:
    """Turn an OSError of the body into an error about the cache, not about our own folder."""
    try:
        yield
    except OSError as error:
        try:
            with disk_errors(what):
                raise
        except (DiskFullError, StoreError) as explained:
            raise type(explained)(explained.message, hint=_CACHE_HINT) from error


def _partial_path(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")
