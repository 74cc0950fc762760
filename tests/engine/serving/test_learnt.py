"""A server learns, too: at its end, and while it has nothing else to do."""

from pathlib import Path

import pytest

from expertctl.engine.moe.adoption import ProfileWishes
from expertctl.engine.moe.habit_keeper import habits_in
from expertctl.engine.moe.pins import TopPins
from expertctl.engine.moe.start import StartWishes
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.errors import IncompatibleError
from expertctl.store.base_habits import HabitsFile
from tests.engine.moe.test_cached_runs import LARGE
from tests.engine.moe.test_learnt_runs import base
from tests.engine.serving.test_batch_engine import Reader, job
from tests.engine.serving.workshop import request, workshop
from tests.engine.test_runtime import planner
from tests.store.shop import House, fast, house

__all__ = ["base", "fast", "house"]


@pytest.mark.parametrize("learns", [True, False])
def test_what_was_answered_is_learnt_unless_nobody_wants_that(
    learns: bool, base: Path, house: House
) -> None:
    stored = house.bases.add(base)
    settings = BatchSettings(
        budget=stored.size * 8 // 10,
        rows=2,
        warm=("Sort these numbers: 41, 17, 23",),
        moe=StartWishes(warmup="full", learns=learns),
    )
    told: list[str] = []
    engine = BatchEngine(planner(house), settings, tell=told.append, torch_below=0)
    engine.start()
    engine.close()
    habits = habits_in(HabitsFile(house.bases, stored))
    assert (habits is not None) == learns
    if habits is not None:
        assert habits.activity.is_usable
        assert habits.state is not None
    assert not any("learnt" in line for line in told)


def test_what_was_wished_in_vain_is_told_to_who_runs_the_server_and_to_no_caller(
    base: Path, house: House
) -> None:
    stored = house.bases.add(base)
    wishes = StartWishes(pins=TopPins(2), learns=False)
    settings = BatchSettings(budget=stored.size * 8 // 10, moe=wishes)
    with workshop(house.home, settings, torch_below=0) as shop:
        (result,) = shop.answer(request(max_tokens=2)).results
        assert not any("pins no expert" in warning for warning in result.warnings)
        assert sum("warning: --moe-pin pins no expert" in line for line in shop.told) == 1
        shop.house.residents._derived._notes.append("what a full disk says")
        (result,) = shop.answer(request(max_tokens=2)).results
        assert "what a full disk says" not in result.warnings
        assert shop.told[-1] == "warning: what a full disk says"


def test_a_base_that_is_whole_in_memory_tells_who_is_asked_for_and_is_learnt_from(
    base: Path, house: House
) -> None:
    """Whoever begins to observe anew, or nothing, takes nothing from what is learnt."""
    stored = house.bases.add(base)
    settings = BatchSettings(budget=LARGE, warm=("Sort these numbers: 41, 17, 23",))
    engine = BatchEngine(planner(house), settings, torch_below=0)
    engine.start()
    counters = engine._house.model.counters
    assert counters is not None
    own = counters.in_all()
    Reader(engine, job(request())).end()
    seen = engine.observation()
    assert seen.document.is_usable
    asked = [sum(layer.hits.values()) for layer in seen.document.layers]
    assert [layer.missed_requests for layer in seen.document.layers] == [0] * 4
    assert seen.residence is not None
    assert (seen.residence.slots, seen.guidance) == (32, None)
    snapshot = engine.snapshot()
    assert snapshot.routed is not None
    both = own.summary.requests + sum(each.requests for each in seen.document.layers)
    assert snapshot.routed.activity.requests == both
    assert engine.observe(reset=True).document.layers[0].hits == {}
    assert engine.observe(mode="off").document.mode == "off"
    with pytest.raises(IncompatibleError, match="all of them are in memory"):
        engine.adopt(None, ProfileWishes(exchange=0.1))
    engine.close()
    habits = habits_in(HabitsFile(house.bases, stored))
    assert habits is not None
    learnt = [sum(layer.hits.values()) for layer in habits.activity.layers]
    assert learnt == [a + layer.hits for a, layer in zip(asked, own.layers.values(), strict=True)]
