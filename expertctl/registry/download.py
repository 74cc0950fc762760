"""Downloads of blobs: several at once, resumed after a failure, verified while written.

::

    FOLDER/<hex>.part     the first bytes of a blob
    FOLDER/<hex>.json     where they came from: URL of the registry and ETag
    FOLDER/<hex>.lock     held by the process that writes them

Bytes are only appended to bytes of the same registry and ETag; after a power failure they may
differ from those written, which the digest shows. A complete blob, flushed to the disk, is moved to
its target by one rename. A second process that wants the same blob does not wait: it writes a
private file and discards it if it is interrupted.
"""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from filelock import FileLock, Timeout

from expertctl.digest import READ_CHUNK, Digest, FileDigest, Progress, ignore_progress
from expertctl.errors import (
    DigestError,
    DiskFullError,
    ExpertError,
    RateLimitError,
    RegistryError,
    UnreachableError,
    sanitise_text,
)
from expertctl.files import NO_SPACE_ERRORS, make_folders, publish_file
from expertctl.registry.client import OciClient
from expertctl.registry.http import StreamedResponse
from expertctl.schema.strict_json import encode_canonical, load_object

KEPT_SECONDS = 7 * 86400.0
"""How long a partial blob is kept for another attempt."""
BLOB_MODE = 0o444
MAX_STATE = 16 << 10


@dataclass(frozen=True, slots=True)
class BlobOrigin:
    """Where the bytes of a partial blob came from."""

    url: str
    etag: str | None


class PartialBlob:
    """A partly downloaded blob; ``digest`` is that of the bytes present."""

    def __init__(self, path: Path, state: Path | None) -> None:
        """Open the file, or create it; without ``state`` its origin is not stored."""
        self.path = path
        self._state = state
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        self._hasher = hashlib.sha256()
        self.size = 0
        self.origin: BlobOrigin | None = None

    def resume(self, size: int) -> None:
        """Adopt the bytes of an earlier process, if they can be the beginning of the blob."""
        self.origin = self._read_state()
        there = os.fstat(self._handle).st_size
        if self.origin is None or there > size:
            self.restart()
            return
        while data := os.read(self._handle, READ_CHUNK):
            self._hasher.update(data)
            self.size += len(data)

    @property
    def digest(self) -> Digest:
        """The digest of the bytes present."""
        return Digest(self._hasher.hexdigest())

    def append(self, chunk: bytes) -> None:
        """Write bytes at the end, and hash what was written."""
        view = memoryview(chunk)
        while view:
            written = os.write(self._handle, view)
            self._hasher.update(view[:written])
            self.size += written
            view = view[written:]

    def record_origin(self, origin: BlobOrigin) -> None:
        """Store where the bytes come from, before the first of them is written."""
        if self._state is not None and origin != self.origin:
            document = {"url": origin.url, "etag": origin.etag}
            _replace_file(self._state, encode_canonical(document))
        self.origin = origin

    def restart(self) -> None:
        """Discard all bytes."""
        os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        self._hasher, self.size, self.origin = hashlib.sha256(), 0, None

    def seal(self) -> None:
        """Flush the bytes to the disk, and make the file read-only."""
        if os.name == "posix":
            os.fchmod(self._handle, BLOB_MODE)
        os.fsync(self._handle)

    def forget_origin(self) -> None:
        """Remove the stored origin."""
        if self._state is not None:
            self._state.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the file and its origin."""
        self.path.unlink(missing_ok=True)
        self.forget_origin()

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _read_state(self) -> BlobOrigin | None:
        if self._state is None:
            return None
        try:
            document = load_object(self._state.read_bytes(), what="a blob", max_bytes=MAX_STATE)
        except (OSError, ExpertError):
            return None
        url, etag = document.get("url"), document.get("etag")
        return (
            BlobOrigin(url, etag if isinstance(etag, str) else None)
            if isinstance(url, str)
            else None
        )


@contextmanager
def open_kept_partial(folder: Path, file: FileDigest) -> Iterator[PartialBlob]:
    """Open the blob's kept file, or a private one while another process holds the kept one."""
    base = folder / file.digest.hex
    lock = FileLock(f"{base}.lock", timeout=0, thread_local=False, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        with open_private_partial(folder, file) as partial:
            yield partial
        return
    try:
        partial = PartialBlob(base.with_suffix(".part"), base.with_suffix(".json"))
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
def open_private_partial(folder: Path, file: FileDigest) -> Iterator[PartialBlob]:
    """Open a file that is removed at the end."""
    name = f"{file.digest.hex}-{secrets.token_hex(8)}.part"
    partial = PartialBlob(folder / name, None)
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
            if path.suffix == ".tmp":  # left by a killed process
                path.unlink()
            elif path.suffix in {".part", ".lock"}:
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    base = path.with_suffix("")
    try:
        with FileLock(f"{base}.lock", timeout=0, thread_local=False, mode=0o600):
            for suffix in (".part", ".json", ".lock"):
                base.with_suffix(suffix).unlink(missing_ok=True)
    except Timeout:
        return


def _replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, without a flush: after a power failure the blob may start over."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


WORKERS = 4
KEPT_BYTES = 1 << 20
PROGRESS = 64 << 10
"""How many bytes a connection must bring for earlier failures not to count."""
MAX_ETAG = 1024
ALTERED_HINT = "the registry or a proxy does not send the published bytes"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15}|\*)")


class BlobTarget(Protocol):
    """The place for complete blobs: a staging folder of the store."""

    def path(self, digest: Digest) -> Path:
        """Return the path for a blob."""


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """A blob and where to download it."""

    client: OciClient
    repository: str
    file: FileDigest


class _RestartError(Exception):
    """The present bytes do not belong to those that arrive: start over."""


class _StoppedError(Exception):
    """Another blob failed, or the user pressed Ctrl-C."""


@dataclass(frozen=True, slots=True)
class BlobDownloader:
    """The owner of the folder of partial blobs."""

    folder: Path
    max_workers: int = WORKERS
    kept_bytes: int = KEPT_BYTES
    """Smaller blobs start over after a failure: keeping them would cost more."""

    def fetch_all(
        self,
        wanted: Iterable[BlobRequest],
        target: BlobTarget,
        progress: Progress = ignore_progress,
    ) -> None:
        """Download blobs to their target, several at once; partial blobs are resumed.

        Raises:
            DigestError: when bytes are not those of their digest.
            UnreachableError: when the registry does not answer for too long; partial blobs stay.
            DiskFullError: when there is no space; partial blobs stay.
        """
        make_folders(self.folder, mode=0o700)
        self.sweep()
        once = {one.file.digest: one for one in wanted}
        largest_first = sorted(once.values(), key=lambda one: -one.file.size)
        stop, counted = Event(), _serialise_progress(progress)
        with ThreadPoolExecutor(self.max_workers, thread_name_prefix="download") as pool:
            waiting: Iterable[object] = largest_first
            try:
                jobs = [
                    pool.submit(_download_blob, _DownloadJob(self, one, stop), target, counted)
                    for one in largest_first
                ]
                done, waiting = wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                if waiting:  # one failed, or the user pressed Ctrl-C
                    for http in {one.client.http for one in once.values()}:
                        http.interrupt()
                pool.shutdown(cancel_futures=True)
        errors = [error for job in done if (error := job.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, _StoppedError)):
            raise error

    def sweep(self) -> None:
        """Remove partial blobs that were not continued for `KEPT_SECONDS`."""
        sweep_partials(self.folder, age=KEPT_SECONDS)

    def check_integrity(self) -> None:
        """Assert that every file belongs to a partial blob."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            assert path.suffix in {".part", ".json", ".lock"}, path
            name = path.name.split(".")[0].split("-")[0]
            assert Digest.parse(f"sha256:{name}").hex == name, path


@dataclass(frozen=True, slots=True)
class _DownloadJob:
    """One blob to download."""

    downloads: BlobDownloader
    wanted: BlobRequest
    stop: Event

    @property
    def client(self) -> OciClient:
        return self.wanted.client

    @property
    def file(self) -> FileDigest:
        return self.wanted.file

    def open_partial(self) -> AbstractContextManager[PartialBlob]:
        folder, kept = self.downloads.folder, self.file.size >= self.downloads.kept_bytes
        return (open_kept_partial if kept else open_private_partial)(folder, self.file)

    @property
    def what(self) -> str:
        return f"{self.client.address.host}: {self.file.path} of {self.wanted.repository}"


def _serialise_progress(progress: Progress) -> Progress:
    lock = Lock()

    def report(count: int) -> None:
        with lock:
            progress(count)

    return report


def _download_blob(job: _DownloadJob, target: BlobTarget, progress: Progress) -> None:
    try:
        with job.open_partial() as partial:
            _download_fully(job, partial, progress)
            partial.seal()
            publish_file(partial.path, target.path(job.file.digest))
            partial.forget_origin()
    except OSError as error:
        if error.errno in NO_SPACE_ERRORS:
            hint = "free some space, or `expertctl gc`; then retry: partial data is kept"
            raise DiskFullError(f"{job.what}: no space left", hint=hint) from error
        raise


def _download_fully(job: _DownloadJob, partial: PartialBlob, progress: Progress) -> None:
    """Append until the blob is complete and has its digest."""
    resumed = partial.size > 0
    progress(partial.size)
    try:
        _append_with_retries(job, partial, progress)
        if partial.digest == job.file.digest:
            return
        if not resumed:
            raise DigestError(f"{job.what} does not have its digest", hint=ALTERED_HINT)
    except DigestError:
        partial.discard()
        raise
    progress(-partial.size)  # the bytes of an earlier process may be damaged: start over once
    partial.restart()
    _download_fully(job, partial, progress)


def _append_with_retries(job: _DownloadJob, partial: PartialBlob, progress: Progress) -> None:
    http = job.client.http
    retries, timeouts = http.retries, http.timeouts
    deadline = (
        time.monotonic() + timeouts.answer + timeouts.body_timeout(job.file.size - partial.size)
    )
    failures, restarts = 0, 0
    while partial.size < job.file.size:
        if job.stop.is_set():
            raise _StoppedError
        if time.monotonic() > deadline:
            raise UnreachableError(f"{job.what}: the download is too slow; partial data is kept")
        before = partial.size
        try:
            _append_range(job, partial, progress)
            if partial.size < job.file.size:
                raise UnreachableError(f"{job.what}: the answer ends too early")
        except _RestartError:
            restarts += 1
            progress(-partial.size)
            partial.restart()
            if restarts > retries.attempts:
                raise RegistryError(f"{job.what}: it changed during the download") from None
        except (UnreachableError, RateLimitError) as error:
            failures = 1 if partial.size - before >= PROGRESS else failures + 1
            retries.pause(failures, error, stop=job.stop)


def _append_range(job: _DownloadJob, partial: PartialBlob, progress: Progress) -> None:
    """Request the missing bytes and append them."""
    url, size = job.client.address.url, job.file.size
    start = partial.size if partial.origin is not None and partial.origin.url == url else 0
    if partial.size and not start:
        raise _RestartError
    headers = _range_headers(start, partial.origin)
    with job.client.open_blob(job.wanted.repository, job.file.digest, headers=headers) as answer:
        _check_start(job, answer, start)
        partial.record_origin(BlobOrigin(url, _find_strong_etag(answer)))
        for chunk in answer.chunks:
            if job.stop.is_set():
                raise _StoppedError
            if partial.size + len(chunk) > size:
                raise DigestError(f"{job.what} is longer than its {size} bytes", hint=ALTERED_HINT)
            partial.append(chunk)
            progress(len(chunk))


def _range_headers(start: int, origin: BlobOrigin | None) -> dict[str, str]:
    if start == 0:
        return {}
    headers = {"Range": f"bytes={start}-"}
    if origin is not None and origin.etag:
        headers["If-Range"] = origin.etag
    return headers


def _check_start(job: _DownloadJob, answer: StreamedResponse, start: int) -> None:
    """Require that an answer holds exactly the bytes from ``start`` to the end."""
    size = job.file.size
    if answer.status == 416 or (start > 0 and answer.status == 200):
        if start == 0:
            raise RegistryError(f"{job.what}: it refuses a range that was not requested")
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
            message = f"{job.what}: bytes {start}-{size - 1} of {size} were requested"
            raise RegistryError(f"{message}, got {sanitise_text(text, 80)!r}", hint=ALTERED_HINT)
    length = answer.headers.get("content-length")
    if length is not None and length != str(size - start):
        raise DigestError(
            f"{job.what}: {size - start} bytes were requested, "
            f"the answer has {sanitise_text(length, 20)}",
            hint=ALTERED_HINT,
        )


def _find_strong_etag(answer: StreamedResponse) -> str | None:
    etag = answer.headers.get("etag", "")
    strong = etag.startswith('"') and etag.endswith('"') and etag.isascii() and etag.isprintable()
    return etag if strong and len(etag) <= MAX_ETAG else None
