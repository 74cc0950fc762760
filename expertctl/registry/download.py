"""Fetching blobs: several at once, on from where they broke off, verified while they are written.

::

    FOLDER/<hex>.part     the first bytes of a blob
    FOLDER/<hex>.json     where they came from: URL of the registry and ETag
    FOLDER/<hex>.lock     held by the process that writes them

A second process that wants the same blob does not wait: it writes a private file that it does not
keep. Bytes are only ever appended to bytes of the same registry and ETag; a whole blob gets to its
target by one rename, on the disk.
"""

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from filelock import FileLock, Timeout

from expertctl.digest import CHUNK, Digest, FileDigest, Progress, no_progress
from expertctl.durable import make_folders, publish, write_atomic
from expertctl.errors import (
    DigestError,
    DiskFullError,
    ExpertError,
    RateLimitError,
    RegistryError,
    UnreachableError,
)
from expertctl.registry.http import OpenAnswer
from expertctl.registry.oci_client import OciClient
from expertctl.registry.refusal import shown
from expertctl.schema.strict_json import canonical, load_object

WORKERS = 4
KEPT_SECONDS = 7 * 86400.0
"""How long the beginning of a blob is kept for somebody who comes back."""
BLOB_MODE = 0o444
MAX_STATE = 16 << 10
MAX_ETAG = 1024
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15}|\*)")
_FULL = {errno.ENOSPC, errno.EDQUOT}


class BlobTarget(Protocol):
    """Where whole blobs go: a staging folder of the store."""

    def path(self, digest: Digest) -> Path:
        """Return where a blob shall be."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the beginning of a blob came from."""

    url: str
    etag: str | None


class _RestartError(Exception):
    """What is here does not go with what comes: begin anew."""


class _StoppedError(Exception):
    """Another blob failed, or the person pressed Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Downloads:
    """Owns the folder of blobs that are half here."""

    folder: Path
    workers: int = WORKERS

    def fetch(
        self,
        client: OciClient,
        repository: str,
        files: Iterable[FileDigest],
        target: BlobTarget,
        *,
        progress: Progress = no_progress,
    ) -> None:
        """Bring blobs to their target; what was here before goes on.

        Raises:
            DigestError: when bytes are not those of their digest.
            UnreachableError: when the registry does not answer for long enough; what is here stays.
            DiskFullError: when there is no room; what is here stays.
        """
        make_folders(self.folder, mode=0o700)
        self.sweep()
        wanted = {file.digest: file for file in files}
        largest_first = sorted(wanted.values(), key=lambda file: -file.size)
        stop = Event()
        with ThreadPoolExecutor(self.workers, thread_name_prefix="download") as pool:
            jobs = [
                pool.submit(
                    _fetch, _Job(self.folder, client, repository, file, stop), target, progress
                )
                for file in largest_first
            ]
            try:
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
        errors = [error for job in done if (error := job.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, _StoppedError)):
            raise error

    def sweep(self, *, age: float = KEPT_SECONDS) -> None:
        """Remove what nobody went on with for ``age`` seconds."""
        now = time.time()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with suppress(FileNotFoundError):
                if abs(now - path.stat().st_mtime) >= age and path.suffix in {".part", ".lock"}:
                    _sweep(path)


@dataclass(frozen=True, slots=True)
class _Job:
    """One blob that shall come."""

    folder: Path
    client: OciClient
    repository: str
    file: FileDigest
    stop: Event

    @property
    def what(self) -> str:
        return f"{self.client.address.host}: {self.file.path} of {self.repository}"


def _fetch(job: _Job, target: BlobTarget, progress: Progress) -> None:
    try:
        with _partial(job) as partial:
            _complete(job, partial, progress)
            partial.seal()
            publish(partial.path, target.path(job.file.digest))
            partial.forget()
    except OSError as error:
        if error.errno in _FULL:
            hint = "free some space, or `expertctl gc`; then again: what is here is kept"
            raise DiskFullError(f"{job.what}: no space left", hint=hint) from error
        raise


def _complete(job: _Job, partial: "_Partial", progress: Progress) -> None:
    """Append until the blob is whole, and has its digest."""
    resumed = partial.size > 0
    progress(partial.size)
    try:
        _append_all(job, partial, progress)
        if partial.digest == job.file.digest:
            return
        if not resumed:
            raise DigestError(f"{job.what} does not have its digest", hint=_ALTERED)
    except DigestError:
        partial.discard()
        raise
    progress(-partial.size)  # what an earlier process left may have been damaged: once anew
    partial.restart()
    _complete(job, partial, progress)


def _append_all(job: _Job, partial: "_Partial", progress: Progress) -> None:
    retries = job.client.http.retries
    failures, restarts = 0, 0
    while partial.size < job.file.size:
        before = partial.size
        try:
            _append(job, partial, progress)
            if partial.size < job.file.size:
                raise UnreachableError(f"{job.what}: the answer ends too early")
        except _RestartError:
            restarts += 1
            progress(-partial.size)
            partial.restart()
            if restarts > retries.attempts:
                raise RegistryError(f"{job.what}: it changes while it is fetched") from None
        except (UnreachableError, RateLimitError) as error:
            failures = 1 if partial.size > before else failures + 1
            retries.pause(failures, error)


def _append(job: _Job, partial: "_Partial", progress: Progress) -> None:
    """Ask for what is missing and append it."""
    url, size = job.client.address.url, job.file.size
    start = partial.size if partial.origin is not None and partial.origin.url == url else 0
    if partial.size and not start:
        raise _RestartError
    headers = _range_headers(start, partial.origin)
    with job.client.blob(job.repository, job.file.digest, headers=headers) as answer:
        _check_start(job, answer, start)
        partial.came_from(Origin(url, _strong_etag(answer)))
        for chunk in answer.chunks:
            if job.stop.is_set():
                raise _StoppedError
            if partial.size + len(chunk) > size:
                raise DigestError(f"{job.what} is longer than its {size} bytes", hint=_ALTERED)
            partial.append(chunk)
            progress(len(chunk))


def _range_headers(start: int, origin: Origin | None) -> dict[str, str]:
    if start == 0:
        return {}
    headers = {"Range": f"bytes={start}-"}
    if origin is not None and origin.etag:
        headers["If-Range"] = origin.etag
    return headers


def _check_start(job: _Job, answer: OpenAnswer, start: int) -> None:
    """Demand that an answer holds exactly the bytes from ``start`` to the end."""
    size = job.file.size
    if answer.status == 416 or (start > 0 and answer.status == 200):
        if start == 0:
            raise RegistryError(f"{job.what}: a range is refused that nobody asked for")
        raise _RestartError
    if answer.status == 206:
        text = answer.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(text)
        expected = (str(start), str(size - 1))
        if (
            start == 0
            or match is None
            or match.group(1, 2) != expected
            or match[3] not in {str(size), "*"}
        ):
            message = f"{job.what}: bytes {start}-{size - 1} of {size} were asked for"
            raise RegistryError(f"{message}, {shown(text, 80)!r} came", hint=_ALTERED)
    length = answer.headers.get("content-length")
    if length is not None and length != str(size - start):
        message = f"{job.what}: {size - start} bytes were asked for, {shown(length, 20)} shall come"
        raise DigestError(message, hint=_ALTERED)


def _strong_etag(answer: OpenAnswer) -> str | None:
    etag = answer.headers.get("etag", "")
    strong = etag.startswith('"') and etag.endswith('"') and etag.isascii() and etag.isprintable()
    return etag if strong and len(etag) <= MAX_ETAG else None


class _Partial:
    """The file that a blob grows in; ``digest`` is that of what is in it."""

    def __init__(self, path: Path, state: Path | None) -> None:
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
            write_atomic(self._state, canonical(document), mode=0o600)
        self.origin = origin

    def restart(self) -> None:
        """Forget all bytes."""
        os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        self._hasher, self.size, self.origin = hashlib.sha256(), 0, None

    def seal(self) -> None:
        """Have the bytes on the disk, and nobody change them."""
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
        """Let go of the file."""
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
def _partial(job: _Job) -> Iterator[_Partial]:
    """Lend the blob's file: the one that is kept, or a private one while another has that."""
    base = job.folder / job.file.digest.hex
    lock = FileLock(f"{base}.lock", timeout=0, thread_local=False, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        with _private(base) as partial:
            yield partial
        return
    try:
        partial = _Partial(base.with_suffix(".part"), base.with_suffix(".json"))
        try:
            partial.resume(job.file.size)
            yield partial
        finally:
            partial.close()
    finally:
        if not base.with_suffix(".part").exists():
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def _private(base: Path) -> Iterator[_Partial]:
    partial = _Partial(base.with_name(f"{base.name}-{secrets.token_hex(8)}.part"), None)
    try:
        yield partial
    finally:
        partial.close()
        partial.path.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    base = path.with_suffix("")
    try:
        with FileLock(f"{base}.lock", timeout=0, thread_local=False, mode=0o600):
            for suffix in (".part", ".json", ".lock"):
                base.with_suffix(suffix).unlink(missing_ok=True)
    except Timeout:
        return


_ALTERED = "the registry, or a proxy between, does not send what was published"
