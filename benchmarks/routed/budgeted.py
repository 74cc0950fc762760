"""What `run` takes of the memory that it was given, seen from outside.

The same `Engine` as on the command line answers from a base that is larger than its budget; beside
it a thread watches what the system counts for the process, from before the base is read. Everything
counts: kernels, Python's own objects and the stacks of threads, too.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from benchmarks.engine_process import Engine as Measured
from benchmarks.routed.resident_set import Watch
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.runtime import Engine
from expertctl.routing.planner import Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Dtype, RouteRequest
from expertctl.settings import Home, Settings
from expertctl.store.bases import BaseStore

ANSWERS, ANSWER = 3, 64
"""How many answers are written, and of how many tokens."""


class Told(Enum):
    """What is asked for after the answers."""

    GROWN = "bytes by which the memory of the process grew at most since before the engine"
    MISSES = "requests that found no resident, of 1"


Answering = Measured[Told]


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A base in a directory, and the bytes that an engine may take for it."""

    directory: Path
    home: Path
    dtype: Dtype
    budget: int


def answering(setting: Budgeted) -> Callable[[], Answering]:
    """Return what opens an engine and has it answer, and then reports what that took."""
    return partial(_Answering, setting)


class _Answering:
    def __init__(self, setting: Budgeted) -> None:
        self.about, self.weight_bytes = f"run, {setting.dtype}", 0
        bases = BaseStore(Home(setting.home).bases)
        if not any(base.path == setting.directory.resolve() for base in bases.bases()):
            bases.add(setting.directory)
        planner = Planner.open(Settings(Home(setting.home), encoder="lexical"))
        self._watch = Watch()
        with self._watch, ExitStack() as stack:
            engine = Engine(planner, budget=setting.budget)
            stack.callback(engine.close)
            for seed in range(ANSWERS):
                self._misses = _answer(engine, setting.dtype, seed)

    def run(self, task: Told, threads: int) -> float:
        """Tell a figure."""
        match task:
            case Told.GROWN:
                return float(self._watch.grown)
            case Told.MISSES:
                return self._misses


def _answer(engine: Engine, dtype: Dtype, seed: int) -> float:
    """Write an answer; return the share of requests that missed in it."""
    wishes = SamplingWishes(temperature=2.0, max_tokens=ANSWER)
    route = RouteRequest(prompt="a", base_alone=True, seed=seed, wishes=wishes, dtype=dtype)
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
