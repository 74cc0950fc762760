"""Those who compute: a program's operations one after the other, each shared out among workers.

Whoever is free takes the next items, so a worker that the system holds up is waited for as long
as one portion takes, not for its share. A barrier stands after each operation: it spins for some
microseconds, then yields the processor.
"""

import ctypes
import threading
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from expertctl.engine.kernels.memory import aligned, words

_INT = ir.IntType(64)
_SPINS = 4000
_LINE = 8
"""int64 in a cache line: each number that all workers write has one of its own."""
_TICKET, _ARRIVED, _TURN = 0, _LINE * 8, 2 * _LINE * 8


class Crew:
    """Some threads that run programs together; the caller is one of them."""

    def __init__(self, workers: int) -> None:
        """Start ``workers - 1`` threads, which sleep until there is something to do."""
        self.workers = workers
        self._shared = aligned(3 * _LINE, np.int64)
        self._start = [threading.Semaphore(0) for _ in range(workers - 1)]
        self._table: Any = None
        self._members = 1
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(workers - 1)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, table: "np.ndarray[Any, Any]", *, workers: int | None = None) -> None:
        """Run operations int64 [n, 4]: kernel, arguments, address of the items, portion."""
        members = min(workers or self.workers, self.workers)
        self._table, self._members = table, members
        for semaphore in self._start[: members - 1]:
            semaphore.release()
        self._take_part()

    def close(self) -> None:
        """End the threads."""
        self._table = None
        for semaphore, thread in zip(self._start, self._threads, strict=True):
            semaphore.release()
            thread.join()

    def _work(self, number: int) -> None:
        while True:
            self._start[number].acquire()
            if self._table is None:
                return
            self._take_part()

    def _take_part(self) -> None:
        _run(self._table, self._members, self._shared.ctypes.data, _yield_address())


def _yield_address() -> int:
    return _YIELD


_YIELD = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@intrinsic
def _call(_context: Any, kernel: Any, first: Any, last: Any, arguments: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(kernel, first, last, arguments), emit


@intrinsic
def _fetch_add(_context: Any, address: Any, number: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], _INT.as_pointer())
        return builder.atomic_rmw("add", place, values[1], "acq_rel")

    return types.int64(address, number), emit


@intrinsic
def _now(_context: Any, address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _INT.as_pointer()), "acquire", 8)

    return types.int64(address), emit


@intrinsic
def _give_way(_context: Any, function: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(function), emit


@numba.njit(nogil=True, cache=True)
def _run(table: Any, members: int, shared: int, give_way: int) -> None:
    for operation in range(len(table)):
        kernel, arguments = table[operation, 0], table[operation, 1]
        items, portion = words(table[operation, 2], 1)[0], table[operation, 3]
        if members == 1:
            _call(kernel, 0, items, arguments)
            continue
        turn = _now(shared + _TURN)
        first = _fetch_add(shared + _TICKET, portion)
        while first < items:
            _call(kernel, first, min(first + portion, items), arguments)
            first = _fetch_add(shared + _TICKET, portion)
        if _fetch_add(shared + _ARRIVED, 1) == members - 1:
            _fetch_add(shared + _TICKET, -_now(shared + _TICKET))
            _fetch_add(shared + _ARRIVED, -members)
            _fetch_add(shared + _TURN, 1)
        else:
            spins = 0
            while _now(shared + _TURN) == turn:
                spins += 1
                if spins > _SPINS:
                    _give_way(give_way)
