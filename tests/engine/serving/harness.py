"""The parts of an engine without the thread that computes: a test takes its turns itself."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.loop import EngineLoop
from expertctl.engine.serving.model_runner import ModelRunner
from expertctl.engine.serving.processor import RequestProcessor
from expertctl.engine.serving.request import (
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    RequestState,
)
from expertctl.engine.serving.scheduler import Scheduler
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import BudgetError, ExpertError
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages
from tests.factories import write_base
from tests.store.fixtures import HomeFixture as InstalledHome

MAX_WAIT_SECONDS = 60.0
"""How long something may take that comes at once."""
SETTINGS = EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=2, queue=32))
ENDLESS_TOKENS = 400
"""So many tokens are not written while a test goes on that writes a few."""


def adapt_batching(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, batching=replace(config.batching, **changes))


def make_request(
    prompt: str = "Sort: 3, 1, 2", *experts: str, max_tokens: int = 6, **sampling: Any
) -> RunRequest:
    """A request that experts answer, or the base alone; greedy unless it says else."""
    wished = SamplingOverrides(max_tokens=max_tokens, **(sampling or {"greedy": True}))
    route = RouteRequest(prompt=prompt, seed=0, sampling=wished, base_alone=not experts)
    forced = tuple(ForcedExpert(Reference.parse(f"acme/{name}")) for name in experts)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=forced)


@pytest.fixture(scope="session")
def engine_packages(tmp_path_factory: pytest.TempPathFactory) -> EnginePackages:
    """Packages on a base that torch runs, and kernels where they are asked for."""
    folder = tmp_path_factory.mktemp("fitting")
    sizes = {"hidden": 48, "intermediate": 80, "head_dim": 16}
    base_dir = write_base(folder / "market-base", tie=False, seed=2, **sizes)
    return EnginePackages(folder, base_dir, read_base(base_dir))


@dataclass
class SubmittedRequest:
    """One who asked for something, and what was told."""

    state: RequestState
    events: list[JobEvent] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], JobFinished | JobFailed)

    @property
    def has_started(self) -> bool:
        return any(isinstance(event, OutputDelta) for event in self.events)

    @property
    def results(self) -> tuple[RunResult, ...]:
        [*_, last] = self.events
        assert isinstance(last, JobFinished), last
        return last.results

    @property
    def error(self) -> ExpertError:
        [*_, last] = self.events
        assert isinstance(last, JobFailed), last
        return last.error


class EngineHarness:
    """The owner of all parts."""

    def __init__(self, home: Home, settings: EngineConfig, *, numpy_below: int) -> None:
        self.messages = list[str]()
        self.planner = Planner.open(Settings(home, encoder="lexical"))
        tell = self.messages.append
        self.runner = ModelRunner(self.planner, settings, tell=tell, numpy_below=numpy_below)
        self.scheduler = Scheduler(queue=settings.batching.queue, rows=settings.batching.rows)
        self.processor = RequestProcessor(self.planner, self.runner, self.scheduler, tell=tell)
        self.processor.open_model()
        self.loop = EngineLoop(self.runner, self.scheduler, self.processor, tell=tell)
        self.idle_bytes = self.runner.memory.held

    def submit(self, wanted: RunRequest, **options: Any) -> SubmittedRequest:
        """Put a job into the line."""
        job = GenerationJob(
            id=uuid.uuid4().hex, request=self.runner.bind_request(wanted), **options
        )
        events = list[JobEvent]()
        caller = SubmittedRequest(RequestState(job, events.append), events)
        self.scheduler.enqueue(caller.state)
        self.processor.prepare_next()
        return caller

    def submit_until_ready(self, wanted: RunRequest, **options: Any) -> SubmittedRequest:
        """Put a job into the line, and wait until it lacks nothing but a row."""
        caller = self.submit(wanted, **options)
        self.wait(lambda: caller.state.stage == "ready" or caller.is_over)
        assert not caller.is_over, caller.events
        return caller

    def wait(self, condition: Callable[[], bool]) -> None:
        """Let the threads of the planner go on until something is so."""
        with self.scheduler.lock:
            assert self.scheduler.condition.wait_for(condition, MAX_WAIT_SECONDS)

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Take turns of the loop until something is so."""
        until = time.monotonic() + MAX_WAIT_SECONDS
        while not condition():
            assert time.monotonic() < until, (self.messages, self.scheduler.requests)
            self.loop.wait_for_work()
            self.loop.run_pass()
        self.check_integrity()

    def finish(self, *callers: SubmittedRequest) -> None:
        """Take turns until all have an answer or an error."""
        self.step_until(lambda: all(caller.is_over for caller in callers))

    def answer(self, wanted: RunRequest, **options: Any) -> SubmittedRequest:
        """Have one job answered."""
        caller = self.submit(wanted, **options)
        self.finish(caller)
        return caller

    def find_least_budget(self, wanted: RunRequest) -> int:
        """The smallest budget with which a request is not refused at once."""
        request = self.runner.bind_request(wanted)
        planned, budget = self.processor.plan(request).result(), self.runner.budget
        limit, refused = budget.limit, 0
        while budget.limit - refused > 1:
            enough, budget.limit = budget.limit, (budget.limit + refused) // 2
            try:
                self.runner.prepare(request, planned)
            except BudgetError:
                refused, budget.limit = budget.limit, enough
        enough, budget.limit = budget.limit, limit
        return enough

    def check_integrity(self) -> None:
        """Assert what holds between two turns."""
        self.scheduler.check_integrity()
        self.loop.batch.check_integrity()
        self.runner.check_integrity()

    def check_idle(self) -> None:
        """Assert that nobody holds anything any more but base and buffers."""
        assert self.scheduler.requests == ()
        assert self.runner.kv_in_use == 0
        tiers, budget = self.runner.resources.tiers, self.runner.budget
        tiers.clear()  # what is pinned would stay
        assert budget.reserved_bytes("experts") == 0
        assert budget.reserved_bytes("base") == self.idle_bytes["base"]

    def close(self) -> None:
        """End all jobs, then all parts; nothing may be left."""
        self.scheduler.close(seconds=0)
        self.step_until(lambda: self.scheduler.is_done)
        self.processor.close()
        self.runner.close()
        self.runner.resources.check_integrity()
        assert self.runner.budget.used == 0


@contextmanager
def open_engine_harness(
    home: Home, settings: EngineConfig = SETTINGS, *, numpy_below: int = NUMPY_MAX_BYTES
) -> Iterator[EngineHarness]:
    """Open a workshop; at its end nothing may be left."""
    harness = EngineHarness(home, settings, numpy_below=numpy_below)
    yield harness
    harness.close()


@contextmanager
def reserve_all_but(harness: EngineHarness, *, leaving: int) -> Iterator[None]:
    """All memory but so many bytes is somebody else's; what could be evicted counts as free."""
    tiers, budget = harness.runner.resources.tiers, harness.runner.budget
    with tiers.lock:
        size = tiers._memory.count_available(budget) - leaving
        budget.reserve("base", size, what="others")
    try:
        yield
    finally:
        tiers.release(Tier.DEVICE, "base", size)
        harness.scheduler.notify_freed()


@pytest.fixture(autouse=True)
def known(user_home: InstalledHome, engine_packages: EnginePackages) -> None:
    """The base and two experts are installed, for whoever imports this."""
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(
        *(engine_packages.package(f"acme/{n}", seed=i) for i, n in enumerate(("sql", "go")))
    )


@pytest.fixture
def harness(user_home: InstalledHome) -> Iterator[EngineHarness]:
    """A workshop as all settings are usual."""
    with open_engine_harness(user_home.home) as harness:
        yield harness
