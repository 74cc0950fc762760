"""`JobStore`: background jobs, whose callers ask for the outcome later.

A job belongs to the caller who made it: to anybody else it does not exist. Finished jobs are kept
for a while, a limited number for each caller. When all of them take too many bytes, the oldest job
of the caller with the most bytes is dropped first, so that one caller cannot displace the answers
of others. The last answer of a caller is never dropped for lack of room.

Events come from the threads of the engine, requests from those of the server, so one lock guards
both. A job that is over never changes again.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

import msgspec

from expertctl.engine.serving.job import Event, Failed, Finished, Piece, Started
from expertctl.errors import CancelledError, ExpertError, NotFoundError
from expertctl.schema.strict_json import JsonObject

Status = Literal["queued", "processing", "finished", "failed", "cancelled"]
KEPT_SECONDS = 3600.0
KEPT_PER_OWNER = 1000
KEPT_BYTES = 64 << 20
_OVERHEAD = 1000
"""About how many bytes a job takes besides its texts."""

Describe = Callable[[Finished], JsonObject]
"""Makes the document of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job as it is at one moment."""

    id: str
    owner: str
    submitted: float
    """A time of `time.time`, as are the other times."""
    started: float | None = None
    ended: float | None = None
    is_called_off: bool = False
    text: str = ""
    """The part of the answer that is certain."""
    result: msgspec.Raw | None = None
    """The document of the whole answer."""
    error: ExpertError | None = None

    @property
    def status(self) -> Status:
        """The status that callers see."""
        if self.is_called_off:
            return "cancelled"
        if self.ended is not None:
            return "finished" if self.error is None else "failed"
        return "queued" if self.started is None else "processing"

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return _OVERHEAD + 4 * len(self.text) + (0 if self.result is None else len(self.result))


@dataclass(slots=True)
class _Entry:
    """A job, and the text of it that is not joined yet."""

    job: StoredJob
    describe: Describe
    pieces: list[str] = field(default_factory=list)


class JobStore:
    """The owner of all jobs that were submitted and not forgotten."""

    def __init__(
        self,
        *,
        kept_seconds: float = KEPT_SECONDS,
        kept_per_owner: int = KEPT_PER_OWNER,
        kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin without a job."""
        self._kept_seconds = kept_seconds
        self._kept_per_owner = kept_per_owner
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, _Entry] = {}
        self._ended: dict[str, StoredJob] = {}
        """Jobs that are over, in the order in which they ended."""
        self._by_owner: dict[str, dict[str, None]] = {}
        """Owner → ids of the jobs that are over, in the same order."""
        self._bytes: dict[str, int] = {}
        """Owner → bytes of the jobs that are over."""

    def add(self, job_id: str, *, owner: str, submitted: float, describe: Describe) -> StoredJob:
        """Take a job that is about to begin."""
        job = StoredJob(id=job_id, owner=owner, submitted=submitted)
        with self._lock:
            assert job_id not in self._running, "a job has an id of its own"
            self._running[job_id] = _Entry(job, describe)
        return job

    def drop(self, job_id: str) -> None:
        """Forget a job that did not begin."""
        with self._lock:
            self._running.pop(job_id, None)

    def hear(self, job_id: str, event: Event) -> None:
        """Record an event of a job."""
        with self._lock:
            entry = self._running.get(job_id)
            if entry is None:
                return
            match event:
                case Started():
                    entry.job = replace(entry.job, started=self._clock())
                case Piece():
                    entry.pieces.append(event.text)
                case Finished():
                    self._end(_finished(entry, event))
                case Failed():
                    self._end(_failed(entry, event.error))

    def find(self, job_id: str, *, owner: str) -> StoredJob:
        """Return a job as it is now.

        Raises:
            NotFoundError: when this owner has no such job, or it was forgotten.
        """
        with self._lock:
            self._forget_old()
            return self._of(job_id, owner)

    def call_off(self, job_id: str, *, owner: str) -> StoredJob:
        """Mark a job as cancelled; if it is over, nothing changes.

        Raises:
            NotFoundError: as `find`.
        """
        with self._lock:
            self._forget_old()
            job = self._of(job_id, owner)
            entry = self._running.get(job_id)
            if entry is None:
                return job
            entry.job = replace(entry.job, is_called_off=True)
            return _now(entry)

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

    def _of(self, job_id: str, owner: str) -> StoredJob:
        entry = self._running.get(job_id)
        job = self._ended.get(job_id) if entry is None else _now(entry)
        if job is None or job.owner != owner:
            raise NotFoundError(
                f"there is no job {job_id[:80]!r}", hint="jobs are kept for a while after their end"
            )
        return job

    def _end(self, job: StoredJob) -> None:
        """Keep a job that is over; drop older ones if need be."""
        job = replace(job, ended=self._clock())
        del self._running[job.id]
        self._ended[job.id] = job
        self._bytes[job.owner] = self._bytes.get(job.owner, 0) + job.size
        own = self._by_owner.setdefault(job.owner, {})
        own[job.id] = None
        if len(own) > self._kept_per_owner:
            self._forget(next(iter(own)))
        self._forget_old()
        self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest jobs of the owner with the most bytes, but never the last of an owner."""
        while sum(self._bytes.values()) > self._kept_bytes:
            several = [owner for owner, ids in self._by_owner.items() if len(ids) > 1]
            if not several:
                return
            owner = max(several, key=self._bytes.__getitem__)
            self._forget(next(iter(self._by_owner[owner])))

    def _forget_old(self) -> None:
        """Drop jobs that ended too long ago."""
        least = self._clock() - self._kept_seconds
        old = takewhile(lambda job: (job.ended or 0.0) < least, self._ended.values())
        for job_id in [job.id for job in old]:
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        job = self._ended.pop(job_id)
        self._bytes[job.owner] -= job.size
        own = self._by_owner[job.owner]
        del own[job_id]
        if not own:
            del self._by_owner[job.owner], self._bytes[job.owner]


def _now(entry: _Entry) -> StoredJob:
    """Return a job with its text in one piece."""
    entry.pieces = ["".join(entry.pieces)]
    return replace(entry.job, text=entry.pieces[0])


def _finished(entry: _Entry, event: Finished) -> StoredJob:
    document = entry.describe(event)
    [result] = event.results
    called_off = entry.job.is_called_off or result.generated.finish_reason == "cancelled"
    return replace(
        entry.job,
        is_called_off=called_off,
        text=str(document["text"]),
        result=msgspec.Raw(msgspec.json.encode(document)),
    )


def _failed(entry: _Entry, error: ExpertError) -> StoredJob:
    called_off = entry.job.is_called_off or isinstance(error, CancelledError)
    return replace(_now(entry), is_called_off=called_off, error=error)
