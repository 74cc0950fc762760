"""Runs an action in a process of its own and lets the N-th step that changes the disk go wrong.

A step is an audited event (opening for writing, rename, mkdir, remove, rmdir, chmod, link, …: seen
whoever asks, C code included) or one of the calls that Python does not audit (write, fsync, …),
which are replaced. The process is forked, so that a sweep over all steps takes seconds.

A small process in which functions run that fork at every step.

Whatever runs all tests has torch and much else in memory, and copying the tables of that for a
fork takes longer than the step that is tried.
"""

import errno
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pytest

Fault = Literal["none", "kill", "torn", "full", "error"]
AUDIT_EVENTS = {
    "os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod",
    "os.truncate", "os.utime", "shutil.copyfile", "shutil.move", "shutil.rmtree", "sqlite3.connect",
}  # fmt: skip
WRAPPED_CALLS = ("write", "pwrite", "writev", "fsync", "fdatasync", "sendfile", "copy_file_range")
ALLOCATING_STEPS = {"open", "write", "pwrite", "writev", "os.mkdir", "os.rename", "os.link"}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class DiskStep:
    kind: str
    what: str
    size: int = 0


@dataclass(frozen=True)
class FaultResult:
    """How a process ended: killed, or with an exception or none; and the steps it took.

    SQLite writes for itself, so of its steps only the opening is seen; it has its own journal.
    """

    killed: bool
    steps: tuple[DiskStep, ...] = ()
    errors: tuple[str, ...] = ()
    """The names of the exception's class and of its parents."""
    trace: str = ""

    def completed_or_raised(self, *errors: type[Exception]) -> bool:
        return not self.errors or any(error.__name__ in self.errors for error in errors)


class _FaultInjector:
    def __init__(self, at: int, fault: Fault) -> None:
        self.at = at
        self.fault = fault
        self.steps: list[DiskStep] = []
        self.active = True

    def start(self) -> None:
        sys.addaudithook(self._on_audit_event)
        for name in WRAPPED_CALLS:
            if hasattr(os, name):
                setattr(os, name, self._wrap_call(name, getattr(os, name)))

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITE_FLAGS:
                self._record_step("open", str(path))
        elif event in AUDIT_EVENTS:
            self._record_step(event, str(arguments[0]))

    def _wrap_call(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(handle: int, *rest: Any) -> Any:
            if not self.active:
                return call(handle, *rest)
            data = rest[0] if rest and name == "write" else b""
            path = str(Path(f"/proc/self/fd/{handle}").readlink())
            if self.fault == "torn" and name == "write" and len(self.steps) + 1 == self.at:
                call(handle, bytes(data)[: len(data) // 2])
            self._record_step(name, path, len(data))
            return call(handle, *rest)

        return counted

    def _record_step(self, kind: str, what: str, size: int = 0) -> None:
        self.steps.append(DiskStep(kind, what, size))
        count = len(self.steps)
        match self.fault:
            case "kill" | "torn" if count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            case "full" if count >= self.at and kind in ALLOCATING_STEPS:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)
            case "error" if count == self.at and kind != "sqlite3.connect":
                raise OSError(errno.EIO, os.strerror(errno.EIO), what)
            case _:
                pass


def run_with_fault(action: Callable[[], Any], *, at: int = 0, fault: Fault = "none") -> FaultResult:
    """Run ``action`` in a forked process; the ``at``-th step, counted from 1, goes wrong."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside native threads
        child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(action, _FaultInjector(at, fault), writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return FaultResult(True)
    told = json.loads(data)
    steps = tuple(DiskStep(*step) for step in told["steps"])
    return FaultResult(False, steps, tuple(told["errors"]), told["trace"])


def _run_child(action: Callable[[], Any], injector: _FaultInjector, writer: int) -> None:
    errors, trace = [], ""
    try:
        injector.start()
        action()
    except BaseException as error:  # noqa: BLE001  # the parent judges it
        errors = [cls.__name__ for cls in type(error).__mro__]
        trace = traceback.format_exc()
    injector.active = False
    steps = [[step.kind, step.what, step.size] for step in injector.steps]
    try:
        told = json.dumps({"steps": steps, "errors": errors, "trace": trace})
        with os.fdopen(writer, "w") as stream:
            stream.write(told)
    finally:
        os._exit(0)


@dataclass(frozen=True)
class SpawnedProcess:
    """Such a process; it has imported what the functions need that it was given."""

    pool: ProcessPoolExecutor

    def __call__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function of a module there; what it raises is raised here."""
        self.pool.submit(function, *arguments).result()


@pytest.fixture(scope="session")
def lean() -> Iterator[SpawnedProcess]:
    """One for all tests."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield SpawnedProcess(pool)
