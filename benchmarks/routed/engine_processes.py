"""The processes that the benchmark of routed experts compares, and the memory that they use.

Each process holds one base. All read the same files, in which tokens encode the experts that they
request, so all route alike. Their anonymous memory is sampled and limited.

The memory of `run` is measured from outside: the same engine as on the command line answers from a
base that is larger than its budget, and a thread samples what the system reports for the process,
from before the base is read. Everything counts, including kernels, Python's own objects and the
stacks of threads.
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
from expertctl.engine_config import Dtype, EngineConfig
from expertctl.package.model_config import read_model_config
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.settings import Home, Settings
from expertctl.store.bases import BaseStore
from expertctl.user_request import SamplingOverrides, UserMessage

_APART = 0.002
_STATUS, _IO, _MAPS = (Path("/proc/self") / name for name in ("status", "io", "smaps_rollup"))


class ResidentSetWatch:
    """Samples the anonymous memory of this process every two milliseconds, inside ``with``.

    It also takes a sample on entry and on exit, even if its thread is late.
    """

    def __init__(self) -> None:
        """Record the current memory; growth is measured from there."""
        self._begin, self._most = read_status_bytes("RssAnon"), 0
        self._ended = threading.Event()
        self._looks: threading.Thread | None = None

    def __enter__(self) -> "ResidentSetWatch":
        """Start sampling; it may be left and entered again."""
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
        """Take a last sample, and stop."""
        assert self._looks is not None
        self._ended.set()
        self._looks.join()
        self._sample()

    @property
    def growth(self) -> int:
        """The maximum of all samples, minus the value at the beginning, in bytes."""
        return self._most - self._begin

    def _run(self) -> None:
        while not self._ended.wait(_APART):
            self._sample()

    def _sample(self) -> None:
        self._most = max(self._most, read_status_bytes("RssAnon"))


def limit_memory(additional: int) -> None:
    """Let this process allocate so many bytes more and not one beyond them."""
    limit = read_status_bytes("VmData") + additional
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def measure_huge_page_share(maps: Path = _MAPS) -> float:
    """Return the share of this process's own memory that is in huge pages, from 0 to 1.

    If the system has no more of them, weights are in small pages, and reading them is slower.
    """
    return _read_number(maps, "AnonHugePages") / _read_number(maps, "Anonymous")


def read_status_bytes(name: str) -> int:
    """Return what the system reports for this process under a name, in bytes."""
    return _read_number(_STATUS, name) * 1024


def read_io_bytes(name: str) -> int:
    """Return what this process has read or written, under a name of the system."""
    return _read_number(_IO, name)


def _read_number(file: Path, name: str) -> int:
    lines = file.read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1])


WARM_UP = 96
"""Tokens that each decoder reads before the measurement; slots are learnt meanwhile."""
THREADS = 2
OpenRouted = Callable[[], MeasuredEngine[RoutedTask]]


@dataclass(frozen=True, slots=True)
class DecoderSetup:
    """A base in a directory, and the settings of some of its decoders.

    ``share`` of the experts is resident where not all are. Sequences go through the first
    ``tokens`` of the vocabulary. With ``limit`` the process may use that share of the base's size
    as memory. Compiled kernels are stored below ``home``, as those of runs are, and copies below
    ``copies``.
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
    """Return a function that opens our own decoders."""
    return partial(_OurRoutedEngine, setting)


def open_transformers(directory: Path, dtype: str, experts: str) -> OpenRouted:
    """Return a function that opens transformers, with its name for an expert implementation."""
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
        """Run a task, or report a figure; sampling is not timed."""
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
        """Process a prompt."""
        assert threads == THREADS
        assert isinstance(task, ReadPrompt)
        ids = self._torch.arange(task.tokens)[None]
        return time_action(lambda: self._read(ids))()

    def _read(self, ids: object) -> None:
        with self._torch.inference_mode():
            self._model(ids, logits_to_keep=1)


def _check_memory_limit(size: int) -> None:
    """Make sure that this process cannot use so much memory."""
    try:
        allocate(size)
    except OSError:
        return
    raise AssertionError(f"{size} bytes were given in spite of the limit")


ANSWERS, ANSWER = 3, 64
"""Number of answers, and tokens of each."""


class BudgetFigure(Enum):
    """The figures that are queried after the answers."""

    GROWN = "bytes by which the memory of the process grew at most since before the engine"
    MISSES = "requests that found no resident, of 1"


Answering = Measured[BudgetFigure]


@dataclass(frozen=True, slots=True)
class BudgetSetup:
    """A base in a directory, and the memory budget of an engine, in bytes."""

    directory: Path
    home: Path
    dtype: Dtype
    budget: int


def open_answering(setting: BudgetSetup) -> Callable[[], Answering]:
    """Return a function that opens an engine, generates answers, and reports the memory used."""
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
        """Report a figure."""
        match task:
            case BudgetFigure.GROWN:
                return float(self._watch.growth)
            case BudgetFigure.MISSES:
                return self._misses


def _run_prompt(engine: LocalEngine, dtype: Dtype, seed: int) -> float:
    """Generate an answer; return the share of requests that missed during it."""
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
