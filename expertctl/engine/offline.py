"""Work without a waiting client: kernel compilation in advance, and batched evaluation answers.

Kernels are kept below ``EXPERT_HOME`` for all later processes (docs/adr/0013). A few generated
tokens compile them for a base alone, and for each set of adapter kinds installed for it; first
those of a run, then those of the serving engine.

Prompts of an evaluation are answered one at a time, or several at once in the serving engine. Both
give the same answers: a sequence in a batch has the same bits as alone (docs/adr/0019). The batch
is used for bases that kernels run and that have no routed experts; numpy would compute its rows one
after the other.
"""

import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.backend import LoadConfig
from expertctl.engine.load_plan import NUMPY_MAX_BYTES, add_storages, choose_backend
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.preparation import list_expert_files
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.serving.request import GenerationJob, JobEvent, JobFailed, JobFinished
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import (
    WARNING_PREFIX,
    BudgetError,
    CountProgress,
    DeviceError,
    Notify,
    ignore_count,
    ignore_notification,
)
from expertctl.package.model_config import read_model_config
from expertctl.routing.base_dtype import choose_dtype
from expertctl.routing.candidate import InstalledExpert, explain_misfit
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.catalogue import Catalogue
from expertctl.user_request import SamplingOverrides, UserMessage

_PROMPT = "Sort these numbers in ascending order, then say which one is the largest: 41, 17, 23, 15"
_TOKENS = 3


@contextmanager
def without_usage_history(planner: Planner) -> Iterator[Planner]:
    """Yield the planner with a temporary usage history."""
    with tempfile.TemporaryDirectory() as folder:
        yield replace(planner, catalogue=Catalogue(Path(folder) / "index.db"))


def compile_ahead(
    planner: Planner,
    base: StoredBase,
    config: EngineConfig,
    *,
    kernel_progress: CountProgress = ignore_count,
    notify: Notify = ignore_notification,
) -> bool:
    """Run and serve a base; return whether kernels run it.

    Nothing is recorded as usage.

    Raises:
        ExpertError: as a run does.
    """
    with without_usage_history(planner) as unseen:
        engine = LocalEngine.from_config(
            unseen, config, kernel_progress=kernel_progress, tell=notify
        )
        try:
            result = _run_once(engine, base, config, ())
            if result.numerics.backend != "packed":
                return False
            for expert in _choose_one_of_each_kind(planner, base):
                _run_once(engine, base, config, (ForcedExpert(expert.digest),))
        finally:
            engine.close()
        _start_server_engine(unseen, replace(config, base=base.name), notify=notify)
    return True


def _start_server_engine(planner: Planner, config: EngineConfig, *, notify: Notify) -> None:
    """Start and stop the serving engine, which compiles its kernels; pass on only warnings."""

    def tell_warnings(text: str) -> None:
        if text.startswith(WARNING_PREFIX):
            notify(text)

    engine = ServingEngine(planner, config, tell=tell_warnings)
    try:
        engine.start()
    except BudgetError as error:
        notify(f"{WARNING_PREFIX}the kernels of `serve` were not compiled: {error.message}")
    finally:
        engine.close()


def _choose_one_of_each_kind(planner: Planner, base: StoredBase) -> Iterator[InstalledExpert]:
    """Yield one installed expert of the base for each set of adapter kinds and dtypes."""
    seen = set[frozenset[tuple[str, str]]]()
    for expert in planner.read_inventory().experts:
        kinds = frozenset((entry.kind, entry.dtype) for entry in expert.manifest.adapters)
        if kinds not in seen and not explain_misfit(expert, base.identity, allow_mismatch=False):
            seen.add(kinds)
            yield expert


def _run_once(
    engine: LocalEngine, base: StoredBase, config: EngineConfig, experts: tuple[ForcedExpert, ...]
) -> RunResult:
    wishes = SamplingOverrides(greedy=True, max_tokens=_TOKENS)
    route = RouteRequest(prompt=_PROMPT, base_alone=not experts, sampling=wishes, config=config)
    message = UserMessage(prompt=_PROMPT)
    request_once = RunRequest(message=message, route=route, experts=experts, base=base.name)
    return _finish_run(engine.run(request_once), ignore_progress)


BATCH_SIZE = 16
"""Number of prompts answered at a time."""
MIN_BATCH_PROMPTS = 8
"""Fewer prompts are answered one at a time: a batch compiles its own kernels."""
_POLL_SECONDS = 1.0

AnswerRequests = Callable[[Sequence[RunRequest]], Iterator[tuple[int, RunResult]]]
"""Answers requests; yields the index of each with its result, in any order.

Raises `AnswerError` with the index of the request that failed."""


class AnswerError(Exception):
    """Carries the index of the request that failed, and its error."""

    def __init__(self, number: int, error: Exception) -> None:
        """Store both."""
        super().__init__(number, error)
        self.number, self.error = number, error


def can_batch(
    base: StoredBase, request: RunRequest, *, prompts: int, numpy_below: int = NUMPY_MAX_BYTES
) -> bool:
    """Return whether so many requests like this one benefit from a batch, with the same results."""
    config = request.route.config
    if prompts < MIN_BATCH_PROMPTS or config.moe_miss != "exact":
        return False
    model = read_model_config(base.path)
    dtype = choose_dtype(base, config.dtype, device=config.device)
    wanted = add_storages(LoadConfig(dtype, config), base.path, model)
    backend, _ = choose_backend(model, wanted, numpy_below=numpy_below)
    return model.experts is None and backend.name == "packed"


def answer_sequentially(
    engine: LocalEngine, *, progress: Progress = ignore_progress
) -> AnswerRequests:
    """Return a function that answers requests in turn; ``progress`` gets 0 at pieces of text."""

    def answers(requests: Sequence[RunRequest]) -> Iterator[tuple[int, RunResult]]:
        for number, request in enumerate(requests):
            try:
                result = _finish_run(engine.run(request), progress)
            except Exception as error:
                raise AnswerError(number, error) from error
            yield number, result

    return answers


@contextmanager
def open_batch_answering(
    planner: Planner,
    base: StoredBase,
    request: RunRequest,
    *,
    batch_size: int,
    notify: Notify,
    progress: Progress = ignore_progress,
    numpy_below: int = NUMPY_MAX_BYTES,
) -> Iterator[AnswerRequests]:
    """Yield a function that answers several requests like this one at once, on a resident base.

    The requests may name only files that this one names. ``progress`` gets 0 at pieces of text.

    Raises:
        BudgetError: when base and files do not fit with the buffers of so many rows.
        ExpertError: for any problem with the files.
    """
    batching = BatchingConfig(
        rows=batch_size,
        queue=2 * batch_size,
        warm_experts=False,
        tell_memory=False,
        files=tuple(list_expert_files(request)),
    )
    config = replace(request.route.config, base=base.name, batching=batching)
    engine = ServingEngine(planner, config, tell=notify, numpy_below=numpy_below)
    try:
        engine.start()
        yield partial(_answer_batched, engine, ahead=2 * batch_size, progress=progress)
    finally:
        engine.close()


def _answer_batched(
    engine: ServingEngine, requests: Sequence[RunRequest], *, ahead: int, progress: Progress
) -> Iterator[tuple[int, RunResult]]:
    """Answer all requests; at most ``ahead`` of them are in the engine at a time."""
    events = SimpleQueue[tuple[int, JobEvent]]()

    def submit(number: int) -> None:
        job = GenerationJob(id=uuid.uuid4().hex, request=requests[number], remember=False)
        engine.submit(job, lambda event: events.put((number, event)))

    submitted = min(ahead, len(requests))
    for number in range(submitted):
        submit(number)
    left = len(requests)
    while left:
        number, event = _wait_for_event(events, engine)
        progress(0)
        match event:
            case JobFinished(results=(result,)):
                yield number, result
            case JobFailed(error=error):
                raise AnswerError(number, error) from error
            case _:
                continue
        left -= 1
        if submitted < len(requests):
            submit(submitted)
            submitted += 1


def _wait_for_event(
    events: SimpleQueue[tuple[int, JobEvent]], engine: ServingEngine
) -> tuple[int, JobEvent]:
    """Wait for an event; a failed engine sends none."""
    while True:
        try:
            return events.get(timeout=_POLL_SECONDS)
        except Empty:
            if not engine.is_working:
                raise DeviceError("the engine ended before all prompts were answered") from None


def _finish_run(pieces: Generator[str, None, RunResult], progress: Progress) -> RunResult:
    """Run a generation to its end."""
    while True:
        try:
            next(pieces)
            progress(0)
        except StopIteration as end:
            result: RunResult = end.value
            return result
