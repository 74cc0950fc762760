"""The scheduler: a bounded queue by priority, fair among owners, and the stage of each job.

The next turn goes to the owner of a job of the highest priority; among several such owners, to the
one with the least service so far. Service counts from the moment an owner arrives, so no owner
accumulates turns while away (start-time fair queueing, Goyal et al. 1996). Owners that are not
served rise by one priority every `AGING_SECONDS`, and so does each job among those of its owner: no
owner and no job starves.

So that one owner with many jobs does not keep others out, all owners that sent jobs within
`SHARE_SECONDS` have equal shares of the places; a single owner may use all of them.

A job is *waiting* in the queue, then *preparing* while it is planned or lacks memory, *loading*
while its experts are loaded, *ready* for a row, *running*, *concluding*, and *ended*. The threads
of an engine decide under the scheduler's lock.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from expertctl.engine.serving.request import JobFailed, JobFinished, JobTotals, RequestState
from expertctl.errors import CancelledError, ExpertError, RateLimitError

AGING_SECONDS = 10.0
SHARE_SECONDS = 60.0


class QueueItem(Protocol):
    """What the queue needs to know of a job."""

    @property
    def owner(self) -> str:
        """The owner of the job."""

    @property
    def priority(self) -> int:
        """0 to 9; 9 is served first."""

    @property
    def cost(self) -> float:
        """Share of a turn that it takes; 1 is one answer."""


Item = TypeVar("Item", bound=QueueItem)


@dataclass(frozen=True, slots=True)
class _QueuedItem(Generic[Item]):
    item: Item
    number: int
    since: float

    def compute_level(self, now: float, served: float) -> int:
        """Return the priority, raised since it arrived or since its owner was last served."""
        return self.item.priority + int((now - max(self.since, served)) / AGING_SECONDS)

    def compute_order(self, now: float) -> tuple[int, int]:
        """Return the sort key among the jobs of its owner, by priority raised since arrival."""
        return -self.compute_level(now, self.since), self.number


class FairRequestQueue(Generic[Item]):
    """Jobs whose preparation has not started; times are seconds of one clock."""

    def __init__(self, bound: int) -> None:
        """Allow at most ``bound`` waiting jobs."""
        self.bound = bound
        self._places: list[_QueuedItem[Item]] = []
        self._served: dict[str, float] = {}
        self._last: dict[str, float] = {}
        """When owners with waiting jobs were last served."""
        self._asked: dict[str, float] = {}
        """When owners last sent a job."""
        self._begun = 0.0
        """Service received by the owner of the last job taken, before that job."""
        self._numbers = 0

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        """Yield the waiting jobs in order of arrival."""
        return iter([place.item for place in self._places])

    @property
    def is_full(self) -> bool:
        """Whether the queue is full."""
        return len(self._places) >= self.bound

    def add(self, item: Item, *, now: float) -> bool:
        """Add a job; return False when the queue or its owner's share of it is full."""
        self._asked = {o: at for o, at in self._asked.items() if now - at < SHARE_SECONDS}
        self._asked[item.owner] = now
        share = max(1, self.bound // len(self._asked))
        own = sum(place.item.owner == item.owner for place in self._places)
        if self.is_full or own >= share:
            return False
        self._numbers += 1
        self._places.append(_QueuedItem(item, self._numbers, now))
        self._served[item.owner] = max(self._served.get(item.owner, 0.0), self._begun)
        return True

    def take(self, *, now: float) -> Item | None:
        """Remove and return the next job; None when none waits."""
        if not self._places:
            return None
        owner = min(self._places, key=lambda place: self._compute_turn(place, now)).item.owner
        own = (place for place in self._places if place.item.owner == owner)
        place = min(own, key=lambda place: place.compute_order(now))
        self._places.remove(place)
        self._begun = self._served[owner]
        self._served[owner] += place.item.cost
        self._last[owner] = now
        self._forget_absent_owners()
        return place.item

    def count_ahead(self, item: Item | None, *, now: float) -> int:
        """Estimate how many jobs come before one; all, if it is not in the queue.

        Of the same owner these are the jobs served before it; of each other owner all of higher
        priority or, if more, as many of equal or higher priority as it takes to catch up with its
        owner.
        """
        own = next((place for place in self._places if place.item is item), None)
        if own is None:
            return len(self._places)
        turns = dict[str, list[tuple[float, float, int]]]()
        for place in self._places:
            turns.setdefault(place.item.owner, []).append(self._compute_turn(place, now))
        owner = own.item.owner
        del turns[owner]
        level, served, _ = self._compute_turn(own, now)
        mine = (place for place in self._places if place.item.owner == owner)
        of_owner = sum(place.compute_order(now) < own.compute_order(now) for place in mine)
        ahead = of_owner
        for theirs in turns.values():
            higher = sum(turn[0] < level for turn in theirs)
            at_least = sum(turn[0] <= level for turn in theirs)
            catch_up = math.ceil(served + of_owner - theirs[0][1])
            ahead += max(higher, min(at_least, catch_up))
        return ahead

    def remove(self, item: Item) -> bool:
        """Remove a cancelled job; return False when it was not in the queue."""
        for place in self._places:
            if place.item is item:
                self._places.remove(place)
                self._forget_absent_owners()
                return True
        return False

    def check_integrity(self) -> None:
        """Assert the invariants."""
        assert len(self._places) <= self.bound
        assert {place.item.owner for place in self._places} <= self._served.keys()
        numbers = [place.number for place in self._places]
        assert numbers == sorted(set(numbers))

    def _compute_turn(self, place: _QueuedItem[Item], now: float) -> tuple[float, float, int]:
        owner = place.item.owner
        level = place.compute_level(now, self._last.get(owner, place.since))
        return -level, self._served[owner], place.number

    def _forget_absent_owners(self) -> None:
        """Drop absent owners that would be treated like new ones."""
        here = {place.item.owner for place in self._places}
        self._last = {owner: at for owner, at in self._last.items() if owner in here}
        self._served = {
            owner: served
            for owner, served in self._served.items()
            if owner in here or served > self._begun
        }


MAX_PREPARED_AHEAD = 2
"""Number of jobs prepared in addition to the free rows."""
POLL_SECONDS = 0.5
"""Maximum sleep of a thread before it checks deadlines."""
PATIENCE_SECONDS, DRAIN_SECONDS, ROUND_SECONDS = 5.0, 30.0, 60.0
"""While a job lacks memory: how long others are prepared, how long none is, and the period."""
_LONGEST_WAIT = 60
_AVERAGE_DECAY = 0.8
"""Weight of the previous average job duration when a job ends."""


class Scheduler:
    """The owner of all jobs that have not ended."""

    def __init__(self, *, queue: int, rows: int) -> None:
        """Start without jobs."""
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.queue = FairRequestQueue[RequestState](queue)
        self.ready: deque[RequestState] = deque()
        self.control_queue: deque[Callable[[], None]] = deque()
        """Calls for the engine loop to make between two passes."""
        self.totals = JobTotals()
        self.freed_count = 0
        """How often memory was released."""
        self.free_rows = self._rows = rows
        self.is_closing = False
        self.is_short = False
        """Whether sequences are paused because of missing memory: then no other one starts."""
        self._states: dict[str, RequestState] = {}
        self._preparing = 0
        self._job_seconds = 1.0

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All jobs that have not ended."""
        with self.lock:
            return tuple(self._states.values())

    @property
    def preparing_count(self) -> int:
        """Number of jobs being planned or loaded."""
        return self._preparing

    def enqueue(self, state: RequestState) -> None:
        """Add a new job to the queue.

        Raises:
            RateLimitError: when it or the owner's share of it is full, or the engine is ending.
        """
        with self.lock:
            assert state.job.id not in self._states, "a job has an id of its own"
            if self.is_closing or not self.queue.add(state, now=time.monotonic()):
                self.totals.refused += 1
                raise self._make_rate_limit_error()
            self._states[state.job.id] = state
            self.condition.notify_all()

    def run_between_passes(self, call: Callable[[], None]) -> Future[None]:
        """Schedule a call between two passes; the future gets its exception."""
        done = Future[None]()

        def do() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  # raised again by the future
                done.set_exception(error)
            else:
                done.set_result(None)

        with self.lock:
            self.control_queue.append(do)
            self.condition.notify_all()
        return done

    def stop_with_error(self, error: ExpertError) -> None:
        """Make the engine loop end, with all jobs, by an error that another thread raised."""
        again = copy(error)  # the failed job gets the original, in another thread

        def end() -> None:
            raise again

        with self.lock:
            self.control_queue.append(end)
            self.condition.notify_all()

    def take_next(self) -> RequestState | None:
        """Take the next job from the queue, if there may soon be a row for it."""
        with self.lock:
            now = time.monotonic()
            if not self._can_prepare(now):
                return None
            state = self.queue.take(now=now)
            if state is not None:
                state.stage, state.left_queue_at = "preparing", now
                self._preparing += 1
            return state

    def mark_loading(self, state: RequestState) -> None:
        """Mark a job as loading, so that it may take memory."""
        with self.lock:
            state.stage = "loading"

    def mark_waiting_for_memory(self, state: RequestState) -> None:
        """Mark a job as waiting for memory; it holds none."""
        with self.lock:
            state.stage = "preparing"
            if state.memory_missing_since is None:
                state.memory_missing_since = time.monotonic()
            self.condition.notify_all()

    @property
    def is_loading(self) -> bool:
        """Whether a job is taking memory, which it may soon release."""
        return any(state.stage == "loading" for state in self.requests)

    def mark_ready(self, state: RequestState) -> None:
        """Mark a job as ready for rows; everything but its KV is in memory."""
        with self.lock:
            is_here = state.job.id in self._states
            if is_here:
                self._preparing -= 1
                state.stage, state.memory_missing_since = "ready", None
                self.ready.append(state)
                self.condition.notify_all()
        if not is_here:  # it ended meanwhile
            self.release(state)

    def requeue(self, state: RequestState) -> None:
        """Prepare a ready job again; its memory is free for others meanwhile."""
        with self.lock:
            self.ready.remove(state)
            state.stage = "preparing"
            self._preparing += 1
            self.release(state)

    def estimate_wait(self, job_id: str | None = None) -> float:
        """Estimate the wait of a job in seconds; without an id, of a new job."""
        with self.lock:
            state = None if job_id is None else self._states.get(job_id)
            if state is not None and state.stage != "waiting":
                return 0.0
            ahead = self.queue.count_ahead(state, now=time.monotonic())
            if ahead + self._preparing + len(self.ready) < self.free_rows:
                return 0.0
            return (1 + ahead) * self._job_seconds / self._rows

    def mark_running(self, state: RequestState) -> None:
        """Mark a ready job as running: all its sequences have rows."""
        with self.lock:
            self.ready.remove(state)
            state.stage = "running"

    def release(self, state: RequestState) -> None:
        """Unpin the plan of a job, and wake threads that wait for memory."""
        state.release()
        self.notify_freed()

    def notify_freed(self) -> None:
        """Notify threads that memory was released."""
        with self.lock:
            self.freed_count += 1
            self.condition.notify_all()

    def cancel(self, job_id: str) -> None:
        """Cancel a job; one that is in the queue ends at once."""
        with self.lock:
            state = self._states.get(job_id)
            if state is None:
                return
            state.is_cancelled = True
            waits = self.queue.remove(state)
            self.condition.notify_all()
        if waits:
            self.fail(state, CancelledError("the job was cancelled"))

    def fail(self, state: RequestState, error: ExpertError) -> bool:
        """Fail a job without a sequence in the batch; return False when it had ended."""
        with self.lock:  # a thread that needs memory finds the job here, or its memory free
            if not self._remove(state):
                return False
            if isinstance(error, CancelledError):
                self.totals.cancelled += 1
            else:
                self.totals.failed += 1
            self.release(state)
        error.__cause__ = error.__context__ = None  # their frames hold the prompt, and experts
        state.emit(JobFailed(error.with_traceback(None)))
        return True

    def finish(self, state: RequestState, finished: JobFinished) -> None:
        """End a job with its answers."""
        with self.lock:
            if not self._remove(state):
                return
            if state.job.remember:
                self._count_finished(state, finished)
        state.emit(finished)

    def close(self, *, seconds: float) -> None:
        """Accept no more jobs; wait so long for current ones, then cancel them."""
        until = time.monotonic() + seconds
        with self.lock:
            self.is_closing = True
            self.condition.notify_all()  # an idle loop ends at once
            while self._states and (left := until - time.monotonic()) > 0:
                self.condition.wait(left)
        self.cancel_all()

    def cancel_all(self) -> None:
        """Cancel all current jobs."""
        for state in self.requests:
            self.cancel(state.job.id)

    def fail_all(self, error: ExpertError) -> None:
        """Accept no more jobs, and fail all current ones."""
        with self.lock:
            self.is_closing = True
            self.condition.notify_all()
            for state in self.queue:
                self.queue.remove(state)
        for state in self.requests:
            state.is_cancelled = True
            self.fail(state, error)

    @property
    def is_done(self) -> bool:
        """Whether no job is left and none will come."""
        return self.is_closing and not self._states

    def check_integrity(self) -> None:
        """Assert the invariants."""
        with self.lock:
            self.queue.check_integrity()
            stages = [state.stage for state in self._states.values()]
            assert "ended" not in stages
            assert stages.count("waiting") == len(self.queue)
            assert stages.count("preparing") + stages.count("loading") == self._preparing
            assert all(state.job.id in self._states for state in self.ready)
            assert all(state.memory is None for state in self.queue)

    def _can_prepare(self, now: float) -> bool:
        """Return whether a job may be prepared: not too far ahead, nor starving blocked jobs."""
        states = self._states.values()
        waits = [t.memory_missing_since for t in states if t.memory_missing_since is not None]
        checked = sum(t.stage == "concluding" and t.job.check is not None for t in states)
        ahead = self._preparing + len(self.ready) - self.free_rows
        waited = (now - min(waits, default=now)) % ROUND_SECONDS
        is_drained = PATIENCE_SECONDS <= waited < PATIENCE_SECONDS + DRAIN_SECONDS
        is_held = is_drained or self.is_short
        return ahead < MAX_PREPARED_AHEAD and checked <= self._rows and not is_held

    def _remove(self, state: RequestState) -> bool:
        """Remove a job; return False when it was removed already."""
        if self._states.pop(state.job.id, None) is None:
            return False
        if state.stage in {"preparing", "loading"}:
            self._preparing -= 1
        if state in self.ready:
            self.ready.remove(state)
        state.stage = "ended"
        self.condition.notify_all()
        return True

    def _count_finished(self, state: RequestState, finished: JobFinished) -> None:
        results, totals = finished.results, self.totals
        if state.is_cancelled:
            totals.cancelled += 1
        else:
            totals.finished += 1
        totals.prompt_tokens += sum(result.prompt_tokens for result in results)
        totals.reused_tokens += sum(result.kv_reused_tokens for result in results)
        totals.experts.count(state.refs)
        totals.generated_tokens += sum(len(result.generated.tokens) for result in results)
        took = time.monotonic() - state.left_queue_at
        self._job_seconds = _AVERAGE_DECAY * self._job_seconds + (1 - _AVERAGE_DECAY) * took

    def _make_rate_limit_error(self) -> RateLimitError:
        if self.is_closing:
            return RateLimitError("the server is ending", retry_after=_LONGEST_WAIT)
        waits = self.estimate_wait()
        return RateLimitError(
            f"{len(self.queue)} jobs are waiting, and your share of the queue is full",
            retry_after=max(1, min(round(waits), _LONGEST_WAIT)),
            hint="retry later",
        )
