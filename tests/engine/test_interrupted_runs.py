"""An interrupt at any line of a run's bookkeeping: the next run is as if there had been none."""

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any

import pytest

from expertctl.engine import (
    load_plan,
    local_engine,
    resources,
    running_batch,
    running_sequence,
)
from expertctl.engine.kv import block_pool, kv_cache, radix_cache
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory import adapter_cache, budget, process_registry
from expertctl.engine.result import RunResult
from expertctl.engine.torch import sequence_cache
from expertctl.errors import UsageError
from expertctl.routing.planner import Planner
from tests.engine.test_local_engine import run
from tests.engine.test_packed_runs import BUDGET, ask, home, packed_packages
from tests.store.fixtures import fast, user_home

__all__ = ["fast", "home", "packed_packages", "user_home"]

BOOKS: list[ModuleType] = [
    *(budget, budget, adapter_cache, adapter_cache, load_plan, resources),
    *(kv_cache, sequence_cache, block_pool, block_pool, radix_cache, local_engine),
    *(running_batch, running_sequence, process_registry),
]
FILES = {module.__file__ for module in BOOKS}
SECONDS = 60
Line = tuple[str, int]


def is_whole(line: Line) -> bool:
    """No signal is looked for where a ``with`` is left, nor among statements without a call."""
    text = linecache.getline(*line).strip()
    return text.startswith(
        ("with ", "if self._current_answer is answer", "self._current_answer = None")
    )


class LineWatch:
    """Hears of the lines of some files that this thread runs, and is called with each."""

    def __init__(
        self, at_line: Callable[[Line], None], files: Collection[str | None] = FILES
    ) -> None:
        self._at_line, self._files = at_line, files

    def __call__(self, frame: FrameType, event: str, _: Any) -> "LineWatch | None":
        if frame.f_code.co_filename not in self._files or frame.f_code.co_name.startswith("check_"):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not is_whole(line):
            self._at_line(line)
        return self

    def during(self, work: Callable[[], object]) -> None:
        was = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(was)


def interrupted_at(
    line: Line, time: int, work: Callable[[], object], files: Collection[str | None] = FILES
) -> bool:
    """Interrupt some work when it comes to a line for the so many-th time; tell if it did."""
    left = time

    def count(at: Line) -> None:
        nonlocal left
        left -= at == line
        if at == line and left == 0:
            raise KeyboardInterrupt

    try:
        LineWatch(count, files).during(work)
    except KeyboardInterrupt:
        return True
    return False


def some_runs(engine: LocalEngine) -> None:
    """What a base, an expert and a text need first, a text that goes on, and letting go of it."""
    for prompt in ("Sort: 3, 1, 2", "Sort: 3, 1, 2, and then what?"):
        for _ in engine.run(ask("lora", prompt=prompt, cache_key="chat")):
            pass
    engine.forget("chat")
    engine.close()


class InterruptedEngines:
    """Engines of one kind, and what they answer."""

    def __init__(self, home: Planner, *, numpy_below: int) -> None:
        self._home, self._numpy_below = home, numpy_below
        engine = self.engine()
        some_runs(engine)
        self.right = self.answer(engine)
        lines = Counter[Line]()
        engine = self.engine()
        LineWatch(lambda line: lines.update([line])).during(lambda: some_runs(engine))
        self.lines = lines

    def engine(self) -> LocalEngine:
        return LocalEngine(self._home, budget=BUDGET, numpy_below=self._numpy_below)

    def answer(self, engine: LocalEngine) -> RunResult:
        """Ask from a thread of its own: a lock that the main thread was left with is seen."""
        results: list[RunResult] = []

        def get() -> None:
            results.append(run(engine, ask("lora", cache_key="another chat")))

        asking = threading.Thread(target=get, daemon=True)
        asking.start()
        asking.join(SECONDS)
        [result] = results
        return result

    def check(self, line: Line, time: int) -> bool:
        """Interrupt once, then all is as it should be; tell if it came to that.

        What another thread did this time takes this one past lines that it came to before.
        """
        engine = self.engine()
        interrupted = interrupted_at(line, time, lambda: some_runs(engine))
        result = self.answer(engine)
        assert result.generated.tokens == self.right.generated.tokens
        for purpose in ("base", "buffers"):
            assert result.memory.held[purpose] == self.right.memory.held[purpose]
        engine.check_integrity()
        engine.close()
        assert engine.budget.used == 0
        return interrupted


Place = tuple[Line, int]


def choose_every_29th(places: list[Place], _: Collection[Line], *, even: bool) -> list[Place]:
    return places[::29]


def choose_lines(places: list[Place], others: Collection[Line], *, even: bool) -> list[Place]:
    """All places of lines of this kind's own; of those that both kinds have, every second line."""
    return [
        (line, time) for line, time in places if line not in others or even == (line[1] % 2 == 0)
    ]


@pytest.mark.parametrize(
    "choose", [choose_every_29th, pytest.param(choose_lines, marks=pytest.mark.all)]
)
@pytest.mark.parametrize("numpy_below", [0, 1 << 40])
def test_after_an_interrupt_at_any_line_the_next_run_is_as_ever(
    numpy_below: int, choose: Callable[..., list[Place]], home: Planner
) -> None:
    """Together the two kinds of engine are interrupted at any line that either comes to."""
    bench = InterruptedEngines(home, numpy_below=numpy_below)
    other = InterruptedEngines(home, numpy_below=0 if numpy_below else 1 << 40)
    places = sorted({(line, time) for line, most in bench.lines.items() for time in (1, most)})
    assert len(places) > 300
    chosen = choose(places, other.lines, even=numpy_below == 0)
    interrupted = 0
    for line, time in chosen:
        try:
            interrupted += bench.check(line, time)
        except BaseException as error:
            error.add_note(f"interrupted at {line}, time {time}")
            raise
    assert interrupted > 0.9 * len(chosen)


def test_what_is_in_memory_stays_after_an_interrupt_of_the_answer(home: Planner) -> None:
    engine = LocalEngine(home, budget=BUDGET)
    stream = engine.run(ask("lora"))
    next(stream)
    with pytest.raises(UsageError, match="generating another answer"):
        run(engine, ask("lora"))
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    engine.check_integrity()
    again = run(engine, ask("lora"))
    assert (again.experts_loaded, again.bytes_read.ssd) == (0, 0)
