"""Answers to the prompts of an evaluation: one at a time, or several at once in the batch engine.

Both give the same answers: a text of the batch has the bits that it has alone (docs/adr/0019). The
batch is used for bases that kernels run and that have no routed experts; torch would compute its
rows one after the other.
"""

import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue

from expertctl.digest import Progress, no_progress
from expertctl.engine.loaded_base import TORCH_BELOW, Wish, backend_of
from expertctl.engine.preparation import paths_of
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.runtime import Engine
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.job import Event, Failed, Finished, Job
from expertctl.errors import DeviceError
from expertctl.package.model_config import read_config
from expertctl.routing.numerics import dtype_of
from expertctl.routing.planner import Planner
from expertctl.store.base_record import StoredBase
from expertctl.telling import Tell

AT_ONCE = 16
"""How many prompts are answered at a time."""
WORTH = 8
"""Fewer prompts are answered one at a time: a batch compiles kernels of its own."""
_LOOK_SECONDS = 1.0

Answering = Callable[[Sequence[RunRequest]], Iterator[tuple[int, RunResult]]]
"""Answers requests; yields the number of each with its result, in any order.

Raises whatever a run may raise. The number of the request at fault is `FailedAnswer.number`.
"""


class FailedAnswer(Exception):  # noqa: N818  # it carries the error that callers raise
    """Says which request failed, and its error."""

    def __init__(self, number: int, error: Exception) -> None:
        """Keep both."""
        super().__init__(number, error)
        self.number, self.error = number, error


def can_batch(
    base: StoredBase, request: RunRequest, *, prompts: int, torch_below: int = TORCH_BELOW
) -> bool:
    """Tell whether so many requests like this one are worth a batch, and give the same there."""
    route = request.route
    if prompts < WORTH or route.moe_miss != "exact":
        return False
    config = read_config(base.path)
    wish = Wish(dtype_of(base, route.dtype), route.adapter_dtype, route.deterministic)
    backend, _ = backend_of(config, wish, torch_below=torch_below)
    return config.experts is None and backend.name == "packed"


def one_by_one(engine: Engine, *, progress: Progress = no_progress) -> Answering:
    """Return what answers requests one after the other; ``progress`` gets 0 at pieces of text."""

    def answers(requests: Sequence[RunRequest]) -> Iterator[tuple[int, RunResult]]:
        for number, request in enumerate(requests):
            try:
                result = _result(engine.run(request), progress)
            except Exception as error:
                raise FailedAnswer(number, error) from error
            yield number, result

    return answers


@contextmanager
def in_batch(
    planner: Planner,
    base: StoredBase,
    request: RunRequest,
    *,
    budget: int | None,
    at_once: int,
    tell: Tell,
    progress: Progress = no_progress,
    torch_below: int = TORCH_BELOW,
) -> Iterator[Answering]:
    """Lend what answers several requests like this one at once, on a base that stays in memory.

    The requests may name the files that this one names. ``progress`` gets 0 at pieces of text.

    Raises:
        BudgetError: when base and files do not fit with the buffers of so many rows.
        ExpertError: whatever is wrong with the files.
    """
    route = request.route
    settings = BatchSettings(
        base=base.name,
        budget=budget,
        dtype=route.dtype,
        adapter_dtype=route.adapter_dtype,
        deterministic=route.deterministic,
        rows=at_once,
        queue=2 * at_once,
        warm_experts=False,
        tell_memory=False,
        files=tuple(paths_of(request)),
    )
    engine = BatchEngine(planner, settings, tell=tell, torch_below=torch_below)
    try:
        engine.start()
        yield partial(_batched, engine, ahead=2 * at_once, progress=progress)
    finally:
        engine.close()


def _batched(
    engine: BatchEngine, requests: Sequence[RunRequest], *, ahead: int, progress: Progress
) -> Iterator[tuple[int, RunResult]]:
    """Answer all requests; at most ``ahead`` of them are in the engine at a time."""
    events = SimpleQueue[tuple[int, Event]]()

    def submit(number: int) -> None:
        job = Job(id=uuid.uuid4().hex, request=requests[number], remember=False)
        engine.submit(job, lambda event: events.put((number, event)))

    begun = min(ahead, len(requests))
    for number in range(begun):
        submit(number)
    left = len(requests)
    while left:
        number, event = _next(events, engine)
        progress(0)
        match event:
            case Finished(results=(result,)):
                yield number, result
            case Failed(error=error):
                raise FailedAnswer(number, error) from error
            case _:
                continue
        left -= 1
        if begun < len(requests):
            submit(begun)
            begun += 1


def _next(events: SimpleQueue[tuple[int, Event]], engine: BatchEngine) -> tuple[int, Event]:
    """Wait for an event; an engine that broke sends none."""
    while True:
        try:
            return events.get(timeout=_LOOK_SECONDS)
        except Empty:
            if not engine.is_working:
                raise DeviceError("the engine ended before all prompts were answered") from None


def _result(pieces: Generator[str, None, RunResult], progress: Progress) -> RunResult:
    """Let a run come to its end."""
    while True:
        try:
            next(pieces)
            progress(0)
        except StopIteration as end:
            result: RunResult = end.value
            return result
