"""Who is exchanged while a base is served: by a profile at first, then by what it is asked for."""

from contextlib import closing
from dataclasses import replace

import pytest

from expertctl.engine.moe.guide import Guide, activity_of
from expertctl.engine.moe.habit_keeper import HabitKeeper
from expertctl.engine.moe.miss_policy import EXACT
from expertctl.engine.moe.start import Start, StartWishes, begin
from expertctl.engine.moe.usage_profile import UsageProfile
from expertctl.package.model_config import ModelConfig
from expertctl.store.base_habits import HabitsFile
from tests.engine.moe.test_expert_cache import EXPERTS, LAYERS, NUMBERS, Marked, config, new_cache
from tests.engine.moe.test_habit_keeper import ROUTED, file
from tests.engine.moe.test_start import by_number, residents, use
from tests.store.shop import fast, house, shop

__all__ = ["config", "fast", "file", "house", "shop"]

HERE = replace(ROUTED, count=EXPERTS, layers=NUMBERS)
USAGE = UsageProfile("", 40, EXPERTS, {n: {7: 40, 6: 30} for n in NUMBERS})
GUIDE = Guide("a file", activity_of(USAGE), USAGE)


@pytest.mark.parametrize("learns", [True, False])
def test_requests_that_shift_change_who_is_exchanged(
    learns: bool, file: HabitsFile, config: ModelConfig
) -> None:
    """Between two learnings scores stay: nobody asks for 6 and 7, and they have all slots."""
    wishes = StartWishes(warmup="none", exchange=1.0, learns=learns)
    keeper = HabitKeeper(file.bases, wishes)
    with closing(new_cache(Marked(), slots=2, policy=EXACT)) as cache:
        begin(cache, Start(wishes, GUIDE), by_number(cache))
        keeper.watch(file.base, HERE, cache)
        use(cache, config, (2, 3), passes=100)
        assert residents(cache) == [{6, 7}] * LAYERS
        keeper.keep()
        use(cache, config, (2, 3), passes=100)
        assert residents(cache) == [{2, 3}] * LAYERS
        use(cache, config, (4, 5), passes=300)
        assert residents(cache) == [{2, 3}] * LAYERS
        keeper.keep()
        use(cache, config, (4, 5), passes=100)
        assert residents(cache) == [{4, 5}] * LAYERS
    assert (file.read() is not None) == learns


def test_what_is_learnt_before_anything_is_known_is_exchanged_by_too(
    file: HabitsFile, config: ModelConfig
) -> None:
    wishes = StartWishes(warmup="none", exchange=1.0)
    keeper = HabitKeeper(file.bases, wishes)
    with closing(new_cache(Marked(), slots=2, policy=EXACT)) as cache:
        begin(cache, Start(wishes), by_number(cache))
        keeper.watch(file.base, HERE, cache)
        use(cache, config, (2, 3), passes=100)
        keeper.keep()
        use(cache, config, (4, 5), passes=60)
        assert residents(cache) == [{2, 3}] * LAYERS
