"""The parts of an engine without the thread that computes: a test takes its turns itself."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.board import Board
from expertctl.engine.serving.desk import Desk
from expertctl.engine.serving.house import House
from expertctl.engine.serving.job import Event, Failed, Finished, Job, Piece
from expertctl.engine.serving.press import Press
from expertctl.engine.serving.ticket import Ticket
from expertctl.engine.tiers import Tier
from expertctl.errors import BudgetError, ExpertError
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced, RouteRequest
from expertctl.settings import Home, Settings
from tests.engine.market import Market
from tests.factories import write_base
from tests.store.shop import House as InstalledHome

SECONDS = 60.0
"""How long something may take that comes at once."""
SETTINGS = BatchSettings(budget=32 << 20, rows=2, queue=32)
ENDLESS = 400
"""So many tokens are not written while a test goes on that writes a few."""


def request(
    prompt: str = "Sort: 3, 1, 2", *experts: str, max_tokens: int = 6, **wishes: Any
) -> RunRequest:
    """A request that experts answer, or the base alone; greedy unless it says else."""
    wished = SamplingWishes(max_tokens=max_tokens, **(wishes or {"greedy": True}))
    route = RouteRequest(prompt=prompt, seed=0, wishes=wished, base_alone=not experts)
    forced = tuple(Forced(Reference.parse(f"acme/{name}")) for name in experts)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=forced)


@pytest.fixture(scope="session")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    """Packages on a base that torch runs, and kernels where they are asked for."""
    folder = tmp_path_factory.mktemp("fitting")
    sizes = {"hidden": 48, "intermediate": 80, "head_dim": 16}
    base_dir = write_base(folder / "market-base", tie=False, seed=2, **sizes)
    return Market(folder, base_dir, read_base(base_dir))


@dataclass
class Caller:
    """One who asked for something, and what was told."""

    ticket: Ticket
    events: list[Event] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed)

    @property
    def has_begun(self) -> bool:
        return any(isinstance(event, Piece) for event in self.events)

    @property
    def results(self) -> tuple[RunResult, ...]:
        [*_, last] = self.events
        assert isinstance(last, Finished), last
        return last.results

    @property
    def error(self) -> ExpertError:
        [*_, last] = self.events
        assert isinstance(last, Failed), last
        return last.error


class Workshop:
    """The owner of all parts."""

    def __init__(self, home: Home, settings: BatchSettings, *, torch_below: int) -> None:
        self.told = list[str]()
        self.planner = Planner.open(Settings(home, encoder="lexical"))
        tell = self.told.append
        self.house = House(self.planner, settings, tell=tell, torch_below=torch_below)
        self.board = Board(queue=settings.queue, rows=settings.rows)
        self.desk = Desk(self.planner, self.house, self.board, tell=tell)
        self.desk.open_house()
        self.press = Press(self.house, self.board, self.desk, tell=tell)
        self.at_rest = self.house.memory.held

    def submit(self, wanted: RunRequest, **options: Any) -> Caller:
        """Put a job into the line."""
        job = Job(id=uuid.uuid4().hex, request=self.house.bound(wanted), **options)
        events = list[Event]()
        caller = Caller(Ticket(job, events.append), events)
        self.board.enter(caller.ticket)
        self.desk.prepare_next()
        return caller

    def ready(self, wanted: RunRequest, **options: Any) -> Caller:
        """Put a job into the line, and wait until it lacks nothing but a row."""
        caller = self.submit(wanted, **options)
        self.wait(lambda: caller.ticket.stage == "ready" or caller.is_over)
        assert not caller.is_over, caller.events
        return caller

    def wait(self, condition: Callable[[], bool]) -> None:
        """Let the threads of the desk go on until something is so."""
        with self.board.lock:
            assert self.board.changed.wait_for(condition, SECONDS)

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Take turns of the press until something is so."""
        until = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < until, (self.told, self.board.tickets)
            self.press.has_work()
            self.press.turn()
        self.check_integrity()

    def finish(self, *callers: Caller) -> None:
        """Take turns until all have an answer or an error."""
        self.turn_until(lambda: all(caller.is_over for caller in callers))

    def answer(self, wanted: RunRequest, **options: Any) -> Caller:
        """Have one job answered."""
        caller = self.submit(wanted, **options)
        self.finish(caller)
        return caller

    def least_budget(self, wanted: RunRequest) -> int:
        """The smallest budget with which a request is not refused at once."""
        request = self.house.bound(wanted)
        planned, budget = self.desk.plan(request).result(), self.house.budget
        limit, refused = budget.limit, 0
        while budget.limit - refused > 1:
            enough, budget.limit = budget.limit, (budget.limit + refused) // 2
            try:
                self.house.prepared(request, planned)
            except BudgetError:
                refused, budget.limit = budget.limit, enough
        enough, budget.limit = budget.limit, limit
        return enough

    def check_integrity(self) -> None:
        """Assert what holds between two turns."""
        self.board.check_integrity()
        self.press.batch.check_integrity()
        self.house.check_integrity()

    def check_idle(self) -> None:
        """Assert that nobody holds anything any more but base and buffers."""
        assert self.board.tickets == ()
        assert self.house.kv_in_use == 0
        tiers, budget = self.house.residents.tiers, self.house.budget
        tiers.clear()  # what is pinned would stay
        assert budget.held("experts") == 0
        assert budget.held("base") == self.at_rest["base"]

    def close(self) -> None:
        """End all jobs, then all parts; nothing may be left."""
        self.board.close(seconds=0)
        self.turn_until(lambda: self.board.is_done)
        self.desk.close()
        self.house.close()
        self.house.residents.check_integrity()
        assert self.house.budget.used == 0


@contextmanager
def workshop(
    home: Home, settings: BatchSettings = SETTINGS, *, torch_below: int = TORCH_BELOW
) -> Iterator[Workshop]:
    """Open a workshop; at its end nothing may be left."""
    shop = Workshop(home, settings, torch_below=torch_below)
    yield shop
    shop.close()


@contextmanager
def held_by_others(shop: Workshop, *, leaving: int) -> Iterator[None]:
    """All memory but so many bytes is somebody else's; what could be evicted counts as free."""
    tiers, budget = shop.house.residents.tiers, shop.house.budget
    with tiers.lock:
        size = tiers._memory.room(budget) - leaving
        budget.reserve("base", size, what="others")
    try:
        yield
    finally:
        tiers.release(Tier.DEVICE, "base", size)
        shop.board.tell_freed()


@pytest.fixture(autouse=True)
def known(house: InstalledHome, market: Market) -> None:
    """The base and two experts are installed, for whoever imports this."""
    house.bases.add(market.base_dir)
    house.trusting("acme")
    house.install(*(market.package(f"acme/{n}", seed=i) for i, n in enumerate(("sql", "go"))))


@pytest.fixture
def shop(house: InstalledHome) -> Iterator[Workshop]:
    """A workshop as all settings are usual."""
    with workshop(house.home) as shop:
        yield shop
