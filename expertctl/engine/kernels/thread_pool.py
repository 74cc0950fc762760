"""The thread pool of the CPU backend: mailboxes, work sharing in compiled code, and `ThreadPool`.

**Mailbox.** A sleeping worker waits at a mailbox: four cache lines with the last posted number, a
mutex and the condition variable of its only waiting thread. Nothing here takes the interpreter's
lock, so a worker wakes up at once even while Python is busy.

**Work sharing.** The state is one number, the ticket: the current run, operation and next item. It
does not return to an earlier value (within 2^25 runs), so a claim, a compare-and-swap, fails for a
worker that looked at a finished run. What workers read before they claim is memory of the pool that
stays allocated: `SHARED_WORDS` int64 and the operation buffer. The next operation begins when all
items of the last one are done, not when all workers have reported: a worker that the system delays
is waited for only while it has claimed items, so it may look at the state at any moment of a later
run. The length written there names its run, as the ticket does.

A claim takes half of the worker's fair share of the rest, so that workers read long ranges of
memory with few claims, while the last claims are small enough that all workers finish together.

**Pool.** The caller's thread is one of the workers. Which worker computes an item never changes a
result. Between runs the threads sleep. A run is one call of compiled code: no signal interrupts it,
and it does not hold the interpreter's lock.
"""

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import load_functions
from expertctl.engine.kernels.machine_code import FunctionSource
from expertctl.engine.kernels.program import Program

_CODE = "expertctl.engine.kernels.compiled.thread_pool"
"""The module with the code, which is imported only to compile it."""
MAILBOX_BYTES = 256
CLOSED = -1
"""Posted to threads that are to exit."""

_LINE = 64
TICKET, DONE, LENGTH, BUFFER, TIMES, LAST_TIME, CLOCK, SHARE = (k * _LINE for k in range(8))
"""Offsets in the shared memory; each number that all workers write has its own cache line.

The length is the final value of the ticket, without items: the run, and its number of operations.
The share divides the rest of an operation: a claim takes one in this many items.
"""
SHARED_WORDS = 8 * _LINE // 8
TABLE_BYTES, OPERATION_BYTES = 32, 64
RUN_SHIFT, OPERATION_SHIFT = 38, 24
MAX_ITEMS, MAX_OPERATIONS = (1 << 24) - 1, (1 << 14) - 1


@dataclass(frozen=True, slots=True)
class PoolFunctions:
    """The compiled functions, called without the interpreter's lock; arguments are addresses."""

    run_single_threaded: Callable[[int, int, int, int], int]
    """Run a table on this thread: table, operations, shared memory, times (or 0)."""
    run_threaded: Callable[[int, int, int, int, int, int], int]
    """The same with other workers: ..., shared memory, mailboxes, how many of them, times (or 0).

    Returns 0, and runs nothing, if there is more than a ticket can count; else 1.
    """
    serve_worker: Callable[[int, int], int]
    """Take part in every posted run until the mailbox is closed: shared memory, mailbox."""
    initialise_mailbox: Callable[[int], int]
    """Initialise a mailbox in zeroed memory."""
    post_message: Callable[[int, int], int]
    """Post a number at a mailbox and wake the thread that waits there."""


_ARITIES = {
    "run_single_threaded": 4,
    "run_threaded": 6,
    "serve_worker": 2,
    "initialise_mailbox": 1,
    "post_message": 2,
}
POOL_SOURCES = {
    f"pool {name}": FunctionSource(_CODE, name, arity, {}) for name, arity in _ARITIES.items()
}
"""The functions of `PoolFunctions`, in order."""


@cache
def load_pool_functions() -> PoolFunctions:
    """Return the functions, compiled or loaded from the cache."""
    return PoolFunctions(*(loaded.call for loaded in load_functions(POOL_SOURCES)))


def set_operation_buffer(shared: AnyArray, buffer: int) -> None:
    """Set, between two runs, where the operations of the next runs are written."""
    shared[BUFFER // 8] = buffer


def is_idle(shared: AnyArray) -> bool:
    """Return whether every operation of the last run is done."""
    reached = int(shared[TICKET // 8]) >> OPERATION_SHIFT
    return bool(shared[DONE // 8] == 0 and reached == shared[LENGTH // 8])


_INITIAL_OPERATIONS = 512


class ThreadPool:
    """A pool of at most ``workers`` threads; runs of several callers take turns.

    The threads start when they are first needed, and again in a process forked from this one; they
    end with `close`, with the pool, or with the interpreter.
    """

    def __init__(self, workers: int) -> None:
        """Use at most this many threads, including the caller's."""
        self.workers = max(workers, 1)
        self._teams: dict[int, _WorkerGroup] = {}
        """By process id: a fork does not inherit its parent's threads."""
        self._closed = False

    def run(self, program: Program, *, workers: int | None = None) -> None:
        """Run a program.

        Raises:
            ValueError: the pool was closed, or there is more than a ticket can count.
        """
        self._run_table(program.table, workers, 0)

    def run_timed(self, program: Program, *, workers: int | None = None) -> AnyArray:
        """Run a program like `run`; return the seconds of each operation, float64 [operations]."""
        spent = np.zeros(len(program.table), np.int64)
        self._run_table(program.table, workers, spent.ctypes.data)
        return spent / 1e9

    def close(self) -> None:
        """End the threads; no run is possible afterwards."""
        self._closed = True
        team = self._teams.get(os.getpid())
        if team is not None:
            team.stop()

    def check_integrity(self) -> None:
        """Check that no run was left unfinished."""
        team = self._teams.get(os.getpid())
        if team is not None:
            team.check_integrity()

    def _run_table(self, table: AnyArray, workers: int | None, times: int) -> None:
        self._check_open()
        team = self._current_workers()
        with team.lock:
            self._check_open()  # again: another caller may have closed it in between
            team.run(table, max(min(workers or self.workers, self.workers), 1), times)

    def _current_workers(self) -> "_WorkerGroup":
        """Return the workers of this process; of two that callers create at once, one stays."""
        process = os.getpid()
        return self._teams.get(process) or self._teams.setdefault(process, _WorkerGroup(process))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the thread pool was closed")


class _WorkerGroup:
    """The threads of one pool in one process, and the memory that they share.

    The caller of a run holds the lock.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._sharing = load_pool_functions()
        self.lock = threading.Lock()
        self._shared = aligned_zeros(SHARED_WORDS, np.int64)
        self._address = self._shared.ctypes.data
        self._rooms: list[AnyArray] = []
        """Operation buffers; all stay allocated, because a late worker may still read them."""
        self._posts: list[AnyArray] = []
        self._addresses = np.zeros(0, np.int64)
        self._threads: list[threading.Thread] = []
        ends = (self._process, self._sharing, self._posts, self._threads)
        self._end = weakref.finalize(self, _stop_workers, *ends)

    def run(self, table: AnyArray, workers: int, times: int) -> None:
        what = table.ctypes.data, len(table), self._address
        if workers == 1:
            self._sharing.run_single_threaded(*what, times)
            return
        self._start_workers(workers - 1)
        self._grow_buffer(len(table))
        posts = self._addresses.ctypes.data
        if not self._sharing.run_threaded(*what, posts, workers - 1, times):
            raise ValueError(f"more than {MAX_ITEMS} items or {MAX_OPERATIONS} operations in a run")

    def stop(self) -> None:
        with self.lock:
            self._end()

    def check_integrity(self) -> None:
        with self.lock:
            assert is_idle(self._shared), "a run was left unfinished"

    def _start_workers(self, others: int) -> None:
        while len(self._threads) < others:
            post = aligned_zeros(MAILBOX_BYTES, np.uint8)
            self._sharing.initialise_mailbox(post.ctypes.data)
            self._posts.append(post)
            self._addresses = np.array([post.ctypes.data for post in self._posts], np.int64)
            work = (self._sharing, self._shared, post, self._rooms)
            thread = threading.Thread(target=_run_worker, args=work, name="crew", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _grow_buffer(self, operations: int) -> None:
        room = self._rooms[-1].nbytes if self._rooms else 0
        if operations * OPERATION_BYTES > room:
            size = max(OPERATION_BYTES * max(operations, _INITIAL_OPERATIONS), 2 * room)
            self._rooms.append(aligned_zeros(size, np.uint8))
            set_operation_buffer(self._shared, self._rooms[-1].ctypes.data)


def _run_worker(
    sharing: PoolFunctions, shared: AnyArray, post: AnyArray, _rooms: list[AnyArray]
) -> None:
    """Serve runs, on a thread that keeps alive the memory it reads."""
    sharing.serve_worker(shared.ctypes.data, post.ctypes.data)


def _stop_workers(
    process: int, sharing: PoolFunctions, posts: list[AnyArray], threads: list[threading.Thread]
) -> None:
    if os.getpid() == process:
        for post in posts:
            sharing.post_message(post.ctypes.data, CLOSED)
        for thread in threads:
            thread.join()
