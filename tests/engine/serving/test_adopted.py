"""A profile that comes while a server runs is taken over by the thread that computes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.engine.moe.warmup import ProfileOptions
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.serving.scheduler import Scheduler
from expertctl.engine_config import BatchingConfig, EngineConfig, TopPins, WarmupConfig
from expertctl.errors import RateLimitError
from expertctl.schema.strict_json import JsonObject
from tests.engine.moe.test_learnt_runs import base
from tests.engine.test_local_engine import planner
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["base", "fast", "user_home"]
PROFILE: JsonObject = {
    "num_prompts": 4,
    "num_experts": 32,
    "layers": {"0": {"activation_counts": {"30": 4, "31": 3}}},
}


@pytest.fixture
def engine(base: Path, user_home: HomeFixture) -> Iterator[ServingEngine]:
    stored = user_home.bases.add(base)
    settings = EngineConfig(
        memory_budget=stored.size * 8 // 10,
        moe=WarmupConfig(warmup="none", learns=False),
        batching=BatchingConfig(rows=2),
    )
    engine = ServingEngine(planner(user_home), settings, numpy_below=0)
    engine.start()
    yield engine
    engine.close()


def test_nothing_is_taken_over_once_the_engine_ended(engine: ServingEngine) -> None:
    wishes = ProfileOptions(pins=TopPins(1))
    assert engine.apply_profile(PROFILE, wishes).to_json()["guide"] == {
        "exchange": 0.0,
        "pinned": {"0": [30]},
    }
    engine.close()
    with pytest.raises(RateLimitError, match="ending"):
        engine.apply_profile(PROFILE, ProfileOptions(pins=TopPins(2)))


def test_a_control_call_that_fails_is_reported_only_to_its_caller() -> None:
    scheduler = Scheduler(queue=1, rows=1)
    done = scheduler.run_between_passes(lambda: [][0])
    assert not done.done(), "it waits for the next pass"
    scheduler.control_queue.popleft()()
    with pytest.raises(IndexError):
        done.result()
    scheduler.check_integrity()
