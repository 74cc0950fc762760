"""Threads that hash files, and let go of them when whoever waits was interrupted."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from expertctl.digest import Progress

MOST = 4


class _GivenUpError(Exception):
    """Nobody waits for this digest any more."""


@contextmanager
def hashing_threads() -> Iterator[tuple[ThreadPoolExecutor, Progress]]:
    """Lend threads, and what each of them has to call for every chunk that it hashes.

    That raises in them once the block was left by an exception, so that files of any size end
    soon; else whoever pressed Ctrl-C would wait for all that was begun.
    """
    given_up = Event()

    def go_on(_: int) -> None:
        if given_up.is_set():
            raise _GivenUpError

    with ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as pool:
        try:
            yield pool, go_on
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
