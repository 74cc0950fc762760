"""A profile that comes while a server runs is taken over by the thread that computes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.engine.moe.adoption import ProfileWishes
from expertctl.engine.moe.pins import TopPins
from expertctl.engine.moe.start import StartWishes
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.board import Board
from expertctl.errors import RateLimitError
from expertctl.schema.strict_json import JsonObject
from tests.engine.moe.test_learnt_runs import base
from tests.engine.test_runtime import planner
from tests.store.shop import House, fast, house

__all__ = ["base", "fast", "house"]
PROFILE: JsonObject = {
    "num_prompts": 4,
    "num_experts": 32,
    "layers": {"0": {"activation_counts": {"30": 4, "31": 3}}},
}


@pytest.fixture
def engine(base: Path, house: House) -> Iterator[BatchEngine]:
    stored = house.bases.add(base)
    settings = BatchSettings(
        budget=stored.size * 8 // 10, rows=2, moe=StartWishes(warmup="none", learns=False)
    )
    engine = BatchEngine(planner(house), settings, torch_below=0)
    engine.start()
    yield engine
    engine.close()


def test_nothing_is_taken_over_once_the_engine_ended(engine: BatchEngine) -> None:
    wishes = ProfileWishes(pins=TopPins(1))
    assert engine.adopt(PROFILE, wishes).to_json()["guide"] == {
        "exchange": 0.0,
        "pinned": {"0": [30]},
    }
    engine.close()
    with pytest.raises(RateLimitError, match="ending"):
        engine.adopt(PROFILE, ProfileWishes(pins=TopPins(2)))


def test_an_errand_that_fails_is_told_to_who_waits_and_to_nobody_else() -> None:
    board = Board(queue=1, rows=1)
    done = board.have_done(lambda: [][0])
    assert not done.done(), "it waits for the next pass"
    board.errands.popleft()()
    with pytest.raises(IndexError):
        done.result()
    board.check_integrity()
