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
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import Program, load_or_compile
from expertctl.engine.kernels.memory import (
    atomic_compare_exchange,
    atomic_fetch_add,
    atomic_load,
    atomic_store,
    call_kernel,
    load_int64s,
    pause_cpu,
    yield_thread,
)

MAILBOX_BYTES = 256
CLOSED = -1
"""Posted to threads that are to exit."""
_LOCK, _CONDITION = 64, 128
_SPIN_COUNT = 1000
"""How often a thread polls before it sleeps: some 30 µs, the time between two programs."""

_init_lock = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
_init_condition = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))
_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_wait_condition = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_notify_condition = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))


@numba.njit
def initialise_mailbox(post: Any) -> None:
    """Initialise a mailbox in zeroed memory."""
    _init_lock(post + _LOCK, 0)
    _init_condition(post + _CONDITION, 0)


@numba.njit
def post_message(post: Any, number: Any) -> None:
    """Post a number and wake the thread that waits; a closed mailbox stays closed."""
    _lock(post + _LOCK)
    if atomic_load(post) != CLOSED:
        atomic_store(post, number)
    _notify_condition(post + _CONDITION)
    _unlock(post + _LOCK)


@numba.njit
def wait_for_message(post: Any, seen: Any) -> Any:
    """Wait until a number other than ``seen`` is posted; return it."""
    for _ in range(_SPIN_COUNT):
        if atomic_load(post) != seen:
            return atomic_load(post)
        pause_cpu()
    _lock(post + _LOCK)
    while atomic_load(post) == seen:
        _wait_condition(post + _CONDITION, post + _LOCK)
    _unlock(post + _LOCK)
    return atomic_load(post)


_LINE = 64
_TICKET, _DONE, _LENGTH, _BUFFER, _TIMES, _LAST_TIME, _CLOCK, _SHARE = (k * _LINE for k in range(8))
"""Offsets in the shared memory; each number that all workers write has its own cache line.

The length is the final value of the ticket, without items: the run, and its number of operations.
The share divides the rest of an operation: a claim takes one in this many items.
"""
SHARED_WORDS = 8 * _LINE // 8
TABLE_BYTES, OPERATION_BYTES = 32, 64
_KERNEL, _ARGUMENTS, _ITEMS, _MIN_CLAIM, _PLACE = (k * 8 for k in range(5))
_RUN_SHIFT, _OPERATION_SHIFT = 38, 24
_LENGTH_SHIFT = _RUN_SHIFT - _OPERATION_SHIFT
MAX_ITEMS, MAX_OPERATIONS = (1 << 24) - 1, (1 << 14) - 1
_RUN_MASK = (1 << 25) - 1
_SPINS = 500
"""How often to check whether other workers are done before yielding to other threads."""
_CLOCK_NUMBER = time.CLOCK_MONOTONIC
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@dataclass(frozen=True, slots=True)
class PoolFunctions:
    """The compiled functions, called without the interpreter's lock.

    They take addresses, because numba would allocate something for each array.
    """

    run_single_threaded: Callable[[int, int, int, int], None]
    """Run a table on this thread: table, operations, shared memory, times (or 0)."""
    run_threaded: Callable[[int, int, int, int, int, int], bool]
    """The same with other workers: ..., shared memory, mailboxes, how many of them, times (or 0).
    """
    serve_worker: Callable[[int, int], None]
    """Take part in every posted run until the mailbox is closed: shared memory, mailbox."""
    initialise_mailbox: Callable[[int], None]
    post_message: Callable[[int, int], None]


@cache
def load_pool_functions() -> PoolFunctions:
    """Return the functions, compiled or loaded from the cache."""
    return load_or_compile("sharing", _compile)


def _compile(cached: bool) -> PoolFunctions:
    def compile_one(signature: Any, function: Any) -> Any:
        return numba.njit(signature, nogil=True, cache=cached)(function)

    return PoolFunctions(
        compile_one(types.void(*[types.int64] * 4), _run_single_threaded),
        compile_one(types.boolean(*[types.int64] * 6), _run_threaded),
        compile_one(types.void(types.int64, types.int64), _serve_worker),
        compile_one(types.void(types.int64), initialise_mailbox.py_func),
        compile_one(types.void(types.int64, types.int64), post_message.py_func),
    )


def set_operation_buffer(shared: AnyArray, buffer: int) -> None:
    """Set, between two runs, where the operations of the next runs are written."""
    shared[_BUFFER // 8] = buffer


def is_idle(shared: AnyArray) -> bool:
    """Return whether every operation of the last run is done."""
    reached = int(shared[_TICKET // 8]) >> _OPERATION_SHIFT
    return bool(shared[_DONE // 8] == 0 and reached == shared[_LENGTH // 8])


def _run_single_threaded(
    table: int, operations: int, shared: int, times: int
) -> None:  # pragma: no cover - compiled
    """Run every operation on this thread."""
    _start_clock(shared, times)
    for place in range(operations):
        kernel, arguments, counted, _portion = load_int64s(table + place * TABLE_BYTES, 4)
        items = load_int64s(counted, 1)[0]
        if items > 0:
            call_kernel(kernel, 0, items, arguments)
            _record_operation_time(shared, place)


def _run_threaded(
    table: int, operations: int, shared: int, posts: int, others: int, times: int
) -> bool:  # pragma: no cover - compiled
    """Run every operation with the first ``others`` of the workers that wait at mailboxes.

    Returns False, and runs nothing, if there is more than a ticket can count.
    """
    run = ((atomic_load(shared + _TICKET) >> _RUN_SHIFT) + 1) & _RUN_MASK
    length = _write_operations(table, operations, atomic_load(shared + _BUFFER))
    if length < 0 or length > MAX_OPERATIONS:
        return False
    _start_clock(shared, times)
    atomic_store(shared + _SHARE, 2 * (others + 1))
    atomic_store(shared + _LENGTH, run << _LENGTH_SHIFT | length)
    atomic_store(shared + _TICKET, run << _RUN_SHIFT)
    if length > 0:
        for number in range(others):
            post_message(load_int64s(posts + number * 8, 1)[0], run)
        _claim_items(shared, run)
    return True


def _serve_worker(shared: int, post: int) -> None:  # pragma: no cover - compiled
    """Take part in every posted run until the mailbox is closed."""
    run = 0
    while run != CLOSED:
        run = wait_for_message(post, run)
        if run != CLOSED:
            _claim_items(shared, run)


@numba.njit
def _write_operations(table: int, operations: int, buffer: int) -> int:
    """Write the operations that have items; return how many, or -1 if one has too many."""
    length = 0
    for place in range(operations):
        kernel, arguments, counted, portion = load_int64s(table + place * TABLE_BYTES, 4)
        items = load_int64s(counted, 1)[0]
        if items > MAX_ITEMS:
            return -1
        if items > 0:
            row = buffer + length * OPERATION_BYTES
            atomic_store(row + _KERNEL, kernel)
            atomic_store(row + _ARGUMENTS, arguments)
            atomic_store(row + _ITEMS, items)
            atomic_store(row + _MIN_CLAIM, max(portion, 1))
            atomic_store(row + _PLACE, place)
            length += 1
    return length


@numba.njit(error_model="numpy")  # never divides by 0, and must not raise
def _claim_items(shared: int, run: int) -> None:
    """Claim and process items until the run is over."""
    spins = 0
    while True:
        ticket = atomic_load(shared + _TICKET)
        if ticket >> _RUN_SHIFT != run or _is_finished(ticket, atomic_load(shared + _LENGTH)):
            return
        operation = (ticket >> _OPERATION_SHIFT) & MAX_OPERATIONS
        row = atomic_load(shared + _BUFFER) + operation * OPERATION_BYTES
        first, items = ticket & MAX_ITEMS, atomic_load(row + _ITEMS)
        portion = max(
            atomic_load(row + _MIN_CLAIM), (items - first) // atomic_load(shared + _SHARE)
        )
        last = min(first + portion, items)
        if first >= items:
            spins = _spin_or_yield(spins)
        elif atomic_compare_exchange(shared + _TICKET, ticket, ticket - first + last):
            call_kernel(atomic_load(row + _KERNEL), first, last, atomic_load(row + _ARGUMENTS))
            if atomic_fetch_add(shared + _DONE, last - first) + last - first == items:
                _record_operation_time(shared, atomic_load(row + _PLACE))
                atomic_store(shared + _DONE, 0)
                next_operation = ((ticket >> _OPERATION_SHIFT) + 1) << _OPERATION_SHIFT
                atomic_store(shared + _TICKET, next_operation)
            spins = 0


@numba.njit
def _is_finished(ticket: int, length: int) -> bool:
    """Return whether the ticket's run has no more operations.

    The length of the next run is written before its ticket, so a worker that sees it has read an
    old ticket.
    """
    return length >> _LENGTH_SHIFT != ticket >> _RUN_SHIFT or ticket >> _OPERATION_SHIFT >= length


@numba.njit
def _spin_or_yield(spins: int) -> int:
    if spins < _SPINS:
        pause_cpu()
        return spins + 1
    yield_thread()
    return spins


@numba.njit
def _start_clock(shared: int, times: int) -> None:
    atomic_store(shared + _TIMES, times)
    if times != 0:
        atomic_store(shared + _LAST_TIME, _read_clock(shared))


@numba.njit
def _record_operation_time(shared: int, place: int) -> None:
    """Record the duration of the operation that has just ended, if requested."""
    times = atomic_load(shared + _TIMES)
    if times != 0:
        now = _read_clock(shared)
        atomic_store(times + place * 8, now - atomic_load(shared + _LAST_TIME))
        atomic_store(shared + _LAST_TIME, now)


@numba.njit
def _read_clock(shared: int) -> int:
    _clock_gettime(_CLOCK_NUMBER, shared + _CLOCK)
    seconds, nanoseconds = load_int64s(shared + _CLOCK, 2)
    return seconds * 1_000_000_000 + nanoseconds


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
