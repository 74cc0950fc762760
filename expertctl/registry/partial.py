"""The beginning of a blob that is not whole yet, kept for the next attempt.

::

    FOLDER/<hex>.part     the first bytes of a blob
    FOLDER/<hex>.json     where they came from: URL of the registry and ETag
    FOLDER/<hex>.lock     held by the process that writes them

After a power cut the bytes may differ from those written; the digest tells. A second
process that wants the same blob does not wait: it writes a private file that it does not keep.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.digest import CHUNK, Digest, FileDigest
from expertctl.errors import ExpertError
from expertctl.schema.strict_json import canonical, load_object

KEPT_SECONDS = 7 * 86400.0
"""How long the beginning of a blob is kept for another attempt."""
BLOB_MODE = 0o444
MAX_STATE = 16 << 10


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the beginning of a blob came from."""

    url: str
    etag: str | None


class Partial:
    """The file that a blob grows in; ``digest`` is that of what is in it."""

    def __init__(self, path: Path, state: Path | None) -> None:
        """Open the file, or make it; without ``state`` nothing is remembered beside it."""
        self.path = path
        self._state = state
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        self._hasher = hashlib.sha256()
        self.size = 0
        self.origin: Origin | None = None

    def resume(self, size: int) -> None:
        """Take over what an earlier process left, if it can be the beginning of the blob."""
        self.origin = self._read_state()
        there = os.fstat(self._handle).st_size
        if self.origin is None or there > size:
            self.restart()
            return
        while data := os.read(self._handle, CHUNK):
            self._hasher.update(data)
            self.size += len(data)

    @property
    def digest(self) -> Digest:
        """The digest of the bytes that are here."""
        return Digest(self._hasher.hexdigest())

    def append(self, chunk: bytes) -> None:
        """Write bytes at the end, and hash what was written."""
        view = memoryview(chunk)
        while view:
            written = os.write(self._handle, view)
            self._hasher.update(view[:written])
            self.size += written
            view = view[written:]

    def came_from(self, origin: Origin) -> None:
        """Remember where the bytes come from, before the first of them is written."""
        if self._state is not None and origin != self.origin:
            document = {"url": origin.url, "etag": origin.etag}
            _replace(self._state, canonical(document))
        self.origin = origin

    def restart(self) -> None:
        """Forget all bytes."""
        os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        self._hasher, self.size, self.origin = hashlib.sha256(), 0, None

    def seal(self) -> None:
        """Flush the bytes to the disk, and make the file read-only."""
        if os.name == "posix":
            os.fchmod(self._handle, BLOB_MODE)
        os.fsync(self._handle)

    def forget(self) -> None:
        """Remove what was remembered."""
        if self._state is not None:
            self._state.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the bytes."""
        self.path.unlink(missing_ok=True)
        self.forget()

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _read_state(self) -> Origin | None:
        if self._state is None:
            return None
        try:
            document = load_object(self._state.read_bytes(), what="a blob", max_bytes=MAX_STATE)
        except (OSError, ExpertError):
            return None
        url, etag = document.get("url"), document.get("etag")
        return (
            Origin(url, etag if isinstance(etag, str) else None) if isinstance(url, str) else None
        )


@contextmanager
def kept_partial(folder: Path, file: FileDigest) -> Iterator[Partial]:
    """Lend the blob's file: the kept one, or a private one while another process holds that."""
    base = folder / file.digest.hex
    lock = FileLock(f"{base}.lock", timeout=0, thread_local=False, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        with private_partial(folder, file) as partial:
            yield partial
        return
    try:
        partial = Partial(base.with_suffix(".part"), base.with_suffix(".json"))
        try:
            partial.resume(file.size)
            yield partial
        finally:
            partial.close()
    finally:
        if not base.with_suffix(".part").exists():
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def private_partial(folder: Path, file: FileDigest) -> Iterator[Partial]:
    """Lend a file that is removed at the end."""
    name = f"{file.digest.hex}-{secrets.token_hex(8)}.part"
    partial = Partial(folder / name, None)
    try:
        yield partial
    finally:
        partial.close()
        partial.path.unlink(missing_ok=True)


def sweep_partials(folder: Path, *, age: float) -> None:
    """Remove files that were not continued for ``age`` seconds and that no process holds."""
    now = time.time()
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if abs(now - path.stat().st_mtime) < age:
                continue
            if path.suffix == ".tmp":  # of a process that was killed while it remembered
                path.unlink()
            elif path.suffix in {".part", ".lock"}:
                _sweep(path)


def _sweep(path: Path) -> None:
    base = path.with_suffix("")
    try:
        with FileLock(f"{base}.lock", timeout=0, thread_local=False, mode=0o600):
            for suffix in (".part", ".json", ".lock"):
                base.with_suffix(suffix).unlink(missing_ok=True)
    except Timeout:
        return


def _replace(path: Path, data: bytes) -> None:
    """Replace a file at once, without a flush: after a power cut a blob may begin anew."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
