"""A server learns, too: at its end, and while it has nothing else to do."""

from pathlib import Path

import pytest

from expertctl.engine.moe.usage_store import load_learnt_usage
from expertctl.engine.moe.warmup import ProfileOptions
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine_config import BatchingConfig, EngineConfig, TopPins, WarmupConfig
from expertctl.errors import IncompatibleError
from expertctl.store.quantised_cache import UsageProfileFile
from tests.engine.moe.test_cached_runs import LARGE
from tests.engine.moe.test_learnt_runs import base
from tests.engine.serving.harness import make_request, open_engine_harness
from tests.engine.serving.test_engine import EventReader, job
from tests.engine.test_local_engine import planner
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["base", "fast", "user_home"]

pytestmark = pytest.mark.all


@pytest.mark.parametrize("learns", [True, False])
def test_what_was_answered_is_learnt_unless_nobody_wants_that(
    learns: bool, base: Path, user_home: HomeFixture
) -> None:
    stored = user_home.bases.add(base)
    settings = EngineConfig(
        memory_budget=stored.size * 8 // 10,
        moe=WarmupConfig(warmup="full", learns=learns),
        batching=BatchingConfig(rows=2, warm=("Sort these numbers: 41, 17, 23",)),
    )
    told: list[str] = []
    engine = ServingEngine(planner(user_home), settings, tell=told.append, numpy_below=0)
    engine.start()
    engine.close()
    habits = load_learnt_usage(UsageProfileFile(user_home.bases, stored))
    assert (habits is not None) == learns
    if habits is not None:
        assert habits.profile.is_usable
        assert habits.state is not None
    assert not any("learnt" in line for line in told)


def test_what_was_wished_in_vain_is_told_to_who_runs_the_server_and_to_no_caller(
    base: Path, user_home: HomeFixture
) -> None:
    stored = user_home.bases.add(base)
    wishes = WarmupConfig(pins=TopPins(2), learns=False)
    settings = EngineConfig(memory_budget=stored.size * 8 // 10, moe=wishes)
    with open_engine_harness(user_home.home, settings, numpy_below=0) as package_factory:
        (result,) = package_factory.answer(make_request(max_tokens=2)).results
        assert not any("pins no expert" in warning for warning in result.warnings)
        assert (
            sum("warning: --moe-pin pins no expert" in line for line in package_factory.messages)
            == 1
        )
        package_factory.runner.resources._derived._notes.append("what a full disk says")
        (result,) = package_factory.answer(make_request(max_tokens=2)).results
        assert "what a full disk says" not in result.warnings
        assert package_factory.messages[-1] == "warning: what a full disk says"


def test_a_base_that_is_whole_in_memory_tells_who_is_asked_for_and_is_learnt_from(
    base: Path, user_home: HomeFixture
) -> None:
    """Whoever begins to observe anew, or nothing, takes nothing from what is learnt."""
    stored = user_home.bases.add(base)
    settings = EngineConfig(
        memory_budget=LARGE, batching=BatchingConfig(warm=("Sort these numbers: 41, 17, 23",))
    )
    engine = ServingEngine(planner(user_home), settings, numpy_below=0)
    engine.start()
    counters = engine._runner.model.counters
    assert counters is not None
    own = counters.cumulative_snapshot()
    EventReader(engine, job(make_request())).end()
    seen = engine.get_observation()
    assert seen.document.is_usable
    asked = [sum(layer.hits.values()) for layer in seen.document.layers]
    assert [layer.missed_requests for layer in seen.document.layers] == [0] * 4
    assert seen.residence is not None
    assert (seen.residence.slots, seen.active_profile) == (32, None)
    snapshot = engine.take_snapshot()
    assert snapshot.routed is not None
    both = own.summary.requests + sum(each.requests for each in seen.document.layers)
    assert snapshot.routed.activity.requests == both
    assert engine.observe(reset=True).document.layers[0].hits == {}
    assert engine.observe(mode="off").document.mode == "off"
    with pytest.raises(IncompatibleError, match="all of them are in memory"):
        engine.apply_profile(None, ProfileOptions(exchange=0.1))
    engine.close()
    habits = load_learnt_usage(UsageProfileFile(user_home.bases, stored))
    assert habits is not None
    learnt = [sum(layer.hits.values()) for layer in habits.profile.layers]
    assert learnt == [a + layer.hits for a, layer in zip(asked, own.layers.values(), strict=True)]
