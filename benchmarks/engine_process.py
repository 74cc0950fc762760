"""Engines that are measured in turns, each in its own process, which sleeps in between.

So the threads, allocator and caches of one engine do not affect another. Each measures its own
time, which excludes the call between processes.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from benchmarks.harness import Run, Seconds


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Process a prompt of so many tokens, up to the logits of the last one."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode so many tokens one after the other, after a context that was processed before."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class ReadMemory:
    """Read the weights once without computing."""


Task = ReadPrompt | Decode | ReadMemory
InputTask = TypeVar("InputTask", contravariant=True)
AnyTask = TypeVar("AnyTask")


class MeasuredEngine(Protocol[InputTask]):
    """An engine that can be measured; ``about`` describes it in one line."""

    about: str
    weight_bytes: int

    def run(self, task: InputTask, threads: int) -> Seconds:
        """Run a task; return the seconds it took."""
        ...


OpenEngine = Callable[[], MeasuredEngine[Task]]


class EngineProcess(Generic[AnyTask]):
    """An engine in another process; use with ``with``."""

    def __init__(self, open_engine: Callable[[], MeasuredEngine[AnyTask]]) -> None:
        """Describe the process; the child calls ``open_engine``, so it must be importable."""
        self.about, self.weight_bytes = "", 0
        self._open = open_engine
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve_tasks, args=(there, open_engine), daemon=True)
        self._there = there

    def __enter__(self) -> "EngineProcess[AnyTask]":
        """Start the process and wait until its weights are in memory."""
        self._process.start()
        self._there.close()
        self.about, self.weight_bytes = self._here.recv()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process, which frees its memory."""
        self._here.close()
        self._process.join()

    def run(self, task: AnyTask, threads: int) -> Seconds:
        """Run a task in the process; return the seconds it took there."""
        self._here.send((task, threads))
        answer = self._here.recv()
        assert isinstance(answer, float)
        return answer

    def bind(self, task: AnyTask, threads: int) -> Run:
        """Return the task as a run."""
        return lambda: self.run(task, threads)


def make_prompt_ids(tokens: int, vocabulary: int) -> list[int]:
    """Return a prompt with token ids scattered over the vocabulary."""
    return [7919 * (number + 1) % vocabulary for number in range(tokens)]


def _serve_tasks(
    connection: Connection, open_engine: Callable[[], MeasuredEngine[AnyTask]]
) -> None:
    engine = open_engine()
    connection.send((engine.about, engine.weight_bytes))
    while True:
        try:
            task, threads = connection.recv()
        except EOFError:
            return
        connection.send(engine.run(task, threads))
