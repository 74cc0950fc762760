"""Compiling functions in several processes at once: numba and LLVM hold the interpreter's lock.

A worker is an interpreter that compiles what it reads from its standard input, until that ends. It
starts with the environment and the working directory of its parent, so it compiles the same code,
and in a process group of its own, so that Ctrl-C at a terminal reaches only the parent. Whatever
goes wrong in a worker, its functions are not among the results, and the caller compiles them.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO

from expertctl.engine.kernels.machine_code import SOURCES_DIGEST, FunctionSource, compile_source
from expertctl.engine.memory.host import count_usable_cores, find_unused_bytes

MAX_WORKERS = 8
WORKER_BYTES = 150 << 20
"""Memory of a worker, about."""
MIN_FUNCTIONS = 3
"""Fewer are compiled sooner by the caller: a worker starts in a second."""
_PATIENCE = 120.0
"""Seconds without any result after which workers are given up."""
_PROGRAM = f"from {__name__} import serve; serve()"
_Job = tuple[str, FunctionSource]
_Result = tuple[str, bytes] | None
"""A name and its code; None when a worker has no more."""


def choose_worker_count(functions: int) -> int:
    """Return how many workers compile so many functions; 0 where the caller is as fast.

    Each has a core and memory that nothing else uses.
    """
    unused = find_unused_bytes()
    fitting = MAX_WORKERS if unused is None else unused // WORKER_BYTES
    count = min(functions, count_usable_cores(), fitting, MAX_WORKERS)
    is_frozen = getattr(sys, "frozen", False) or not sys.executable
    return 0 if functions < MIN_FUNCTIONS or count < 2 or is_frozen else count


def compile_in_workers(
    sources: Mapping[str, FunctionSource], *, workers: int
) -> Generator[tuple[str, bytes]]:
    """Yield the name and the machine code of functions, in the order in which they are ready.

    A worker whose sources of kernels are others compiles nothing. Closing the iterator ends the
    workers.
    """
    jobs, results = SimpleQueue[_Job](), SimpleQueue[_Result]()
    for job in sources.items():
        jobs.put(job)
    threads: list[Thread] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        # too many processes or threads, or too little memory: fewer workers, or none
        with suppress(OSError, RuntimeError):
            for _ in range(workers):
                processes.append(_start_worker())
                work = processes[-1], jobs, results
                thread = Thread(target=_feed_worker, args=work, daemon=True)
                thread.start()
                threads.append(thread)
        left = len(threads)
        while left:
            result = results.get(timeout=_PATIENCE)
            if result is None:
                left -= 1
            else:
                yield result
    except Empty:
        return
    finally:
        _end_workers(processes, threads)


def _start_worker() -> subprocess.Popen[bytes]:
    options = ["-I"] if sys.flags.isolated else ["-P"]  # nothing from the working directory
    return subprocess.Popen(  # noqa: S603  # this interpreter, with our own program
        [sys.executable, *options, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def _feed_worker(
    worker: subprocess.Popen[bytes], jobs: SimpleQueue[_Job], results: SimpleQueue[_Result]
) -> None:
    """Have a worker compile jobs until there are none, or until it fails."""
    try:
        # Empty: no job is left; all others: the worker has ended, or writes something else
        with suppress(Empty, OSError, EOFError, ValueError, pickle.PickleError):
            _send(worker, SOURCES_DIGEST)
            while True:
                job = jobs.get_nowait()
                try:
                    code = _compile_in(worker, job[1])
                except BaseException:
                    jobs.put(job)  # for the others
                    raise
                if code is not None:
                    results.put((job[0], code))
    finally:
        results.put(None)


def _compile_in(worker: subprocess.Popen[bytes], source: FunctionSource) -> bytes | None:
    """Return the code of a function, or None if it cannot be compiled."""
    _send(worker, source)
    assert worker.stdout is not None
    code: bytes | None = pickle.load(worker.stdout)  # noqa: S301  # written by our own process
    return code


def _send(worker: subprocess.Popen[bytes], message: object) -> None:
    assert worker.stdin is not None
    pickle.dump(message, worker.stdin)
    worker.stdin.flush()


def _end_workers(processes: list[subprocess.Popen[bytes]], threads: list[Thread]) -> None:
    """Kill workers, and wait for them and for the threads that read from them."""
    for worker in processes:
        worker.kill()
    for thread in threads:
        thread.join()
    for worker in processes:
        with suppress(OSError), worker:  # closes its pipes; what was not sent is dropped
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
