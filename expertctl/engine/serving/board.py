"""`Board`: which job is in which stage. The threads of an engine decide under its lock.

A job is *waiting* in the line, then *preparing* at the desk or while it lacks memory, *loading*
while its experts are loaded, *ready* for a row, *running*, *concluding*, and gone.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy

from expertctl.engine.serving.job import Failed, Finished
from expertctl.engine.serving.snapshot import Totals
from expertctl.engine.serving.ticket import Ticket
from expertctl.engine.serving.waiting_line import WaitingLine
from expertctl.errors import CancelledError, ExpertError, RateLimitError

AHEAD = 2
"""How many more jobs are prepared than rows are free."""
LOOK_SECONDS = 0.5
"""How long a thread sleeps at most before it looks for jobs whose time is over."""
PATIENCE_SECONDS, DRAIN_SECONDS, ROUND_SECONDS = 5.0, 30.0, 60.0
"""While a job lacks memory: how long others are prepared, how long none is, how long a round is."""
_LONGEST_WAIT = 60
_FORGETS = 0.8
"""The share of the average time of a job that stays when another job ends."""


class Board:
    """The owner of all jobs that have not ended."""

    def __init__(self, *, queue: int, rows: int) -> None:
        """Begin without a job."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.line = WaitingLine[Ticket](queue)
        self.ready: deque[Ticket] = deque()
        self.errands: deque[Callable[[], None]] = deque()
        """What the writer has to do between two passes."""
        self.totals = Totals()
        self.freed = 0
        """How often memory was given back."""
        self.free_rows = self._rows = rows
        self.is_closing = False
        self.is_short = False
        """Whether texts are paused for want of memory: then no other text begins."""
        self._tickets: dict[str, Ticket] = {}
        self._preparing = 0
        self._job_seconds = 1.0

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """All jobs that have not ended."""
        with self.lock:
            return tuple(self._tickets.values())

    @property
    def preparing(self) -> int:
        """How many jobs the desk and the loader have."""
        return self._preparing

    def enter(self, ticket: Ticket) -> None:
        """Put a new job into the line.

        Raises:
            RateLimitError: when it or the owner's share of it is full, or the engine ends.
        """
        with self.lock:
            assert ticket.job.id not in self._tickets, "a job has an id of its own"
            if self.is_closing or not self.line.add(ticket, now=time.monotonic()):
                self.totals.refused += 1
                raise self._refusal()
            self._tickets[ticket.job.id] = ticket
            self.changed.notify_all()

    def have_done(self, errand: Callable[[], None]) -> Future[None]:
        """Have the writer do something between two passes; the future gets what it raises."""
        done = Future[None]()

        def do() -> None:
            try:
                errand()
            except Exception as error:  # noqa: BLE001  # raised again by the future
                done.set_exception(error)
            else:
                done.set_result(None)

        with self.lock:
            self.errands.append(do)
            self.changed.notify_all()
        return done

    def end_by(self, error: ExpertError) -> None:
        """Have the writer end, with all jobs, by an error that another thread met."""
        again = copy(error)  # the job that failed by it gets the original, in another thread

        def end() -> None:
            raise again

        with self.lock:
            self.errands.append(end)
            self.changed.notify_all()

    def next_to_prepare(self) -> Ticket | None:
        """Take the next job out of the line, if there may soon be a row for it."""
        with self.lock:
            now = time.monotonic()
            if not self._may_prepare(now):
                return None
            ticket = self.line.take(now=now)
            if ticket is not None:
                ticket.stage, ticket.left_line = "preparing", now
                self._preparing += 1
            return ticket

    def loads(self, ticket: Ticket) -> None:
        """Let a job take memory."""
        with self.lock:
            ticket.stage = "loading"

    def waits_for_memory(self, ticket: Ticket) -> None:
        """Let a job that found too little memory wait; it holds none."""
        with self.lock:
            ticket.stage = "preparing"
            if ticket.lacks_since is None:
                ticket.lacks_since = time.monotonic()
            self.changed.notify_all()

    @property
    def is_loading(self) -> bool:
        """Whether a job is taking memory, which it may soon give back."""
        return any(ticket.stage == "loading" for ticket in self.tickets)

    def is_ready(self, ticket: Ticket) -> None:
        """Let a job wait for rows; all that it needs except keys and values is in memory."""
        with self.lock:
            is_here = ticket.job.id in self._tickets
            if is_here:
                self._preparing -= 1
                ticket.stage, ticket.lacks_since = "ready", None
                self.ready.append(ticket)
                self.changed.notify_all()
        if not is_here:  # it ended meanwhile
            self.give_back(ticket)

    def send_back(self, ticket: Ticket) -> None:
        """Have a job that is ready prepared again; what it holds is free for others meanwhile."""
        with self.lock:
            self.ready.remove(ticket)
            ticket.stage = "preparing"
            self._preparing += 1
            self.give_back(ticket)

    def expected_wait(self, job_id: str | None = None) -> float:
        """Return about how many seconds a job has to wait; without an id, one that came now."""
        with self.lock:
            ticket = None if job_id is None else self._tickets.get(job_id)
            if ticket is not None and ticket.stage != "waiting":
                return 0.0
            ahead = self.line.ahead(ticket, now=time.monotonic())
            if ahead + self._preparing + len(self.ready) < self.free_rows:
                return 0.0
            return (1 + ahead) * self._job_seconds / self._rows

    def has_begun(self, ticket: Ticket) -> None:
        """Let a ready job run: all its texts have rows."""
        with self.lock:
            self.ready.remove(ticket)
            ticket.stage = "running"

    def give_back(self, ticket: Ticket) -> None:
        """Let go of what is pinned for a job, and tell threads that wait for memory."""
        ticket.release()
        self.tell_freed()

    def tell_freed(self) -> None:
        """Say that memory was given back."""
        with self.lock:
            self.freed += 1
            self.changed.notify_all()

    def call_off(self, job_id: str) -> None:
        """Say that a job is no longer wanted; one that waits ends at once."""
        with self.lock:
            ticket = self._tickets.get(job_id)
            if ticket is None:
                return
            ticket.is_cancelled = True
            waits = self.line.remove(ticket)
            self.changed.notify_all()
        if waits:
            self.fail(ticket, CancelledError("the job was cancelled"))

    def fail(self, ticket: Ticket, error: ExpertError) -> bool:
        """End a job that has no text in the batch; False when it had ended."""
        with self.lock:  # a thread that needs memory finds the job here, or what it held
            if not self._leave(ticket):
                return False
            if isinstance(error, CancelledError):
                self.totals.cancelled += 1
            else:
                self.totals.failed += 1
            self.give_back(ticket)
        error.__cause__ = error.__context__ = None  # their frames hold the prompt, and experts
        ticket.tell(Failed(error.with_traceback(None)))
        return True

    def finish(self, ticket: Ticket, finished: Finished) -> None:
        """End a job with its answers."""
        with self.lock:
            if not self._leave(ticket):
                return
            if ticket.job.remember:
                self._count(ticket, finished)
        ticket.tell(finished)

    def close(self, *, seconds: float) -> None:
        """Take no more jobs; wait so long for those that are here, then call them off."""
        until = time.monotonic() + seconds
        with self.lock:
            self.is_closing = True
            while self._tickets and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
        for ticket in self.tickets:
            self.call_off(ticket.job.id)

    def abandon(self, error: ExpertError) -> None:
        """Take no more jobs, and end all that are here."""
        with self.lock:
            self.is_closing = True
            for ticket in self.line:
                self.line.remove(ticket)
        for ticket in self.tickets:
            ticket.is_cancelled = True
            self.fail(ticket, error)

    @property
    def is_done(self) -> bool:
        """Whether no job is here or will come."""
        return self.is_closing and not self._tickets

    def check_integrity(self) -> None:
        """Assert what always holds."""
        with self.lock:
            self.line.check_integrity()
            stages = [ticket.stage for ticket in self._tickets.values()]
            assert "ended" not in stages
            assert stages.count("waiting") == len(self.line)
            assert stages.count("preparing") + stages.count("loading") == self._preparing
            assert all(ticket.job.id in self._tickets for ticket in self.ready)
            assert all(ticket.memory is None for ticket in self.line)

    def _may_prepare(self, now: float) -> bool:
        """Whether a job may be prepared: not too far ahead, nor starving those that lack memory."""
        tickets = self._tickets.values()
        waits = [t.lacks_since for t in tickets if t.lacks_since is not None]
        checked = sum(t.stage == "concluding" and t.job.check is not None for t in tickets)
        ahead = self._preparing + len(self.ready) - self.free_rows
        waited = (now - min(waits, default=now)) % ROUND_SECONDS
        is_drained = PATIENCE_SECONDS <= waited < PATIENCE_SECONDS + DRAIN_SECONDS
        is_held = is_drained or self.is_short
        return ahead < AHEAD and checked <= self._rows and not is_held

    def _leave(self, ticket: Ticket) -> bool:
        """Take a job off the board; False when it was off already."""
        if self._tickets.pop(ticket.job.id, None) is None:
            return False
        if ticket.stage in {"preparing", "loading"}:
            self._preparing -= 1
        if ticket in self.ready:
            self.ready.remove(ticket)
        ticket.stage = "ended"
        self.changed.notify_all()
        return True

    def _count(self, ticket: Ticket, finished: Finished) -> None:
        results, totals = finished.results, self.totals
        if ticket.is_cancelled:
            totals.cancelled += 1
        else:
            totals.finished += 1
        totals.prompt_tokens += sum(result.prompt_tokens for result in results)
        totals.reused_tokens += sum(result.kv_reused_tokens for result in results)
        totals.experts.count(ticket.refs)
        totals.generated_tokens += sum(len(result.generated.tokens) for result in results)
        took = time.monotonic() - ticket.left_line
        self._job_seconds = _FORGETS * self._job_seconds + (1 - _FORGETS) * took

    def _refusal(self) -> RateLimitError:
        if self.is_closing:
            return RateLimitError("the server is ending", retry_after=_LONGEST_WAIT)
        waits = self.expected_wait()
        return RateLimitError(
            f"{len(self.line)} jobs wait already, and no more of yours may",
            retry_after=max(1, min(round(waits), _LONGEST_WAIT)),
            hint="send it again later",
        )
