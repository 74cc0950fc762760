"""Compiling functions in several processes at once: numba and LLVM hold the interpreter's lock.

A worker is an interpreter that compiles what it reads from its standard input, until that ends. It
starts with the environment and the working directory of its parent, so it compiles the same code;
it imports nothing from the working directory. Whatever goes wrong in a worker, its functions are
not among the results, and the caller compiles them itself.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import BinaryIO

from expertctl.engine.kernels.source import SOURCES_DIGEST, FunctionSource, compile_source

MAX_WORKERS = 8
"""Each takes about 150 MB of memory."""
MIN_FUNCTIONS = 3
"""Fewer are compiled sooner by the caller: a worker starts in a second."""
_PROGRAM = f"from {__name__} import serve; serve()"


def compile_in_workers(
    sources: Mapping[str, FunctionSource], *, workers: int
) -> Generator[tuple[str, bytes]]:
    """Yield the name and the machine code of functions, in the order in which they are ready.

    A worker whose sources of kernels are others compiles nothing. Closing the iterator ends the
    workers.
    """
    count = min(workers, len(sources), MAX_WORKERS)
    if count < 2 or len(sources) < MIN_FUNCTIONS or not sys.executable:
        return
    with _start_workers(count) as idle, ThreadPoolExecutor(count) as threads:
        jobs = {
            threads.submit(_compile_in_worker, idle, source): name
            for name, source in sources.items()
        }
        try:
            for job in as_completed(jobs):
                if (code := job.result()) is not None:
                    yield jobs[job], code
        finally:
            for job in jobs:
                job.cancel()
            _kill_all(idle.workers)  # a thread that waits for one ends


@dataclass(frozen=True, slots=True)
class _IdleWorkers:
    """All workers, and a queue of those that have nothing to do."""

    workers: list[subprocess.Popen[bytes]]
    queue: "SimpleQueue[subprocess.Popen[bytes]]"


@contextmanager
def _start_workers(count: int) -> Iterator[_IdleWorkers]:
    idle = _IdleWorkers([], SimpleQueue())
    try:
        with suppress(OSError):  # too many processes or too little memory: fewer workers, or none
            for _ in range(count):
                worker = subprocess.Popen(  # noqa: S603  # this interpreter, with our own program
                    [sys.executable, "-P", "-c", _PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                idle.workers.append(worker)
                with suppress(OSError):
                    _send(worker, SOURCES_DIGEST)
                idle.queue.put(worker)
        yield idle
    finally:
        _kill_all(idle.workers)
        _close_all(idle.workers)


def _compile_in_worker(idle: _IdleWorkers, source: FunctionSource) -> bytes | None:
    """Return the code of a function, or None if it could not be compiled in a worker."""
    if not idle.workers:
        return None
    worker = idle.queue.get()
    try:
        _send(worker, source)
        assert worker.stdout is not None
        code: bytes | None = pickle.load(worker.stdout)  # noqa: S301  # written by our own process
    except (OSError, EOFError, pickle.PickleError):
        return None
    finally:
        idle.queue.put(worker)
    return code


def _send(worker: subprocess.Popen[bytes], message: object) -> None:
    assert worker.stdin is not None
    pickle.dump(message, worker.stdin)
    worker.stdin.flush()


def _kill_all(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()


def _close_all(workers: list[subprocess.Popen[bytes]]) -> None:
    """Wait for ended workers, and close their pipes; what was not sent any more is dropped."""
    for worker in workers:
        with suppress(OSError), worker:
            pass


def serve() -> None:
    """Compile what is read from standard input, and write the code to standard output."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what a library prints is no code
        _serve(sys.stdin.buffer, output)


def _serve(requests: BinaryIO, output: BinaryIO) -> None:
    compiles = pickle.load(requests) == SOURCES_DIGEST  # noqa: S301  # written by our own process
    while True:
        try:
            source: FunctionSource = pickle.load(requests)  # noqa: S301  # as above
        except EOFError:
            return
        code: bytes | None = None
        with suppress(Exception):
            code = compile_source(source) if compiles else None
        pickle.dump(code, output)
        output.flush()
