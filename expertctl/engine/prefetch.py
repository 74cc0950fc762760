"""Experts brought before they are asked for: the needs of planned jobs.

A caller that knows what a job will need announces it for as long as that holds. The needs are
brought one after another, those of earlier jobs first, by threads that only read and verify:
`Tiers` decides, and evicts nothing for them that is in use or needed sooner. A thread lives as long
as there is something to bring, so an idle engine has none.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic

from expertctl.engine.eviction import Ticket
from expertctl.engine.tiers import Key, Resident, Tiers, Wanted


@dataclass(frozen=True, slots=True)
class _Need(Generic[Resident]):
    wanted: Wanted[Resident]
    ticket: Ticket


class Prefetch(Generic[Resident]):
    """The owner of the queue of known needs."""

    def __init__(self, tiers: Tiers, *, workers: int = 1) -> None:
        """Begin with no need; one thread reads as fast as a disk gives, and hashes on another."""
        self._tiers, self._workers = tiers, workers
        self._needs: deque[_Need[Resident]] = deque()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._threads = set[threading.Thread]()

    @contextmanager
    def expect(
        self, wanted: Sequence[Wanted[Resident]], *, plan: Key | None = None
    ) -> Iterator[None]:
        """Begin to bring what a job will need, unless its compiled plan is there.

        Leave it when the job has pinned what it needs, or is given up: what is absent by then is
        not brought, and what came but is not needed is evicted.
        """
        ready = plan is not None and self._tiers.holds(plan)
        needed = () if ready else wanted
        keys = [item.key for item in needed]
        with self._tiers.expecting(keys if plan is None else [*keys, plan]) as ticket:
            absent = (item for item in needed if not self._tiers.holds(item.key))
            self._bring([_Need(item, ticket) for item in absent])
            yield

    def wait(self) -> None:
        """Return when there is nothing left to bring."""
        with self._lock:
            self._idle.wait_for(lambda: not self._working)

    def check_integrity(self) -> None:
        """Assert that every need has a thread that will come to it."""
        with self._lock:
            assert self._working <= self._workers
            assert self._working or not self._needs

    @property
    def _working(self) -> int:
        """How many threads there are; one that could not begin is none."""
        return sum(thread.is_alive() for thread in self._threads)

    def _bring(self, needs: Sequence[_Need[Resident]]) -> None:
        with self._lock:
            self._needs.extend(needs)
            new = min(self._workers, len(self._needs)) - self._working
            for _ in range(max(0, new)):
                thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _work(self) -> None:
        while (need := self._next()) is not None:
            with suppress(BaseException):  # whatever ends a reading, its request reads again
                self._tiers.fetch(need.wanted, need.ticket)
            del need  # what it refers to belongs to the job

    def _next(self) -> _Need[Resident] | None:
        with self._lock:
            if self._needs:
                return self._needs.popleft()
            self._threads.discard(threading.current_thread())
            self._idle.notify_all()
            return None
