"""What is done when a plan does not fit: refused, fewer experts, or queued behind others."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.process_registry import MemoryAdmission, list_engines
from expertctl.engine.request import FileExpert, NamedExpert, OnBudget
from expertctl.engine.result import RunResult
from expertctl.errors import BudgetError, DigestError, UsageError
from expertctl.reference import Reference
from expertctl.routing.plan import SavedPlan
from expertctl.routing.request import ForcedExpert
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import find_least_budget, planner, request, run
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "user_home"]

NAMES = ("one", "two", "three")


def named(name: str, weight: float = 1.0) -> ForcedExpert:
    return ForcedExpert(Reference.parse(f"acme/{name}"), weight)


@pytest.fixture(autouse=True)
def known(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    needy = engine_packages.package("acme/needy", seed=5, composition={"requires": ["acme/one"]})
    several = [engine_packages.package(f"acme/{name}", seed=n) for n, name in enumerate(NAMES)]
    user_home.install(*several, needy)


def peak(user_home: HomeFixture, *experts: NamedExpert, **options: Any) -> int:
    """The least budget for these experts: one byte less is refused."""
    return find_least_budget(user_home, request(*experts, **options))


def refs(result: RunResult) -> list[str]:
    return [expert.ref.removesuffix("@1.0.0") for expert in result.planned.result.plan.experts]


def limited(user_home: HomeFixture, limit: int, *experts: NamedExpert, on: OnBudget) -> RunResult:
    return run(LocalEngine(planner(user_home), budget=limit), request(*experts, on_budget=on))


def test_fewer_experts_answer_as_if_they_alone_had_been_named(user_home: HomeFixture) -> None:
    three = [named(name, 0.5) for name in NAMES]
    limit = peak(user_home, *three) - 1
    with pytest.raises(BudgetError):
        limited(user_home, limit, *three, on="refuse")
    result = limited(user_home, limit, *three, on="fewer")
    [dropped] = result.dropped
    scores = {c.expert.ref: c.score for c in result.planned.result.candidates}
    assert scores[dropped.ref] == min(scores.values())
    assert refs(result) == [f"acme/{n}" for n in NAMES if f"acme/{n}@1.0.0" != dropped.ref]
    assert "needed, but only" in dropped.reason
    assert dropped.warning in result.warnings
    assert result.to_json()["dropped"] == [dropped.to_json()]
    rest = [named(name, 0.5) for name in NAMES if not dropped.ref.startswith(f"acme/{name}@")]
    two = run(LocalEngine(planner(user_home), budget=limit), request(*rest))
    assert two.planned.result.plan.identity == result.planned.result.plan.identity
    assert two.generated.tokens == result.generated.tokens
    assert result.memory.peak <= limit


def test_other_processes_do_not_see_experts_that_were_dropped(user_home: HomeFixture) -> None:
    three = [named(name, 0.5) for name in NAMES]
    limit = peak(user_home, *three) - 1
    engine = LocalEngine(planner(user_home), budget=limit)
    result = run(engine, request(*three, on_budget="fewer"))
    [seen] = [e for e in list_engines(planner(user_home).home.engines) if e.limit == limit]
    assert seen.experts == tuple(e.ref for e in result.planned.result.plan.experts)
    assert len(seen.experts) == 2
    engine.close()


def test_with_room_for_all_nothing_is_dropped(user_home: HomeFixture) -> None:
    three = [named(name) for name in NAMES]
    result = limited(user_home, peak(user_home, *three), *three, on="fewer")
    assert (len(refs(result)), result.dropped) == (3, ())


def test_experts_go_until_the_base_is_alone_and_then_it_is_refused(user_home: HomeFixture) -> None:
    three = [named(name) for name in NAMES]
    alone = peak(user_home, route={"base_alone": True})
    result = limited(user_home, alone, *three, on="fewer")
    assert (refs(result), len(result.dropped)) == ([], 3)
    assert any("no expert fits into the remaining memory" in warning for warning in result.warnings)
    with pytest.raises(BudgetError, match="the buffers of"):
        limited(user_home, alone - 1, *three, on="fewer")


def test_what_requires_a_dropped_expert_goes_with_it(user_home: HomeFixture) -> None:
    pair = (named("two"), named("needy"))
    limit = peak(user_home, *pair) - 1
    result = limited(user_home, limit, *pair, on="fewer")
    assert refs(result) == ["acme/two"]
    assert [d.ref for d in result.dropped] == ["acme/one@1.0.0", "acme/needy@1.0.0"]


def test_a_file_that_does_not_fit_is_dropped_without_being_loaded(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    file = FileExpert(engine_packages.package("acme/file", key=None, seed=9))
    limit = peak(user_home, named("one"))
    result = limited(user_home, limit, named("one"), file, on="fewer")
    assert refs(result) == ["acme/one"]
    assert [d.ref for d in result.dropped] == ["acme/file@1.0.0"]
    assert not any("unsigned" in warning for warning in result.warnings)
    both = limited(user_home, peak(user_home, named("one"), file), named("one"), file, on="fewer")
    assert refs(both) == ["acme/one", "acme/file"]


def test_a_saved_plan_is_never_repeated_with_fewer(user_home: HomeFixture) -> None:
    result = run(LocalEngine(planner(user_home), budget=64 << 20), request(named("one")))
    saved = SavedPlan(result.planned.result.plan)
    with pytest.raises(UsageError, match="always runs with all its experts"):
        run(
            LocalEngine(planner(user_home), budget=64 << 20),
            request(saved=saved, on_budget="fewer"),
        )


# queue


class BudgetPauseError(BaseException):
    """A pause in which nothing changes: the run would wait for ever."""


def waiting(engine: LocalEngine, user_home: HomeFixture, pause: Callable[[], None]) -> LocalEngine:
    engine._resources.admission = MemoryAdmission(user_home.store.paths.running, pause=pause)
    return engine


def seats(user_home: HomeFixture) -> list[str]:
    folder = user_home.store.paths.running
    return [(f / "seat").read_text() for f in sorted(folder.iterdir()) if f.is_dir()]


def test_a_queued_run_waits_for_the_others_and_says_so(user_home: HomeFixture) -> None:
    limit = peak(user_home, named("one"))
    told: list[str] = []
    with ExitStack() as others:
        others.enter_context(MemoryAdmission(user_home.store.paths.running).acquire(1000))
        engine = LocalEngine(planner(user_home), budget=limit, tell=told.append)
        result = run(
            waiting(engine, user_home, others.close), request(named("one"), on_budget="queue")
        )
    assert result.timings_ms["queue"] > 0
    assert result.timings_ms["total"] > result.timings_ms["queue"]
    assert told[0].startswith("waiting for memory: ")
    assert seats(user_home) == []


def test_a_run_that_need_not_wait_has_no_queue_time(user_home: HomeFixture) -> None:
    result = limited(user_home, peak(user_home, named("one")), named("one"), on="queue")
    assert "queue" not in result.timings_ms


class NotWantedError(Exception):
    """What the owner of an engine raises when the answer is not wanted any more."""


def test_who_is_queued_can_give_up(user_home: HomeFixture) -> None:
    limit = peak(user_home, named("one"))
    told: list[str] = []

    def give_up(count: int) -> None:
        assert count == 0, "nothing is read in the queue"
        raise NotWantedError

    engine = LocalEngine(planner(user_home), budget=limit, progress=give_up, tell=told.append)
    with MemoryAdmission(user_home.store.paths.running).acquire(1000):
        with pytest.raises(NotWantedError):
            run(engine, request(named("one"), on_budget="queue"))
        assert seats(user_home) == ["1000 in"]
    assert len(told) == 1
    engine.check_integrity()


def test_what_can_never_fit_is_refused_at_once(user_home: HomeFixture) -> None:
    limit = peak(user_home, named("one")) - 1
    engine = waiting(LocalEngine(planner(user_home), budget=limit), user_home, _fail)
    with pytest.raises(BudgetError, match=r"the buffers of \d+ tokens: .* needed"):
        run(engine, request(named("one"), on_budget="queue"))
    assert engine.budget.peak == 0, "nothing was loaded"


def _fail() -> None:
    raise BudgetPauseError


def test_a_file_waits_on_the_disk(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    file = FileExpert(engine_packages.package("acme/file", key=None, seed=9))
    limit = peak(user_home, file)
    engine = LocalEngine(planner(user_home), budget=limit)

    def look() -> None:
        assert engine.budget.used == 0
        others.close()

    with ExitStack() as others:
        others.enter_context(MemoryAdmission(user_home.store.paths.running).acquire(limit))
        result = run(waiting(engine, user_home, look), request(file, on_budget="queue"))
    assert refs(result) == ["acme/file"]
    assert result.memory.peak == limit


def test_a_file_that_changed_while_it_waited_is_refused(
    user_home: HomeFixture, tmp_path: Path, engine_packages: EnginePackages
) -> None:
    path = tmp_path / "mine.expert"
    path.write_bytes(engine_packages.package("acme/file", key=None, seed=9).read_bytes())
    engine = LocalEngine(planner(user_home), budget=64 << 20)

    def change() -> None:
        path.write_bytes(engine_packages.package("acme/file", key=None, seed=10).read_bytes())
        others.close()

    with ExitStack() as others:
        others.enter_context(MemoryAdmission(user_home.store.paths.running).acquire(64 << 20))
        with pytest.raises(DigestError, match="changed while it was read"):
            run(waiting(engine, user_home, change), request(FileExpert(path), on_budget="queue"))
    engine.check_integrity()


@pytest.mark.parametrize("on", ["refuse", "fewer", "queue"])
def test_every_run_has_a_seat_with_what_it_holds(user_home: HomeFixture, on: OnBudget) -> None:
    engine = LocalEngine(planner(user_home), budget=64 << 20)
    stream = engine.run(request(named("one"), on_budget=on))
    next(stream)
    assert seats(user_home) == [f"{engine.budget.used} in"]
    stream.close()
    assert seats(user_home) == []


@pytest.mark.parametrize("on", ["refuse", "fewer", "queue"])
def test_a_home_where_nobody_may_write_can_be_run_from(
    user_home: HomeFixture, on: OnBudget
) -> None:
    user_home.store.paths.running.write_text("no folder")
    told: list[str] = []
    engine = LocalEngine(planner(user_home), budget=64 << 20, tell=told.append)
    assert refs(run(engine, request(named("one"), on_budget=on))) == ["acme/one"]
    assert len(told) == (on == "queue")
    user_home.store.paths.running.unlink()
