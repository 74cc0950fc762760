"""A server learns, too: at its end, and while it has nothing else to do."""

from pathlib import Path

import pytest

from expertctl.engine.moe.habit_keeper import habits_in
from expertctl.engine.moe.start import StartWishes
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.store.base_habits import HabitsFile
from tests.engine.moe.test_learnt_runs import base
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
