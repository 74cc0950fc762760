"""An interrupt at any line of what owns routed experts: the next answer is as if there was none."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.moe import (
    expert_cache,
    expert_loader,
    expert_memory,
    layer_slots,
    routed_experts,
)
from expertctl.engine_config import WarmupConfig
from tests.engine.moe.test_cached_runs import asked
from tests.engine.moe.test_learnt_runs import base
from tests.engine.test_interrupted_runs import Line, LineWatch, interrupted_at
from tests.engine.test_local_engine import planner, run
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["base", "fast", "user_home"]

pytestmark = pytest.mark.all

BOOKS = (
    expert_loader,
    expert_cache,
    expert_memory,
    expert_memory,
    layer_slots,
    expert_loader,
    routed_experts,
)
FILES = {module.__file__ for module in BOOKS}


@pytest.fixture
def make(base: Path, user_home: HomeFixture) -> Callable[[], LocalEngine]:
    """Make engines that have memory for four fifths of the base, and learn nothing."""
    user_home.bases.add(base)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    wishes = WarmupConfig(learns=False)
    return lambda: LocalEngine(planner(user_home), budget=size * 8 // 10, numpy_below=0, moe=wishes)


def test_after_an_interrupt_at_any_line_the_next_answer_is_right(
    make: Callable[[], LocalEngine],
) -> None:
    engine, lines = make(), Counter[Line]()
    right = run(engine, asked()).generated.tokens
    engine.close()
    engine = make()
    LineWatch(lambda line: lines.update([line]), FILES).during(partial(run, engine, asked()))
    engine.close()
    places = sorted({(line, time) for line, most in lines.items() for time in (1, most // 2 + 1)})
    assert len(places) > 200
    interrupted = 0
    chosen = places[::3]
    for line, time in chosen:
        engine = make()
        interrupted += interrupted_at(line, time, partial(run, engine, asked()), FILES)
        try:
            for _ in range(2):
                assert run(engine, asked()).generated.tokens == right
                engine.check_integrity()
        except BaseException as error:
            error.add_note(f"interrupted at {line}, time {time}")
            raise
        engine.close()
    assert interrupted > 0.8 * len(chosen)
