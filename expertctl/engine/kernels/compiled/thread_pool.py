"""Code of the thread pool: waiting at mailboxes, and claiming the items of a run.

`expertctl.engine.kernels.thread_pool` describes the memory that workers share.
"""

import time

import numba
from numba import types
from numba.extending import register_jitable

from expertctl.engine.kernels.compiled.memory import (
    atomic_compare_exchange,
    atomic_fetch_add,
    atomic_load,
    atomic_store,
    call_kernel,
    load_int64s,
    pause_cpu,
    yield_thread,
)
from expertctl.engine.kernels.thread_pool import (
    BUFFER,
    CLOCK,
    CLOSED,
    DONE,
    LAST_TIME,
    LENGTH,
    MAX_ITEMS,
    MAX_OPERATIONS,
    OPERATION_BYTES,
    OPERATION_SHIFT,
    RUN_SHIFT,
    SHARE,
    TABLE_BYTES,
    TICKET,
    TIMES,
)

_LOCK, _CONDITION = 64, 128
_SPIN_COUNT = 1000
"""How often a thread polls before it sleeps: some 30 µs, the time between two programs."""

_init_lock = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
_init_condition = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))
_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_wait_condition = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_notify_condition = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))


@register_jitable
def initialise_mailbox(post: int) -> None:
    """Initialise a mailbox in zeroed memory."""
    _init_lock(post + _LOCK, 0)
    _init_condition(post + _CONDITION, 0)


@register_jitable
def post_message(post: int, number: int) -> None:
    """Post a number and wake the thread that waits; a closed mailbox stays closed."""
    _lock(post + _LOCK)
    if atomic_load(post) != CLOSED:
        atomic_store(post, number)
    _notify_condition(post + _CONDITION)
    _unlock(post + _LOCK)


@numba.njit
def wait_for_message(post: int, seen: int) -> int:
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


_KERNEL, _ARGUMENTS, _ITEMS, _MIN_CLAIM, _PLACE = (k * 8 for k in range(5))
_LENGTH_SHIFT = RUN_SHIFT - OPERATION_SHIFT
_RUN_MASK = (1 << 25) - 1
_SPINS = 500
"""How often to check whether other workers are done before yielding to other threads."""
_CLOCK_NUMBER = time.CLOCK_MONOTONIC
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


def run_single_threaded(
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


def run_threaded(
    table: int, operations: int, shared: int, posts: int, others: int, times: int
) -> int:  # pragma: no cover - compiled
    """Run every operation with the first ``others`` of the workers that wait at mailboxes.

    Returns 0, and runs nothing, if there is more than a ticket can count; else 1.
    """
    run = ((atomic_load(shared + TICKET) >> RUN_SHIFT) + 1) & _RUN_MASK
    length = _write_operations(table, operations, atomic_load(shared + BUFFER))
    if length < 0 or length > MAX_OPERATIONS:
        return 0
    _start_clock(shared, times)
    atomic_store(shared + SHARE, 2 * (others + 1))
    atomic_store(shared + LENGTH, run << _LENGTH_SHIFT | length)
    atomic_store(shared + TICKET, run << RUN_SHIFT)
    if length > 0:
        for number in range(others):
            post_message(load_int64s(posts + number * 8, 1)[0], run)
        _claim_items(shared, run)
    return 1


def serve_worker(shared: int, post: int) -> None:  # pragma: no cover - compiled
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
        ticket = atomic_load(shared + TICKET)
        if ticket >> RUN_SHIFT != run or _is_finished(ticket, atomic_load(shared + LENGTH)):
            return
        operation = (ticket >> OPERATION_SHIFT) & MAX_OPERATIONS
        row = atomic_load(shared + BUFFER) + operation * OPERATION_BYTES
        first, items = ticket & MAX_ITEMS, atomic_load(row + _ITEMS)
        portion = max(atomic_load(row + _MIN_CLAIM), (items - first) // atomic_load(shared + SHARE))
        last = min(first + portion, items)
        if first >= items:
            spins = _spin_or_yield(spins)
        elif atomic_compare_exchange(shared + TICKET, ticket, ticket - first + last):
            call_kernel(atomic_load(row + _KERNEL), first, last, atomic_load(row + _ARGUMENTS))
            if atomic_fetch_add(shared + DONE, last - first) + last - first == items:
                _record_operation_time(shared, atomic_load(row + _PLACE))
                atomic_store(shared + DONE, 0)
                next_operation = ((ticket >> OPERATION_SHIFT) + 1) << OPERATION_SHIFT
                atomic_store(shared + TICKET, next_operation)
            spins = 0


@numba.njit
def _is_finished(ticket: int, length: int) -> bool:
    """Return whether the ticket's run has no more operations.

    The length of the next run is written before its ticket, so a worker that sees it has read an
    old ticket.
    """
    return length >> _LENGTH_SHIFT != ticket >> RUN_SHIFT or ticket >> OPERATION_SHIFT >= length


@numba.njit
def _spin_or_yield(spins: int) -> int:
    if spins < _SPINS:
        pause_cpu()
        return spins + 1
    yield_thread()
    return spins


@numba.njit
def _start_clock(shared: int, times: int) -> None:
    atomic_store(shared + TIMES, times)
    if times != 0:
        atomic_store(shared + LAST_TIME, _read_clock(shared))


@numba.njit
def _record_operation_time(shared: int, place: int) -> None:
    """Record the duration of the operation that has just ended, if requested."""
    times = atomic_load(shared + TIMES)
    if times != 0:
        now = _read_clock(shared)
        atomic_store(times + place * 8, now - atomic_load(shared + LAST_TIME))
        atomic_store(shared + LAST_TIME, now)


@numba.njit
def _read_clock(shared: int) -> int:
    _clock_gettime(_CLOCK_NUMBER, shared + CLOCK)
    seconds, nanoseconds = load_int64s(shared + CLOCK, 2)
    return seconds * 1_000_000_000 + nanoseconds
