"""Fetching blobs: several at once, resumed where they broke off, verified while written.

Bytes are only ever appended to bytes of the same registry and ETag; a whole blob, flushed to the
disk, gets to its target by one rename. For partial blobs see `expertctl.registry.partial`.
"""

import re
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from expertctl.digest import Digest, FileDigest, Progress, no_progress
from expertctl.durable import NO_SPACE, make_folders, publish
from expertctl.errors import (
    DigestError,
    DiskFullError,
    RateLimitError,
    RegistryError,
    UnreachableError,
)
from expertctl.registry.http import OpenAnswer
from expertctl.registry.oci_client import OciClient
from expertctl.registry.partial import (
    KEPT_SECONDS,
    Origin,
    Partial,
    kept_partial,
    private_partial,
    sweep_partials,
)
from expertctl.registry.refusal import shown

WORKERS = 4
KEPT_BYTES = 1 << 20
PROGRESS = 64 << 10
"""What a connection must bring for the failures before it to be forgotten."""
MAX_ETAG = 1024
ALTERED = "the registry, or a proxy between, does not send what was published"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15}|\*)")


class BlobTarget(Protocol):
    """Where whole blobs go: a staging folder of the store."""

    def path(self, digest: Digest) -> Path:
        """Return the path for a blob."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A blob and where it is to be had."""

    client: OciClient
    repository: str
    file: FileDigest


class _RestartError(Exception):
    """The bytes that are here do not belong to those that come: begin anew."""


class _StoppedError(Exception):
    """Another blob failed, or the person pressed Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Downloads:
    """Owns the folder of partial blobs."""

    folder: Path
    workers: int = WORKERS
    kept_bytes: int = KEPT_BYTES
    """Smaller blobs begin anew when they break off: remembering them would cost more."""

    def fetch(
        self,
        client: OciClient,
        repository: str,
        files: Iterable[FileDigest],
        target: BlobTarget,
        *,
        progress: Progress = no_progress,
    ) -> None:
        """Bring the blobs of one repository to their target; see `fetch_all`."""
        self.fetch_all([Wanted(client, repository, file) for file in files], target, progress)

    def fetch_all(
        self, wanted: Iterable[Wanted], target: BlobTarget, progress: Progress = no_progress
    ) -> None:
        """Bring blobs to their target, several at once; partial blobs are resumed.

        Raises:
            DigestError: when bytes are not those of their digest.
            UnreachableError: when the registry does not answer for long enough; what is here stays.
            DiskFullError: when there is no room; what is here stays.
        """
        make_folders(self.folder, mode=0o700)
        self.sweep()
        once = {one.file.digest: one for one in wanted}
        largest_first = sorted(once.values(), key=lambda one: -one.file.size)
        stop, counted = Event(), _one_at_a_time(progress)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="download") as pool:
            waiting: Iterable[object] = largest_first
            try:
                jobs = [
                    pool.submit(_fetch, _Job(self, one, stop), target, counted)
                    for one in largest_first
                ]
                done, waiting = wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                if waiting:  # one failed, or the person pressed Ctrl-C
                    for http in {one.client.http for one in once.values()}:
                        http.interrupt()
                pool.shutdown(cancel_futures=True)
        errors = [error for job in done if (error := job.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, _StoppedError)):
            raise error

    def sweep(self, *, age: float = KEPT_SECONDS) -> None:
        """Remove partial blobs that were not continued for ``age`` seconds."""
        sweep_partials(self.folder, age=age)

    def check_integrity(self) -> None:
        """Assert that everything here is the beginning of a blob, or belongs to one."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            assert path.suffix in {".part", ".json", ".lock"}, path
            name = path.name.split(".")[0].split("-")[0]
            assert Digest.parse(f"sha256:{name}").hex == name, path


@dataclass(frozen=True, slots=True)
class _Job:
    """One blob to fetch."""

    downloads: Downloads
    wanted: Wanted
    stop: Event

    @property
    def client(self) -> OciClient:
        return self.wanted.client

    @property
    def file(self) -> FileDigest:
        return self.wanted.file

    def partial(self) -> AbstractContextManager[Partial]:
        folder, kept = self.downloads.folder, self.file.size >= self.downloads.kept_bytes
        return (kept_partial if kept else private_partial)(folder, self.file)

    @property
    def what(self) -> str:
        return f"{self.client.address.host}: {self.file.path} of {self.wanted.repository}"


def _one_at_a_time(progress: Progress) -> Progress:
    lock = Lock()

    def report(count: int) -> None:
        with lock:
            progress(count)

    return report


def _fetch(job: _Job, target: BlobTarget, progress: Progress) -> None:
    try:
        with job.partial() as partial:
            _complete(job, partial, progress)
            partial.seal()
            publish(partial.path, target.path(job.file.digest))
            partial.forget()
    except OSError as error:
        if error.errno in NO_SPACE:
            hint = "free some space, or `expertctl gc`; then again: what is here is kept"
            raise DiskFullError(f"{job.what}: no space left", hint=hint) from error
        raise


def _complete(job: _Job, partial: Partial, progress: Progress) -> None:
    """Append until the blob is whole, and has its digest."""
    resumed = partial.size > 0
    progress(partial.size)
    try:
        _append_all(job, partial, progress)
        if partial.digest == job.file.digest:
            return
        if not resumed:
            raise DigestError(f"{job.what} does not have its digest", hint=ALTERED)
    except DigestError:
        partial.discard()
        raise
    progress(-partial.size)  # what an earlier process left may have been damaged: once anew
    partial.restart()
    _complete(job, partial, progress)


def _append_all(job: _Job, partial: Partial, progress: Progress) -> None:
    http = job.client.http
    retries, timeouts = http.retries, http.timeouts
    deadline = time.monotonic() + timeouts.answer + timeouts.allowed(job.file.size - partial.size)
    failures, restarts = 0, 0
    while partial.size < job.file.size:
        if job.stop.is_set():
            raise _StoppedError
        if time.monotonic() > deadline:
            raise UnreachableError(f"{job.what}: it comes too slowly; what is here is kept")
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
            failures = 1 if partial.size - before >= PROGRESS else failures + 1
            retries.pause(failures, error, stop=job.stop)


def _append(job: _Job, partial: Partial, progress: Progress) -> None:
    """Ask for what is missing and append it."""
    url, size = job.client.address.url, job.file.size
    start = partial.size if partial.origin is not None and partial.origin.url == url else 0
    if partial.size and not start:
        raise _RestartError
    headers = _range_headers(start, partial.origin)
    with job.client.blob(job.wanted.repository, job.file.digest, headers=headers) as answer:
        _check_start(job, answer, start)
        partial.came_from(Origin(url, _strong_etag(answer)))
        for chunk in answer.chunks:
            if job.stop.is_set():
                raise _StoppedError
            if partial.size + len(chunk) > size:
                raise DigestError(f"{job.what} is longer than its {size} bytes", hint=ALTERED)
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
            raise RegistryError(f"{job.what}: it refuses a range that was not asked for")
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
            raise RegistryError(f"{message}, {shown(text, 80)!r} came", hint=ALTERED)
    length = answer.headers.get("content-length")
    if length is not None and length != str(size - start):
        message = f"{job.what}: {size - start} bytes were asked for, {shown(length, 20)} shall come"
        raise DigestError(message, hint=ALTERED)


def _strong_etag(answer: OpenAnswer) -> str | None:
    etag = answer.headers.get("etag", "")
    strong = etag.startswith('"') and etag.endswith('"') and etag.isascii() and etag.isprintable()
    return etag if strong and len(etag) <= MAX_ETAG else None
