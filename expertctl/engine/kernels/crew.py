"""The crew: threads that run a program's operations together, the caller's among them.

A worker that is free claims the next items of an operation (`sharing`); which worker does an item
changes no bit of it. Between runs the threads sleep (`waiting`). A run is one call of compiled
code: no signal interrupts it, and it does not hold the interpreter's lock.
"""

import os
import threading
import weakref
from typing import Any

import numpy as np

from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.program import Program
from expertctl.engine.kernels.sharing import (
    MOST_ITEMS,
    MOST_OPERATIONS,
    ROW_BYTES,
    SHARED_WORDS,
    Sharing,
    is_idle,
    lend_room,
    sharing,
)
from expertctl.engine.kernels.waiting import CLOSED, POST_BYTES

Numbers = np.ndarray[Any, Any]

_FIRST_ROOM = 512


class Crew:
    """So many workers at most. The runs of several callers take turns.

    The threads start when they are first needed, and anew in a process forked from this one;
    they end with `close`, with the crew, or with the interpreter.
    """

    def __init__(self, workers: int) -> None:
        """Use at most so many threads, the caller's among them."""
        self.workers = max(workers, 1)
        self._teams: dict[int, _Team] = {}
        """By process: a fork leaves its parent's threads behind."""
        self._closed = False

    def run(self, program: Program, *, workers: int | None = None) -> None:
        """Run a program.

        Raises:
            ValueError: the crew was closed, or there is more than a ticket can count.
        """
        self._run(program.table, workers, 0)

    def timed(self, program: Program, *, workers: int | None = None) -> Numbers:
        """Run a program like `run`; return float64 [operations], the seconds that each took."""
        spent = np.zeros(len(program.table), np.int64)
        self._run(program.table, workers, spent.ctypes.data)
        return spent / 1e9

    def close(self) -> None:
        """End the threads; no run is possible after that."""
        self._closed = True
        team = self._teams.get(os.getpid())
        if team is not None:
            team.dismiss()

    def check_integrity(self) -> None:
        """Check that no run was left halfway."""
        team = self._teams.get(os.getpid())
        if team is not None:
            team.check_integrity()

    def _run(self, table: Numbers, workers: int | None, times: int) -> None:
        self._check_open()
        team = self._team()
        with team.lock:
            self._check_open()  # again, for another caller may have closed it in between
            team.run(table, max(min(workers or self.workers, self.workers), 1), times)

    def _team(self) -> "_Team":
        """Return the team of this process; of two that callers make at once, one stays."""
        process = os.getpid()
        return self._teams.get(process) or self._teams.setdefault(process, _Team(process))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the crew was closed")


class _Team:
    """The threads of one crew in one process, and the memory that they share.

    The caller that runs something holds the lock.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._sharing = sharing()
        self.lock = threading.Lock()
        self._shared = aligned(SHARED_WORDS, np.int64)
        self._address = self._shared.ctypes.data
        self._rooms: list[Numbers] = []
        """Room for operations; all of it stays, for a worker that is late may look there."""
        self._posts: list[Numbers] = []
        self._addresses = np.zeros(0, np.int64)
        self._threads: list[threading.Thread] = []
        ends = (self._process, self._sharing, self._posts, self._threads)
        self._end = weakref.finalize(self, _dismiss, *ends)

    def run(self, table: Numbers, workers: int, times: int) -> None:
        what = table.ctypes.data, len(table), self._address
        if workers == 1:
            self._sharing.run_alone(*what, times)
            return
        self._hire(workers - 1)
        self._make_room(len(table))
        posts = self._addresses.ctypes.data
        if not self._sharing.run_shared(*what, posts, workers - 1, times):
            raise ValueError(f"over {MOST_ITEMS} items or {MOST_OPERATIONS} operations in a run")

    def dismiss(self) -> None:
        with self.lock:
            self._end()

    def check_integrity(self) -> None:
        with self.lock:
            assert is_idle(self._shared), "a run was left halfway"

    def _hire(self, others: int) -> None:
        while len(self._threads) < others:
            post = aligned(POST_BYTES, np.uint8)
            self._sharing.begin_post(post.ctypes.data)
            self._posts.append(post)
            self._addresses = np.array([post.ctypes.data for post in self._posts], np.int64)
            work = (self._sharing, self._shared, post, self._rooms)
            thread = threading.Thread(target=_attend, args=work, name="crew", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _make_room(self, operations: int) -> None:
        room = self._rooms[-1].nbytes if self._rooms else 0
        if operations * ROW_BYTES > room:
            size = max(operations * ROW_BYTES, 2 * room, _FIRST_ROOM * ROW_BYTES)
            self._rooms.append(aligned(size, np.uint8))
            lend_room(self._shared, self._rooms[-1].ctypes.data)


def _attend(sharing: Sharing, shared: Numbers, post: Numbers, _rooms: list[Numbers]) -> None:
    """Work, on a thread that keeps alive what it reads."""
    sharing.attend(shared.ctypes.data, post.ctypes.data)


def _dismiss(
    process: int, sharing: Sharing, posts: list[Numbers], threads: list[threading.Thread]
) -> None:
    if os.getpid() == process:
        for post in posts:
            sharing.send(post.ctypes.data, CLOSED)
        for thread in threads:
            thread.join()
