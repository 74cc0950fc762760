"""`JobStore`: background jobs, whose callers poll for the outcome.

A job belongs to the caller that submitted it; for anybody else it does not exist. Ended jobs are
kept for a while, a limited number per caller. When all of them take too many bytes, the oldest job
of the caller with the most bytes is dropped first, so that one caller cannot evict the answers of
others. The last answer of a caller is never dropped to save memory.

Events come from engine threads, requests from server threads, so one lock guards both. An ended job
never changes. `JobDocument` is what callers see (``schemas/job.schema.json``).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import (
    JobEvent,
    JobFailed,
    JobFinished,
    JobStarted,
)
from expertctl.errors import CancelledError, ExpertError, NotFoundError, sanitise_error_text
from expertctl.schema.strict_json import JsonObject
from expertctl.server.native.infer import format_time

Status = Literal["queued", "processing", "finished", "failed", "cancelled"]
RETENTION_SECONDS = 3600.0
MAX_ENDED_PER_OWNER = 1000
MAX_ENDED_BYTES = 64 << 20
_OVERHEAD = 1000
"""Estimated bytes of a job besides its texts."""

DescribeAnswer = Callable[[JobFinished], JsonObject]
"""Builds the document of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A snapshot of a job."""

    id: str
    owner: str
    submitted: float
    """In `time.time` seconds, like the other times."""
    started: float | None = None
    ended: float | None = None
    is_cancelled: bool = False
    text: str = ""
    """The part of the answer that is already certain."""
    result: msgspec.Raw | None = None
    """The document of the whole answer."""
    error: ExpertError | None = None

    @property
    def status(self) -> Status:
        """The status that callers see."""
        if self.is_cancelled:
            return "cancelled"
        if self.ended is not None:
            return "finished" if self.error is None else "failed"
        return "queued" if self.started is None else "processing"

    @property
    def size(self) -> int:
        """The estimated size in bytes."""
        return _OVERHEAD + 4 * len(self.text) + (0 if self.result is None else len(self.result))


@dataclass(slots=True)
class _RunningJob:
    """A running job, and the pieces of its text."""

    job: StoredJob
    describe: DescribeAnswer
    pieces: list[str] = field(default_factory=list)


class JobStore:
    """All jobs that were submitted and not yet dropped; any thread may use it."""

    def __init__(
        self,
        *,
        kept_seconds: float = RETENTION_SECONDS,
        kept_per_owner: int = MAX_ENDED_PER_OWNER,
        kept_bytes: int = MAX_ENDED_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start empty; limits apply to ended jobs, and ``clock`` is in `time.time` seconds."""
        self._kept_seconds = kept_seconds
        self._kept_per_owner = kept_per_owner
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, _RunningJob] = {}
        self._ended: dict[str, StoredJob] = {}
        """Ended jobs, in the order they ended."""
        self._by_owner: dict[str, dict[str, int]] = {}
        """Owner → ids of its ended jobs, in the same order, with their place in that order."""
        self._places = count()
        self._bytes: dict[str, int] = {}
        """Owner → bytes of its ended jobs."""

    def add(
        self, job_id: str, *, owner: str, submitted: float, describe: DescribeAnswer
    ) -> StoredJob:
        """Add a job that is about to be submitted."""
        job = StoredJob(id=job_id, owner=owner, submitted=submitted)
        with self._lock:
            assert job_id not in self._running, "a job has an id of its own"
            self._running[job_id] = _RunningJob(job, describe)
        return job

    def drop(self, job_id: str) -> None:
        """Drop a job that was refused."""
        with self._lock:
            self._running.pop(job_id, None)

    def record_event(self, job_id: str, event: JobEvent) -> None:
        """Record an event of a job."""
        with self._lock:
            entry = self._running.get(job_id)
            if entry is None:
                return
            match event:
                case JobStarted():
                    entry.job = replace(entry.job, started=self._clock())
                case OutputDelta():
                    entry.pieces.append(event.text)
                case JobFinished():
                    self._finish(_finish_job(entry, event))
                case JobFailed():
                    self._finish(_fail_job(entry, event.error))

    def find(self, job_id: str, *, owner: str) -> StoredJob:
        """Return the current state of a job.

        Raises:
            NotFoundError: when this owner has no such job, or it was dropped.
        """
        with self._lock:
            self._drop_expired()
            return self._find_owned(job_id, owner)

    def cancel(self, job_id: str, *, owner: str) -> StoredJob:
        """Mark a job as cancelled; an ended job is unchanged.

        Raises:
            NotFoundError: like `find`.
        """
        with self._lock:
            self._drop_expired()
            job = self._find_owned(job_id, owner)
            entry = self._running.get(job_id)
            if entry is None:
                return job
            entry.job = replace(entry.job, is_cancelled=True)
            return _join_pieces(entry)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        with self._lock:
            assert not self._running.keys() & self._ended.keys()
            assert all(entry.job.ended is None for entry in self._running.values())
            ends = [job.ended for job in self._ended.values() if job.ended is not None]
            assert len(ends) == len(self._ended)
            owned = {job_id: owner for owner, ids in self._by_owner.items() for job_id in ids}
            assert owned == {job.id: job.owner for job in self._ended.values()}
            assert all(0 < len(ids) <= self._kept_per_owner for ids in self._by_owner.values())
            sizes = Counter[str]()
            for job in self._ended.values():
                sizes[job.owner] += job.size
            assert self._bytes == sizes
            assert sizes.total() <= self._kept_bytes or len(self._ended) == len(self._by_owner)

    def _find_owned(self, job_id: str, owner: str) -> StoredJob:
        entry = self._running.get(job_id)
        job = self._ended.get(job_id) if entry is None else _join_pieces(entry)
        if job is None or job.owner != owner:
            raise NotFoundError(
                f"there is no job {job_id[:80]!r}", hint="ended jobs are kept only for a while"
            )
        return job

    def _finish(self, job: StoredJob) -> None:
        """Keep an ended job; drop older ones to stay within the limits."""
        job = replace(job, ended=self._clock())
        del self._running[job.id]
        self._ended[job.id] = job
        self._bytes[job.owner] = self._bytes.get(job.owner, 0) + job.size
        own = self._by_owner.setdefault(job.owner, {})
        own[job.id] = next(self._places)
        if len(own) > self._kept_per_owner:
            self._drop_ended(next(iter(own)))
        self._drop_expired()
        self._drop_largest()

    def _drop_largest(self) -> None:
        """Drop the oldest jobs of the owner with the most bytes, never an owner's last one.

        Among owners with equally many bytes, the one whose oldest job ended first loses it.
        """
        while sum(self._bytes.values()) > self._kept_bytes:
            several = [owner for owner, ids in self._by_owner.items() if len(ids) > 1]
            if not several:
                return
            oldest = {owner: next(iter(self._by_owner[owner].items())) for owner in several}
            owner = max(several, key=lambda owner: (self._bytes[owner], -oldest[owner][1]))
            self._drop_ended(oldest[owner][0])

    def _drop_expired(self) -> None:
        """Drop jobs that ended too long ago."""
        least = self._clock() - self._kept_seconds
        old = takewhile(lambda job: (job.ended or 0.0) < least, self._ended.values())
        for job_id in [job.id for job in old]:
            self._drop_ended(job_id)

    def _drop_ended(self, job_id: str) -> None:
        job = self._ended.pop(job_id)
        self._bytes[job.owner] -= job.size
        own = self._by_owner[job.owner]
        del own[job_id]
        if not own:
            del self._by_owner[job.owner], self._bytes[job.owner]


def _join_pieces(entry: _RunningJob) -> StoredJob:
    """Return a snapshot with the text joined."""
    entry.pieces = ["".join(entry.pieces)]
    return replace(entry.job, text=entry.pieces[0])


def _finish_job(entry: _RunningJob, event: JobFinished) -> StoredJob:
    document = entry.describe(event)
    [result] = event.results
    called_off = entry.job.is_cancelled or result.generated.finish_reason == "cancelled"
    return replace(
        entry.job,
        is_cancelled=called_off,
        text=str(document["text"]),
        result=msgspec.Raw(msgspec.json.encode(document)),
    )


def _fail_job(entry: _RunningJob, error: ExpertError) -> StoredJob:
    called_off = entry.job.is_cancelled or isinstance(error, CancelledError)
    return replace(_join_pieces(entry), is_cancelled=called_off, error=error)


class JobError(Struct, frozen=True):
    """Why there is no answer, in the form of a failed request's error."""

    code: str
    message: str
    hint: str


class JobDocument(Struct, frozen=True, kw_only=True):
    """The current state of a job; ``text`` is the part of the answer that is certain."""

    job_id: str
    status: Status
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    estimated_wait_ms: float | None
    """Estimated time until it starts; None once it has started."""
    text: str
    result: Raw | None
    """The answer document of ``/v1/infer``, once the job has finished."""
    error: JobError | None


def build_job_document(job: StoredJob, *, expected_wait: float) -> JobDocument:
    """Return the document of a job; ``expected_wait`` is in seconds."""
    waits = job.status == "queued"
    return JobDocument(
        job_id=job.id,
        status=job.status,
        submitted_at=format_time(job.submitted),
        started_at=None if job.started is None else format_time(job.started),
        ended_at=None if job.ended is None else format_time(job.ended),
        estimated_wait_ms=round(expected_wait * 1e3, 3) if waits else None,
        text=job.text,
        result=job.result,
        error=_build_error(job),
    )


def _build_error(job: StoredJob) -> JobError | None:
    error = job.error
    if error is None or job.status == "cancelled":
        return None
    return JobError(error.code, sanitise_error_text(error.message), sanitise_error_text(error.hint))
