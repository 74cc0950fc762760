"""What is known to be needed is brought in time, once, and never at the cost of what is in use."""

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertctl.engine.memory.adapter_cache import (
    AdapterCache,
    AdapterPrefetcher,
    CacheKey,
    CacheRequest,
    Tier,
)
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import BudgetError, DigestError
from expertctl.reference import Digest
from tests.engine.memory.test_tiers import Pool

LIMIT = 1000
PATIENCE = 60.0
"""Seconds after which a thread counts as stuck."""


STEPS = 800


class Block:
    """Memory that tells when it is gone."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes


class LiveByteCounter:
    """Counts bytes of live blocks, and asserts that there is room for each before it is made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[weakref.ref[Block]] = []
        self.problems: list[str] = []
        self.coming: list[str] = []
        self.loads: list[str] = []

    def live(self) -> int:
        blocks = [ref() for ref in self._blocks]
        self._blocks = [ref for ref in self._blocks if ref() is not None]
        return sum(block.nbytes for block in blocks if block is not None)

    def load(self, name: str, nbytes: int, meanwhile: Callable[[], None]) -> Block:
        with self._lock:
            if name in self.coming:
                self.problems.append(f"{name} is loaded twice at a time")
            self.coming.append(name)
            self.loads.append(name)
        try:
            meanwhile()
            with self._lock:
                if self.live() + nbytes > LIMIT:
                    self.problems.append(f"no room for {name} beside {self.live()}")
                block = Block(name, nbytes)
                self._blocks.append(weakref.ref(block))
            return block
        finally:
            with self._lock:
                self.coming.remove(name)


@dataclass
class PrefetchHarness:
    """Tiers with a prefetch, and what is brought into them."""

    budget: MemoryBudget
    tiers: AdapterCache
    prefetch: AdapterPrefetcher[Block]
    meter: LiveByteCounter

    def wanted(
        self, name: str, nbytes: int = 100, meanwhile: Callable[[], None] = lambda: None
    ) -> CacheRequest[Block]:
        meter = self.meter
        return CacheRequest(key(name), nbytes, name, lambda: meter.load(name, nbytes, meanwhile))

    def use(self, *names: str, nbytes: int = 100) -> None:
        self.tiers.begin_request()
        with self.tiers.pin([self.wanted(name, nbytes) for name in names]):
            pass

    def resident(self, names: str) -> str:
        return "".join(name for name in names if self.tiers.contains(key(name)))

    def check(self) -> None:
        self.tiers.check_integrity()
        self.prefetch.check_integrity()
        assert self.meter.problems == []


def key(name: str) -> CacheKey:
    return (Tier.DEVICE if name.isupper() else Tier.RAM, Digest.compute(name.encode()))


def new_home(workers: int = 1) -> PrefetchHarness:
    budget = MemoryBudget(LIMIT)
    tiers = AdapterCache(ram=budget, device=budget)
    return PrefetchHarness(
        budget, tiers, AdapterPrefetcher(tiers, workers=workers), LiveByteCounter()
    )


@pytest.fixture
def home() -> Iterator[PrefetchHarness]:
    home = new_home()
    yield home
    home.prefetch.wait_until_idle()
    home.check()


def until(holds: Callable[[], bool]) -> None:
    """Return when something holds that another thread brings about."""
    looks, pause = 0, threading.Event()
    while not holds():
        assert looks < PATIENCE * 1000, "it never came about"
        pause.wait(0.001)
        looks += 1


def started(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_what_is_expected_is_there_when_it_is_asked_for(home: PrefetchHarness) -> None:
    with home.prefetch.expect([home.wanted("a"), home.wanted("b")]):
        home.prefetch.wait_until_idle()
        assert home.resident("ab") == "ab"
        home.use("a", "b")
    traffic = home.tiers.traffic[Tier.RAM]
    assert (home.meter.loads, traffic.waits) == (["a", "b"], 0)
    assert (traffic.loads, traffic.hits) == (2, 0), "brought for this use, so no hits"
    home.use("a")
    assert (traffic.loads, traffic.hits) == (2, 1)


def test_who_asks_for_what_is_on_its_way_waits_for_it_and_starts_no_second_load(
    home: PrefetchHarness,
) -> None:
    waits = home.tiers.traffic[Tier.RAM]
    asking: list[threading.Thread] = []

    def meanwhile() -> None:
        asking.append(started(lambda: home.use("a")))
        until(lambda: waits.waits == 1)

    with home.prefetch.expect([home.wanted("a", 100, meanwhile)]):
        home.prefetch.wait_until_idle()
        asking[0].join(PATIENCE)
    assert home.meter.loads == ["a"]
    assert home.resident("a") == "a", "it was used, so it stays"


def test_what_failed_to_come_is_told_to_the_request_that_needs_it(home: PrefetchHarness) -> None:
    def fail() -> None:
        raise DigestError("a is not what was installed")

    broken = home.wanted("a", 100, fail)
    with home.prefetch.expect([broken, home.wanted("b")]):
        home.prefetch.wait_until_idle()
        assert (home.resident("ab"), home.budget.used) == ("b", 100)
        with pytest.raises(DigestError, match="a is not"), home.tiers.pin([broken]):
            pass
    assert home.budget.used == 0


def test_who_waited_for_what_failed_to_come_brings_it_anew(home: PrefetchHarness) -> None:
    """A reading that was given up by the one is no error of the other."""
    outcome: list[str] = []
    waits = home.tiers.traffic[Tier.RAM]

    def ask() -> None:
        with home.tiers.pin([home.wanted("a")]) as [block]:
            outcome.append(block.name)

    def meanwhile() -> None:
        asking.append(started(ask))
        until(lambda: waits.waits == 1)
        raise KeyError("given up")

    asking: list[threading.Thread] = []
    with home.prefetch.expect([home.wanted("a", 100, meanwhile)]):
        until(lambda: bool(asking))
        asking[0].join(PATIENCE)
    assert outcome == ["a"]
    assert home.meter.loads == ["a", "a"]


def test_nothing_goes_for_it_that_is_in_use_or_needed_sooner(home: PrefetchHarness) -> None:
    with home.tiers.pin([home.wanted("a", 400)]), ExitStack() as jobs:
        jobs.enter_context(home.prefetch.expect([home.wanted("b", 400)]))
        home.prefetch.wait_until_idle()
        with home.prefetch.expect([home.wanted("c", 400)]):
            home.use("d", nbytes=200)
            assert home.resident("abcd") == "abd", "there is no room for c yet"
            jobs.close()
            home.prefetch.wait_until_idle()
            assert home.resident("abcd") == "acd"


def test_of_one_job_nothing_goes_for_the_rest(home: PrefetchHarness) -> None:
    with home.prefetch.expect([home.wanted("a", 400), home.wanted("b", 700)]):
        until(lambda: home.resident("a") == "a")
        home.use("c", nbytes=500)
        assert home.resident("abc") == "ac", "b does not fit beside a"


def test_what_nobody_expects_goes_for_it_the_lowest_priority_first(home: PrefetchHarness) -> None:
    home.use("a", nbytes=300)
    home.use("a", nbytes=300)
    home.use("b", nbytes=300)
    home.use("c", nbytes=300)
    with home.prefetch.expect([home.wanted("d", 300)]):
        home.prefetch.wait_until_idle()
        assert home.resident("abcd") == "acd"


def test_room_for_a_running_request_is_taken_from_what_is_needed_last(
    home: PrefetchHarness,
) -> None:
    with (
        home.prefetch.expect([home.wanted("a", 300)]),
        home.prefetch.expect([home.wanted("b", 300)]),
    ):
        home.prefetch.wait_until_idle()
        home.use("c", nbytes=600)
        assert home.resident("abc") == "ac"
        home.use("d", nbytes=1000)
        assert home.resident("abcd") == "d"


def test_a_request_waits_for_room_that_only_an_arrival_has(home: PrefetchHarness) -> None:
    """What is on its way for later cannot be freed at once, but it is no reason to refuse."""
    asking: list[threading.Thread] = []
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        home.use("b", nbytes=900)

    def meanwhile() -> None:
        asking.append(started(ask))
        begun.wait(PATIENCE)

    with home.prefetch.expect([home.wanted("a", 500, meanwhile)]):
        until(lambda: bool(asking))
        asking[0].join(PATIENCE)
        home.prefetch.wait_until_idle()
        assert home.resident("ab") == "b"


def test_what_is_expected_no_more_gives_its_memory_back(home: PrefetchHarness) -> None:
    with home.prefetch.expect([home.wanted("a", 400), home.wanted("b", 400)]):
        home.prefetch.wait_until_idle()
        home.use("b", nbytes=400)
    assert (home.resident("ab"), home.budget.used) == ("b", 400)


def test_what_another_job_expects_too_stays(home: PrefetchHarness) -> None:
    with home.prefetch.expect([home.wanted("a")]):
        with home.prefetch.expect([home.wanted("a")]):
            home.prefetch.wait_until_idle()
        assert home.resident("a") == "a"
    assert home.resident("a") == ""


def test_what_is_given_up_while_it_comes_goes_as_soon_as_it_is_here(home: PrefetchHarness) -> None:
    job = ExitStack()
    job.enter_context(home.prefetch.expect([home.wanted("a", 400, job.close), home.wanted("b")]))
    home.prefetch.wait_until_idle()
    assert (home.meter.loads, home.budget.used) == (["a"], 0)


def test_given_up_before_there_was_room_it_is_never_brought(home: PrefetchHarness) -> None:
    with home.tiers.pin([home.wanted("a", 900)]):
        with home.prefetch.expect([home.wanted("b", 400)]):
            pass
        home.prefetch.wait_until_idle()
    assert home.meter.loads == ["a"]


def test_nothing_is_brought_for_a_plan_that_is_compiled_and_the_plan_stays(
    home: PrefetchHarness,
) -> None:
    home.use("P", nbytes=300)
    for _ in range(3):
        home.use("a", nbytes=300)
    with home.prefetch.expect([home.wanted("b", 300)], plan=key("P")):
        home.prefetch.wait_until_idle()
        home.use("c", nbytes=500)
        assert home.resident("abcP") == "cP"


def test_a_thread_ends_with_its_work_and_another_begins_with_new(home: PrefetchHarness) -> None:
    for name in "abc":
        with home.prefetch.expect([home.wanted(name)]):
            home.prefetch.wait_until_idle()
            home.prefetch.check_integrity()
            home.use(name)
    assert home.resident("abc") == "abc"


SIZES = dict(zip("abcdef", [0, 90, 250, 400, 400, 1001], strict=True))


class Expectations(RuleBasedStateMachine):
    """Random jobs; while something is fetched, anything else may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.home = new_home()
        self.tiers = self.home.tiers
        self.jobs: list[tuple[ExitStack, int, str]] = []
        self.pins: list[tuple[ExitStack, str]] = []
        self.coming = 0

    def wanted(
        self, name: str, meanwhile: Callable[[], None] = lambda: None
    ) -> CacheRequest[Block]:
        return self.home.wanted(name, SIZES[name], meanwhile)

    def pinned(self) -> set[str]:
        return {name for _, names in self.pins for name in names}

    def room_besides(self, names: set[str]) -> int:
        there = {name for name in names if self.tiers.contains(key(name))}
        return LIMIT - self.coming - sum(SIZES[name] for name in there)

    @rule(names=st.text("abcdef", min_size=1, max_size=3))
    def a_job_is_planned(self, names: str) -> None:
        stack = ExitStack()
        ticket = stack.enter_context(self.tiers.expect([key(name) for name in names]))
        self.jobs.append((stack, ticket, names))

    @precondition(lambda self: self.jobs)
    @rule(number=st.integers(0, 9))
    def a_job_ends(self, number: int) -> None:
        stack, *_ = self.jobs.pop(number % len(self.jobs))
        stack.close()

    @rule(name=st.sampled_from("abcdef"))
    def a_request_comes(self, name: str) -> None:
        """A single thread cannot wait, so it asks for what can be had at once or never."""
        self.tiers.begin_request()
        fits = self.tiers.contains(key(name)) or SIZES[name] <= self.room_besides(self.pinned())
        if self.coming and not fits:
            return
        stack = ExitStack()
        try:
            stack.enter_context(self.tiers.pin([self.wanted(name)]))
        except BudgetError:
            assert not fits
            return
        assert fits
        self.pins.append((stack, name))

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 9))
    def a_request_ends(self, number: int) -> None:
        self.pins.pop(number % len(self.pins))[0].close()

    @rule(age=st.integers(1, 300))
    def time_passes(self, age: int) -> None:
        for _ in range(age):
            self.tiers.begin_request()

    @rule()
    def all_that_can_go_does(self) -> None:
        self.tiers.clear()

    @precondition(lambda self: self.jobs)
    @rule(number=st.integers(0, 9), fails=st.booleans(), data=st.data())
    def something_is_fetched(self, number: int, fails: bool, data: st.DataObject) -> None:
        _, ticket, names = self.jobs[number % len(self.jobs)]
        name = data.draw(st.sampled_from(names))
        sooner = {n for _, t, expected in self.jobs if t <= ticket for n in expected}
        spared = {n for n in sooner | self.pinned() if self.tiers.contains(key(n))}
        there = self.tiers.contains(key(name))
        if not there and SIZES[name] > self.room_besides(spared):
            return
        gone: list[bool] = []

        def meanwhile() -> None:
            assert {n for n in spared if self.tiers.contains(key(n))} == spared
            self.coming = SIZES[name]
            self.anything_else(data, name)
            self.coming = 0
            gone.append(fails or not any(name in expected for _, _, expected in self.jobs))
            if fails:
                raise DigestError(f"{name} is not what was installed")

        self.tiers.fetch(self.wanted(name, meanwhile), ticket)
        assert bool(gone) != there
        assert self.tiers.contains(key(name)) == (there or not gone[0])

    def anything_else(self, data: st.DataObject, name: str) -> None:
        other = data.draw(st.sampled_from([n for n in SIZES if n != name]))
        match data.draw(st.sampled_from(["nothing", "a job ends", "a request", "end", "clear"])):
            case "a job ends":
                self.a_job_ends(data.draw(st.integers(0, 9)))
            case "a request":
                self.a_request_comes(other)
            case "end" if self.pins:
                self.a_request_ends(data.draw(st.integers(0, 9)))
            case "clear":
                self.tiers.clear()
            case _:
                pass

    @invariant()
    def live_bytes_are_those_of_the_ledger(self) -> None:
        self.home.check()
        assert self.home.meter.live() == self.home.budget.used <= LIMIT

    def teardown(self) -> None:
        while self.pins:
            self.a_request_ends(0)
        while self.jobs:
            self.a_job_ends(0)
        self.tiers.clear()
        assert self.home.meter.live() == self.home.budget.used == 0


TestExpectations = Expectations.TestCase
TestExpectations.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def a_life(home: PrefetchHarness, seed: int, told: list[str]) -> None:
    """What one of several threads does: requests with and without notice, memory, kept rows."""
    rng, rows = random.Random(seed), Pool(home.tiers)
    try:
        for step in range(STEPS):
            names = rng.sample("abcdefgh", rng.randint(1, 2))
            needs = [home.wanted(n, 60 + 40 * (ord(n) - 97), lambda: a_mishap(rng)) for n in names]
            match rng.randrange(5):
                case 0:
                    a_request(home, needs)
                case 1 | 2:
                    with home.prefetch.expect(needs):
                        if rng.random() < 0.8:
                            a_request(home, needs)
                case 3:
                    a_pass(home, rng.randrange(300))
                case _:
                    a_kept_text(rows, step)
    except BaseException as error:
        told.append(f"{seed}: {error!r}")
        raise


def a_mishap(rng: random.Random) -> None:
    if rng.random() < 0.1:
        raise DigestError("it is not what was installed")


def a_pass(home: PrefetchHarness, size: int) -> None:
    with (
        suppress(BudgetError),
        home.tiers.reserve_during(Tier.DEVICE, "buffers", size, what="the buffers"),
    ):
        home.tiers.check_integrity()


def a_request(home: PrefetchHarness, needs: list[CacheRequest[Block]]) -> None:
    home.tiers.begin_request()
    try:
        with home.tiers.pin(needs) as blocks:
            assert [block.name for block in blocks] == [need.description for need in needs]
            home.tiers.check_integrity()
            blocks.clear()
    except (BudgetError, DigestError):
        pass


def a_kept_text(rows: Pool, step: int) -> None:
    with suppress(BudgetError):
        rows.keep(10 + step % 100)
    with rows.tiers.lock:
        rows.give_up(rows.nbytes // 2 if step % 2 else 0)


@pytest.fixture
def hurried() -> Iterator[None]:
    """Let threads take turns a hundred times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("seed", range(4))
def test_threads_share_the_tiers_without_losing_a_byte(seed: int) -> None:
    home, told = new_home(workers=2), list[str]()
    threads = [
        started(lambda i=i: a_life(home, 10 * seed + i, told))  # type: ignore[misc]  # its default
        for i in range(4)
    ]
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    assert told == []
    home.prefetch.wait_until_idle()
    home.check()
    assert home.budget.reserved_bytes("buffers") == 0
    home.tiers.clear()
    assert home.budget.used == home.meter.live() == 0
