"""Threads that hash files, and stop early when the caller was interrupted."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from expertctl.digest import Progress

MOST = 4


class _GivenUpError(Exception):
    """The digest is no longer wanted."""


@contextmanager
def hashing_threads() -> Iterator[tuple[ThreadPoolExecutor, Progress]]:
    """Lend threads, and a function that each must call for every chunk that it hashes.

    It raises in the threads once the block was left by an exception, so that hashing even large
    files stops soon; otherwise Ctrl-C would wait for all files that were begun.
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
