"""Threads that sleep until they are called, in compiled code, without the interpreter.

A post is four cache lines of memory: the number that was posted last, a lock, and the condition
variable of its one sleeping thread. Nothing here takes the interpreter's lock, so a sleeper wakes
up at once even where Python is busy.
"""

from typing import Any

import numba
from numba import types

from expertctl.engine.kernels.atomic import breathe, read_now, write_now

POST_BYTES = 256
CLOSED = -1
"""Posted to threads that are to end."""
_LOCK, _SLEEPER = 64, 128
_LINGER = 1000
"""How often a thread looks before it sleeps: some 30 µs, the time between two programs."""

_init_lock = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
_init_sleeper = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))
_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_sleep = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_wake = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))


@numba.njit
def begin_post(post: Any) -> None:  # pragma: no cover (compiled)
    """Make a post of memory that is all zeros."""
    _init_lock(post + _LOCK, 0)
    _init_sleeper(post + _SLEEPER, 0)


@numba.njit
def send(post: Any, number: Any) -> None:  # pragma: no cover (compiled)
    """Post a number and wake the thread that sleeps there; a closed post stays closed."""
    _lock(post + _LOCK)
    if read_now(post) != CLOSED:
        write_now(post, number)
    _wake(post + _SLEEPER)
    _unlock(post + _LOCK)


@numba.njit
def receive(post: Any, seen: Any) -> Any:  # pragma: no cover (compiled)
    """Wait until another number than ``seen`` is posted; return it."""
    for _ in range(_LINGER):
        if read_now(post) != seen:
            return read_now(post)
        breathe()
    _lock(post + _LOCK)
    while read_now(post) == seen:
        _sleep(post + _SLEEPER, post + _LOCK)
    _unlock(post + _LOCK)
    return read_now(post)
