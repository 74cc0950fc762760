"""How workers share out the items of a program, in compiled code.

The state is one number, the ticket: which run, which operation, which item is next. It does not
come back to an earlier value (within 2^25 runs), so a claim, which is a compare-and-swap, fails for
a worker that looked at a run that is over. What workers read before they claim is the crew's own
memory, which stays: `SHARED_WORDS` int64 and room for the operations. The next operation begins
when all items of the last one are done, not when all workers have said so: a worker that the system
delays is waited for only while it has claimed items. So it may look at any moment of a later run:
the length that is written there names its run, as the ticket does.

A claim takes half of the worker's fair share of what is left, so each worker reads long stretches
of memory and claims are few, while the last ones are small enough that all workers end together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from expertctl.engine.kernels.atomic import (
    add_now,
    breathe,
    call_at,
    give_way,
    read_now,
    replace_now,
    write_now,
)
from expertctl.engine.kernels.compiled import compiled
from expertctl.engine.kernels.memory import words
from expertctl.engine.kernels.waiting import CLOSED, begin_post, receive, send

Numbers = np.ndarray[Any, Any]

_LINE = 64
_TICKET, _DONE, _LENGTH, _ROOM, _TIMES, _BEFORE, _CLOCK, _SHARE = (k * _LINE for k in range(8))
"""Offsets in the shared memory; each number that all workers write has a cache line of its own.

The length is what the ticket ends at, without items: the run, and how many operations it has. The
share is of what is left of an operation: a claim takes one in so many items.
"""
SHARED_WORDS = 8 * _LINE // 8
TABLE_BYTES, ROW_BYTES = 32, 64
_KERNEL, _ARGUMENTS, _ITEMS, _PORTION, _PLACE = (k * 8 for k in range(5))
_RUN_SHIFT, _OPERATION_SHIFT = 38, 24
_LENGTH_SHIFT = _RUN_SHIFT - _OPERATION_SHIFT
MOST_ITEMS, MOST_OPERATIONS = (1 << 24) - 1, (1 << 14) - 1
_RUN_MASK = (1 << 25) - 1
_SPINS = 500
"""How often to look whether other workers are done before giving way to other threads."""
_CLOCK_NUMBER = time.CLOCK_MONOTONIC
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


_LONG = types.int64


@dataclass(frozen=True, slots=True)
class Sharing:
    """The compiled functions, called without the interpreter's lock.

    They get addresses, for numba would allocate something for each array.
    """

    run_alone: Callable[[int, int, int, int], None]
    """Run a table on this thread: table, operations, shared memory, times (or 0)."""
    run_shared: Callable[[int, int, int, int, int, int], bool]
    """The same with other workers: ..., shared memory, posts, how many of them, times (or 0)."""
    attend: Callable[[int, int], None]
    """Take part in every run that is posted until the post is closed: shared memory, post."""
    begin_post: Callable[[int], None]
    send: Callable[[int, int], None]


@cache
def sharing() -> Sharing:
    """Return the functions, compiled or loaded."""
    return compiled("sharing", _compile)


def _compile(cached: bool) -> Sharing:
    def compile_one(signature: Any, function: Any) -> Any:
        return numba.njit(signature, nogil=True, cache=cached)(function)

    return Sharing(
        compile_one(types.void(*[_LONG] * 4), _run_alone),
        compile_one(types.boolean(*[_LONG] * 6), _run_shared),
        compile_one(types.void(_LONG, _LONG), _attend),
        compile_one(types.void(_LONG), begin_post.py_func),
        compile_one(types.void(_LONG, _LONG), send.py_func),
    )


def lend_room(shared: Numbers, room: int) -> None:
    """Say, between two runs, where the operations of the next ones are written."""
    shared[_ROOM // 8] = room


def is_idle(shared: Numbers) -> bool:
    """Return whether every operation of the last run is done."""
    reached = int(shared[_TICKET // 8]) >> _OPERATION_SHIFT
    return bool(shared[_DONE // 8] == 0 and reached == shared[_LENGTH // 8])


def _run_alone(
    table: int, operations: int, shared: int, times: int
) -> None:  # pragma: no cover (compiled)
    """Run every operation on this thread."""
    _begin_clock(shared, times)
    for place in range(operations):
        kernel, arguments, counted, _portion = words(table + place * TABLE_BYTES, 4)
        items = words(counted, 1)[0]
        if items > 0:
            call_at(kernel, 0, items, arguments)
            _clock(shared, place)


def _run_shared(
    table: int, operations: int, shared: int, posts: int, others: int, times: int
) -> bool:  # pragma: no cover (compiled)
    """Run every operation with the first ``others`` of the workers that wait at posts.

    Returns False, and runs nothing, where there is more than a ticket can count.
    """
    run = ((read_now(shared + _TICKET) >> _RUN_SHIFT) + 1) & _RUN_MASK
    length = _write_rows(table, operations, read_now(shared + _ROOM))
    if length < 0 or length > MOST_OPERATIONS:
        return False
    _begin_clock(shared, times)
    write_now(shared + _SHARE, 2 * (others + 1))
    write_now(shared + _LENGTH, run << _LENGTH_SHIFT | length)
    write_now(shared + _TICKET, run << _RUN_SHIFT)
    if length > 0:
        for number in range(others):
            send(words(posts + number * 8, 1)[0], run)
        _take_part(shared, run)
    return True


def _attend(shared: int, post: int) -> None:  # pragma: no cover (compiled)
    """Take part in every run that is posted, until the post is closed."""
    run = 0
    while run != CLOSED:
        run = receive(post, run)
        if run != CLOSED:
            _take_part(shared, run)


@numba.njit
def _write_rows(table: int, operations: int, room: int) -> int:  # pragma: no cover (compiled)
    """Write the operations that have items; return how many, or -1 where one has too many."""
    length = 0
    for place in range(operations):
        kernel, arguments, counted, portion = words(table + place * TABLE_BYTES, 4)
        items = words(counted, 1)[0]
        if items > MOST_ITEMS:
            return -1
        if items > 0:
            row = room + length * ROW_BYTES
            write_now(row + _KERNEL, kernel)
            write_now(row + _ARGUMENTS, arguments)
            write_now(row + _ITEMS, items)
            write_now(row + _PORTION, max(portion, 1))
            write_now(row + _PLACE, place)
            length += 1
    return length


@numba.njit(error_model="numpy")  # nothing is divided by 0, and nothing raised
def _take_part(shared: int, run: int) -> None:  # pragma: no cover (compiled)
    """Claim and do items until the run is over."""
    spins = 0
    while True:
        ticket = read_now(shared + _TICKET)
        if ticket >> _RUN_SHIFT != run or _is_over(ticket, read_now(shared + _LENGTH)):
            return
        operation = (ticket >> _OPERATION_SHIFT) & MOST_OPERATIONS
        row = read_now(shared + _ROOM) + operation * ROW_BYTES
        first, items = ticket & MOST_ITEMS, read_now(row + _ITEMS)
        portion = max(read_now(row + _PORTION), (items - first) // read_now(shared + _SHARE))
        last = min(first + portion, items)
        if first >= items:
            spins = _wait(spins)
        elif replace_now(shared + _TICKET, ticket, ticket - first + last):
            call_at(read_now(row + _KERNEL), first, last, read_now(row + _ARGUMENTS))
            if add_now(shared + _DONE, last - first) + last - first == items:
                _clock(shared, read_now(row + _PLACE))
                write_now(shared + _DONE, 0)
                next_operation = ((ticket >> _OPERATION_SHIFT) + 1) << _OPERATION_SHIFT
                write_now(shared + _TICKET, next_operation)
            spins = 0


@numba.njit
def _is_over(ticket: int, length: int) -> bool:  # pragma: no cover (compiled)
    """Return whether the ticket's run has no more operations.

    The length of the next run is written before its ticket, so a worker that sees it looked at an
    old ticket.
    """
    return length >> _LENGTH_SHIFT != ticket >> _RUN_SHIFT or ticket >> _OPERATION_SHIFT >= length


@numba.njit
def _wait(spins: int) -> int:  # pragma: no cover (compiled)
    if spins < _SPINS:
        breathe()
        return spins + 1
    give_way()
    return spins


@numba.njit
def _begin_clock(shared: int, times: int) -> None:  # pragma: no cover (compiled)
    write_now(shared + _TIMES, times)
    if times != 0:
        write_now(shared + _BEFORE, _nanoseconds(shared))


@numba.njit
def _clock(shared: int, place: int) -> None:  # pragma: no cover (compiled)
    """Note how long the operation that has just ended took, where that was asked for."""
    times = read_now(shared + _TIMES)
    if times != 0:
        now = _nanoseconds(shared)
        write_now(times + place * 8, now - read_now(shared + _BEFORE))
        write_now(shared + _BEFORE, now)


@numba.njit
def _nanoseconds(shared: int) -> int:  # pragma: no cover (compiled)
    _clock_gettime(_CLOCK_NUMBER, shared + _CLOCK)
    seconds, nanoseconds = words(shared + _CLOCK, 2)
    return seconds * 1_000_000_000 + nanoseconds
