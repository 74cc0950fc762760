"""Functions are compiled in several processes, and whatever happens there, none is missing."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.kernels import compile_workers, jit
from expertctl.engine.kernels.compile_workers import choose_worker_count, compile_in_workers
from expertctl.engine.kernels.jit import load_functions, load_kernels
from expertctl.engine.kernels.layer_operations import (
    rms_norm_kernel,
    rope_kv_write_kernel,
    swiglu_kernel,
)
from expertctl.engine.kernels.machine_code import FunctionSource, compile_source

SOURCES = {
    kernel.name: kernel.source
    for kernel in (rms_norm_kernel(), swiglu_kernel(), rope_kv_write_kernel())
}


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> jit._CacheState:
    """An empty cache, two cores, and as many workers as a command has on them."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    state = jit._CacheState(folder)
    monkeypatch.setattr(jit, "_CACHE", state)
    monkeypatch.setattr(compile_workers, "choose_worker_count", choose_worker_count)
    monkeypatch.setattr(compile_workers, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(compile_workers, "find_unused_bytes", lambda: None)
    return state


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that this process compiles itself."""
    compiled: list[str] = []

    def compile_and_note(source: FunctionSource) -> bytes:
        compiled.append(source.function)
        return compile_source(source)

    monkeypatch.setattr(jit, "compile_source", compile_and_note)
    return compiled


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The workers that are started."""
    workers: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_note(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        workers.append(start(*words, **options))
        return workers[-1]

    monkeypatch.setattr(compile_workers.subprocess, "Popen", start_and_note)
    return workers


def functions(sources: dict[str, FunctionSource]) -> list[str]:
    return [source.function for source in sources.values()]


def test_workers_compile_what_the_process_itself_would(own: list[str]) -> None:
    found = dict(compile_in_workers(SOURCES, workers=2))
    assert own == []
    assert found == {name: compile_source(source) for name, source in SOURCES.items()}


@pytest.mark.all
def test_all_missing_functions_are_compiled_by_workers_and_stored(
    own: list[str], started: list[subprocess.Popen[bytes]]
) -> None:
    for _ in range(2):
        assert len(load_functions(SOURCES)) == 3
    assert own == []
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started), "a worker is still there"


@pytest.mark.parametrize(
    ("functions", "cores", "unused", "workers"),
    [
        (3, 2, None, 2),
        (20, 64, None, compile_workers.MAX_WORKERS),
        (20, 64, 3 * compile_workers.WORKER_BYTES, 3),
        (4, 64, None, 4),
        (20, 1, None, 0),
        (20, 64, compile_workers.WORKER_BYTES, 0),
        (2, 64, None, 0),
    ],
)
def test_each_worker_has_a_core_and_memory_or_there_is_none(
    functions: int,
    cores: int,
    unused: int | None,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_workers, "count_usable_cores", lambda: cores)
    monkeypatch.setattr(compile_workers, "find_unused_bytes", lambda: unused)
    assert choose_worker_count(functions) == workers


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("frozen", True)])
def test_a_program_that_is_no_interpreter_starts_no_worker(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    assert choose_worker_count(20) == 0


def test_on_one_core_the_process_compiles_itself(
    own: list[str],
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_workers, "count_usable_cores", lambda: 1)
    assert len(load_functions(SOURCES)) == len(SOURCES)
    assert own == functions(SOURCES)
    assert started == []


@pytest.mark.all
def test_one_worker_that_ends_leaves_its_work_to_the_other(
    own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = compile_workers._PROGRAM, iter(["pass"])
    start = compile_workers._start_worker

    def start_one_that_ends() -> subprocess.Popen[bytes]:
        monkeypatch.setattr(compile_workers, "_PROGRAM", next(starts, program))
        return start()

    monkeypatch.setattr(compile_workers, "_start_worker", start_one_that_ends)
    assert len(dict(compile_in_workers(SOURCES, workers=2))) == len(SOURCES)
    assert own == []


@pytest.mark.all
def test_workers_that_say_nothing_are_given_up(
    own: list[str], started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_workers, "_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(compile_workers, "_PATIENCE", 0.2)
    assert len(load_functions(SOURCES)) == len(SOURCES)
    assert own == functions(SOURCES)
    assert all(worker.returncode is not None for worker in started)


@pytest.mark.all
def test_an_interrupt_at_the_terminal_does_not_reach_workers(
    started: list[subprocess.Popen[bytes]],
) -> None:
    compiled = compile_in_workers(SOURCES, workers=2)
    next(compiled)
    assert all(os.getpgid(worker.pid) == worker.pid != os.getpgrp() for worker in started)
    compiled.close()
    assert all(worker.returncode is not None for worker in started)


def test_what_is_loaded_waits_for_no_compilation() -> None:
    kernel = rms_norm_kernel()
    assert kernel.address
    done = threading.Event()

    def load() -> None:
        load_kernels([kernel])
        done.set()

    with jit._LOCK:  # as while others are compiled
        thread = threading.Thread(target=load)
        thread.start()
        assert done.wait(60)
    thread.join()


def _end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_PROGRAM", "pass")


def _write_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_PROGRAM", "print('hello')")


def _have_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "SOURCES_DIGEST", "other")


def _have_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(compile_workers.subprocess, "Popen", refuse)


def _have_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compile_workers.Thread, "start", refuse)


@pytest.mark.all
@pytest.mark.parametrize(
    "harm",
    [
        _end_at_once,
        _write_nonsense,
        _have_other_sources,
        _have_no_processes,
        _have_no_threads,
    ],
)
def test_whatever_goes_wrong_in_workers_the_process_compiles_itself(
    harm: Callable[[pytest.MonkeyPatch], None], own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch)
    assert len(load_functions(SOURCES)) == 3
    assert own == functions(SOURCES)


class _GivenUpError(Exception):
    pass


@pytest.mark.all
def test_what_ends_the_compilation_ends_the_workers(
    started: list[subprocess.Popen[bytes]], state: jit._CacheState
) -> None:
    def stop_after_one(done: int, _: int) -> None:
        if done:
            raise _GivenUpError

    state.progress = stop_after_one
    with pytest.raises(_GivenUpError):
        load_functions(SOURCES)
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)
    assert state.folder is not None
    with jit.FileLock(state.folder.with_suffix(".lock"), timeout=0):
        pass
