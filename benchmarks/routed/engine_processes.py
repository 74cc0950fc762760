"""How much memory this process has of its own, at every moment, and how much it may have.

The processes that the benchmark of routed experts compares; each holds one base.

All read the same files, in which tokens say which experts they ask for, so all route alike.

What `run` takes of the memory that it was given, seen from outside.

The same `Engine` as on the command line answers from a base that is larger than its budget; beside
it a thread watches what the system counts for the process, from before the base is read. Everything
counts: kernels, Python's own objects and the stacks of threads, too.
"""

import resource
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.engine_process import MeasuredEngine, ReadPrompt
from benchmarks.engine_process import MeasuredEngine as Measured
from benchmarks.harness import Seconds, time_action
from benchmarks.routed.decoders import (
    ExpertPlacement,
    FollowTask,
    ProcessFigure,
    ReportTask,
    RoutedTask,
    open_decoders,
)
from expertctl.engine.cpu.packed_base import packed_base_bytes
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.host import allocate
from expertctl.engine.request import RunRequest
from expertctl.engine.text.prompt import UserMessage
from expertctl.engine_config import Dtype, EngineConfig
from expertctl.package.model_config import read_model_config
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest, SamplingOverrides
from expertctl.settings import Home, Settings
from expertctl.store.bases import BaseStore

_APART = 0.002
_STATUS, _IO, _MAPS = (Path("/proc/self") / name for name in ("status", "io", "smaps_rollup"))


class ResidentSetWatch:
    """Looks every other millisecond at the anonymous memory of this process, inside ``with``.

    It looks when it is entered and when it is left too, however late its thread comes to it.
    """

    def __init__(self) -> None:
        """Note how much there is now; growth is measured from there."""
        self._begin, self._most = read_status_bytes("RssAnon"), 0
        self._ended = threading.Event()
        self._looks: threading.Thread | None = None

    def __enter__(self) -> "ResidentSetWatch":
        """Look from now on; it may be left and entered again."""
        self._sample()
        self._ended.clear()
        self._looks = threading.Thread(target=self._run, daemon=True)
        self._looks.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look once more, and then no more."""
        assert self._looks is not None
        self._ended.set()
        self._looks.join()
        self._sample()

    @property
    def growth(self) -> int:
        """The most bytes that were seen until now, less those at the beginning."""
        return self._most - self._begin

    def _run(self) -> None:
        while not self._ended.wait(_APART):
            self._sample()

    def _sample(self) -> None:
        self._most = max(self._most, read_status_bytes("RssAnon"))


def limit_memory(additional: int) -> None:
    """Let this process take so many bytes more of its own and not one beyond them."""
    limit = read_status_bytes("VmData") + additional
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def measure_huge_page_share(maps: Path = _MAPS) -> float:
    """Return how much of this process's own memory lies in huge pages, of 1.

    Where the system has none left, weights are looked up page by page, and read more slowly.
    """
    return _read_number(maps, "AnonHugePages") / _read_number(maps, "Anonymous")


def read_status_bytes(name: str) -> int:
    """Return what the system counts for this process under a name, in bytes."""
    return _read_number(_STATUS, name) * 1024


def read_io_bytes(name: str) -> int:
    """Return what this process had read or written, under a name of the system."""
    return _read_number(_IO, name)


def _read_number(file: Path, name: str) -> int:
    lines = file.read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1])


WARM_UP = 96
"""Tokens that each decoder reads before it is measured; slots are learned meanwhile."""
THREADS = 2
OpenRouted = Callable[[], MeasuredEngine[RoutedTask]]


@dataclass(frozen=True, slots=True)
class DecoderSetup:
    """A base in a directory, and how some decoders of it are held.

    ``share`` of the experts is resident where not all are. Texts go through the first ``tokens`` of
    the vocabulary. With ``limit`` the process may have that share of the base's size in memory.
    Compiled kernels are kept below ``home``, as those of runs are, and copies below ``copies``.
    """

    directory: Path
    home: Path
    placements: tuple[ExpertPlacement, ...]
    tokens: int
    scheme: Scheme = Scheme.BFLOAT16
    share: float = 1.0
    limit: float | None = None
    copies: Path | None = None


def open_our_decoders(setting: DecoderSetup) -> OpenRouted:
    """Return what opens our own decoders."""
    return partial(_OurRoutedEngine, setting)


def open_transformers(directory: Path, dtype: str, experts: str) -> OpenRouted:
    """Return what opens transformers, with its own name for how it multiplies with experts."""
    return partial(_TransformersRoutedEngine, directory, dtype, experts)


class _OurRoutedEngine:
    def __init__(self, setting: DecoderSetup) -> None:
        use_kernel_cache(Home(setting.home))
        config = read_model_config(setting.directory)
        self.weight_bytes = packed_base_bytes(config, setting.scheme)
        self._watch = ResidentSetWatch()
        if setting.limit is not None:
            limit_memory(int(setting.limit * self.weight_bytes))
            _check_memory_limit(self.weight_bytes)
        self._read_before = read_io_bytes("read_bytes")
        with self._watch:
            self._homes = open_decoders(
                setting.directory,
                setting.placements,
                ThreadPool(THREADS),
                scheme=setting.scheme,
                share=setting.share,
                tokens=setting.tokens,
                copies=setting.copies,
            )
            for home in self._homes.values():
                home.decode(WARM_UP)
        self.about = f"ours, {setting.scheme.value}"

    def run(self, task: RoutedTask, threads: int) -> float:
        """Do a task, or say a figure; what is watched is not timed."""
        assert threads == THREADS
        match task:
            case FollowTask(keeping, tokens):
                return self._homes[keeping].decode(tokens)
            case ReadPrompt(tokens):
                return self._homes[ExpertPlacement.WHOLE].read_prompt(tokens)
            case ReportTask(keeping, figure):
                return float(self._read_figure(keeping, figure))

    def _read_figure(self, keeping: ExpertPlacement, figure: ProcessFigure) -> float:
        home = self._homes[keeping]
        match figure:
            case ProcessFigure.HELD:
                return home.nbytes
            case ProcessFigure.GROWN:
                with self._watch:
                    home.decode(WARM_UP)
                return self._watch.growth
            case ProcessFigure.DISK:
                return read_io_bytes("read_bytes") - self._read_before
            case ProcessFigure.READ:
                return home.read_bytes
            case ProcessFigure.MISSES:
                return home.miss_rate
            case ProcessFigure.HUGE:
                return measure_huge_page_share()


class _TransformersRoutedEngine:
    def __init__(self, directory: Path, dtype: str, experts: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        torch.set_num_threads(THREADS)
        self._torch: Any = torch
        self._model = models.from_pretrained(
            directory, dtype=getattr(torch, dtype), experts_implementation=experts
        ).eval()
        self.weight_bytes = sum(each.nbytes for each in self._model.parameters())
        self.about = f"transformers {version('transformers')}, {dtype}, experts: {experts}"

    def run(self, task: RoutedTask, threads: int) -> Seconds:
        """Read a prompt."""
        assert threads == THREADS
        assert isinstance(task, ReadPrompt)
        ids = self._torch.arange(task.tokens)[None]
        return time_action(lambda: self._read(ids))()

    def _read(self, ids: object) -> None:
        with self._torch.inference_mode():
            self._model(ids, logits_to_keep=1)


def _check_memory_limit(size: int) -> None:
    """Make sure that this process cannot have so much memory."""
    try:
        allocate(size)
    except OSError:
        return
    raise AssertionError(f"{size} bytes were given in spite of the limit")


ANSWERS, ANSWER = 3, 64
"""How many answers are written, and of how many tokens."""


class BudgetFigure(Enum):
    """What is asked for after the answers."""

    GROWN = "bytes by which the memory of the process grew at most since before the engine"
    MISSES = "requests that found no resident, of 1"


Answering = Measured[BudgetFigure]


@dataclass(frozen=True, slots=True)
class BudgetSetup:
    """A base in a directory, and the bytes that an engine may take for it."""

    directory: Path
    home: Path
    dtype: Dtype
    budget: int


def open_answering(setting: BudgetSetup) -> Callable[[], Answering]:
    """Return what opens an engine and has it answer, and then reports what that took."""
    return partial(_AnsweringEngine, setting)


class _AnsweringEngine:
    def __init__(self, setting: BudgetSetup) -> None:
        self.about, self.weight_bytes = f"run, {setting.dtype}", 0
        bases = BaseStore(Home(setting.home).bases)
        if not any(base.path == setting.directory.resolve() for base in bases.list_bases()):
            bases.add(setting.directory)
        planner = Planner.open(Settings(Home(setting.home), encoder="lexical"))
        self._watch = ResidentSetWatch()
        with self._watch, ExitStack() as stack:
            engine = LocalEngine(planner, budget=setting.budget)
            stack.callback(engine.close)
            for seed in range(ANSWERS):
                self._misses = _run_prompt(engine, setting.dtype, seed)

    def run(self, task: BudgetFigure, threads: int) -> float:
        """Tell a figure."""
        match task:
            case BudgetFigure.GROWN:
                return float(self._watch.growth)
            case BudgetFigure.MISSES:
                return self._misses


def _run_prompt(engine: LocalEngine, dtype: Dtype, seed: int) -> float:
    """Write an answer; return the share of requests that missed in it."""
    wishes = SamplingOverrides(temperature=2.0, max_tokens=ANSWER)
    route = RouteRequest(
        prompt="a", base_alone=True, seed=seed, sampling=wishes, config=EngineConfig(dtype=dtype)
    )
    running = engine.run(RunRequest(message=UserMessage(prompt="a"), route=route))
    while True:
        try:
            next(running)
        except StopIteration as ended:
            result = ended.value
            break
    assert result.generated.tokens, "nothing was written"
    assert result.moe is not None, "all experts fit"
    activity = result.moe.activity
    return float(activity.misses / activity.requests)
