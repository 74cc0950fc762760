"""A run's experts are read while its base is: in the same budget, and no thread outlives it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.request import FileExpert, NamedExpert
from expertctl.errors import BudgetError, DigestError, ExpertError
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import find_least_budget, planner, request, run
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "user_home"]

BUDGET = 8 << 20
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def furnished(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(
        engine_packages.package("acme/one", seed=1), engine_packages.package("acme/two", seed=2)
    )


class ReadWatch:
    """Hears of every byte that is read; the base waits until an expert was begun."""

    def __init__(self, user_home: HomeFixture) -> None:
        self.readers: list[str] = []
        self.engine = LocalEngine(planner(user_home), budget=BUDGET, progress=self.progress)
        self.in_base: Callable[[], object] = lambda: None
        self._begun = threading.Event()

    def progress(self, size: int) -> None:
        name = threading.current_thread().name
        self.readers.append(name)
        if name == "prefetch":
            self._begun.set()
        elif threading.current_thread() is threading.main_thread() and size:
            self.in_base()

    def wait_for_expert(self) -> None:
        assert self._begun.wait(PATIENCE), "no expert is read while the base is"

    def leaves_nothing(self) -> None:
        threads_end()
        self.engine.check_integrity()
        assert self.engine.budget.reserved_bytes("buffers") == 0


def threads_end() -> None:
    """One that has brought its last need may be a moment from its end."""
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def watch(user_home: HomeFixture) -> ReadWatch:
    return ReadWatch(user_home)


def named(*names: str) -> tuple[NamedExpert, ...]:
    return tuple(ForcedExpert(Reference.parse(f"acme/{name}")) for name in names)


def test_experts_are_read_while_the_base_is(watch: ReadWatch, user_home: HomeFixture) -> None:
    watch.in_base = watch.wait_for_expert
    result = run(watch.engine, request(*named("one", "two")))
    assert result.experts_loaded == 2
    assert watch.engine.tiers.traffic[Tier.RAM].hits == 0
    watch.leaves_nothing()
    plain = run(LocalEngine(planner(user_home), budget=BUDGET), request(*named("one", "two")))
    assert plain.generated.tokens == result.generated.tokens


def test_beside_a_base_that_is_there_nothing_is_fetched_ahead(watch: ReadWatch) -> None:
    run(watch.engine, request(*named("one")))
    watch.readers.clear()
    run(watch.engine, request(*named("two")))
    assert watch.readers
    assert "prefetch" not in watch.readers


def test_for_what_is_in_memory_no_thread_begins(
    watch: ReadWatch, user_home: HomeFixture, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    path = engine_packages.package("acme/file", seed=3)
    run(watch.engine, request(FileExpert(path)))
    assert "prefetch" not in watch.readers


def test_a_damaged_expert_is_told_by_the_run_that_needs_it(
    watch: ReadWatch, user_home: HomeFixture
) -> None:
    blobs = [path for path in user_home.store.paths.blobs.rglob("*") if path.is_file()]
    for blob in blobs:
        if blob.stat().st_size > 2_000:
            data = bytearray(blob.read_bytes())
            data[-1] ^= 1
            blob.chmod(0o600)
            blob.write_bytes(bytes(data))
    with pytest.raises(DigestError, match="acme/one"):
        run(watch.engine, request(*named("one")))
    watch.leaves_nothing()
    assert watch.engine.budget.reserved_bytes("experts") == 0


class Interrupted(BaseException):
    """As Ctrl-C, which is no `Exception`."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted, ExpertError])
def test_whatever_ends_the_loading_of_the_base_ends_the_fetching(
    kind: type[BaseException], watch: ReadWatch
) -> None:
    def give_up() -> None:
        watch.wait_for_expert()
        raise kind("given up")

    watch.in_base = give_up
    with pytest.raises(kind, match="given up"):
        run(watch.engine, request(*named("one", "two")))
    watch.leaves_nothing()
    assert watch.engine.budget.reserved_bytes("experts") == 0
    watch.in_base = lambda: None
    assert run(watch.engine, request(*named("one", "two"))).generated.tokens


def test_what_is_fetched_ahead_takes_nothing_that_the_run_needs(user_home: HomeFixture) -> None:
    asked = request(*named("one", "two"))
    whole = run(LocalEngine(planner(user_home), budget=BUDGET), asked).memory
    least = find_least_budget(user_home, asked)
    for limit in (least, whole.peak):
        exact = LocalEngine(planner(user_home), budget=limit)
        for _ in range(5):
            assert run(exact, asked).memory.peak == limit
            exact.close()
    less = LocalEngine(planner(user_home), budget=least - 1)
    with pytest.raises(BudgetError):
        run(less, asked)
    less.check_integrity()
    threads_end()
