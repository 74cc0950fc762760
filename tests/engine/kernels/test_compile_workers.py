"""Functions are compiled in several processes, and whatever happens there, none is missing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.kernels import compile_workers, jit
from expertctl.engine.kernels.compile_workers import compile_in_workers
from expertctl.engine.kernels.jit import load_functions
from expertctl.engine.kernels.layer_operations import (
    rms_norm_kernel,
    rope_kv_write_kernel,
    swiglu_kernel,
)
from expertctl.engine.kernels.source import FunctionSource, compile_source

SOURCES = {
    kernel.name: kernel.source
    for kernel in (rms_norm_kernel(), swiglu_kernel(), rope_kv_write_kernel())
}


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> jit._CacheState:
    """An empty cache, and two cores."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    state = jit._CacheState(folder)
    monkeypatch.setattr(jit, "_CACHE", state)
    monkeypatch.setattr(jit, "count_usable_cores", lambda: 2)
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


def test_all_missing_functions_are_compiled_by_workers_and_stored(
    own: list[str], started: list[subprocess.Popen[bytes]]
) -> None:
    for _ in range(2):
        assert len(load_functions(SOURCES)) == 3
    assert own == []
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started), "a worker is still there"


@pytest.mark.parametrize(
    ("sources", "cores"),
    [(SOURCES, 1), (dict(list(SOURCES.items())[:2]), 2)],
    ids=["one core", "two functions"],
)
def test_where_it_is_not_worth_it_no_worker_starts(
    sources: dict[str, FunctionSource],
    cores: int,
    own: list[str],
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit, "count_usable_cores", lambda: cores)
    assert len(load_functions(sources)) == len(sources)
    assert own == functions(sources)
    assert started == []


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


def _have_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")


@pytest.mark.parametrize(
    "harm",
    [
        _end_at_once,
        _write_nonsense,
        _have_other_sources,
        _have_no_processes,
        _have_no_interpreter,
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


def test_what_ends_the_compilation_ends_the_workers(
    started: list[subprocess.Popen[bytes]], state: jit._CacheState
) -> None:
    looks = iter(range(100))

    def check() -> None:
        if next(looks) > 2 * len(SOURCES):  # each is looked for twice; then one is compiled
            raise _GivenUpError

    state.check = check
    with pytest.raises(_GivenUpError):
        load_functions(SOURCES)
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)
    assert state.folder is not None
    with jit.FileLock(state.folder.with_suffix(".lock"), timeout=0):
        pass
