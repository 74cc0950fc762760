"""Experts beside a base of routed experts: slots leave them the room that a run takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import BudgetError
from expertctl.package.base_model import read_base
from tests.engine.moe.test_cached_runs import LARGE, PARTS, SQL, answer, asked
from tests.engine.package_fixtures import EnginePackages
from tests.engine.test_local_engine import run
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["fast", "user_home"]

pytestmark = pytest.mark.all
EXPERTS = 16


@pytest.fixture
def size(user_home: HomeFixture, tmp_path: Path) -> int:
    """What a small base takes, for which there is an expert that changes all of its experts."""
    base = write_base(
        tmp_path / "base",
        arch="qwen3_moe",
        tie=False,
        seed=3,
        layers=3,
        hidden=64,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        moe_intermediate_size=576,
    )
    user_home.bases.add(base)
    names = (f"experts.{number}.{part}" for number in range(EXPERTS) for part in PARTS)
    adapter = ("lora", {"targets": ("q_proj", *names), "rank": 16, "scale": 0.4, "seed": 7})
    user_home.install(
        EnginePackages(tmp_path / "market", base, read_base(base)).package(adapters=[adapter])
    )
    return sum(file.stat().st_size for file in base.glob("*.safetensors"))


def test_whoever_runs_an_expert_in_some_memory_runs_it_in_more(
    user_home: HomeFixture, size: int
) -> None:
    right, engine = answer(user_home, LARGE, SQL, base_alone=False)
    engine.close()
    slots = []
    for share in (18, 20, 22, 24):  # tenths: below, the expert itself has no room
        result, engine = answer(user_home, size * share // 10, SQL, base_alone=False)
        assert result.generated.tokens == right.generated.tokens
        assert engine.budget.peak <= engine.budget.limit
        assert result.moe is not None
        slots.append(result.moe.residence.slots)
        engine.check_integrity()
        engine.close()
    assert sorted(set(slots)) == slots, "more with more memory"
    assert slots[-1] == EXPERTS


def test_the_next_run_reads_no_base_anew_for_more_slots(user_home: HomeFixture, size: int) -> None:
    first, engine = answer(user_home, size * 2, SQL, base_alone=False)
    alone = run(engine, asked())
    assert first.moe is not None
    assert alone.moe is not None
    assert alone.moe.residence.slots == first.moe.residence.slots < EXPERTS
    assert alone.bytes_read.ssd == alone.moe.activity.read_bytes
    again = run(engine, asked(SQL, base_alone=False))
    assert again.generated.tokens == first.generated.tokens
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("share", [12, 16])
def test_where_no_slot_would_do_the_base_alone_has_as_many_as_ever(
    share: int, user_home: HomeFixture, size: int
) -> None:
    budget = size * share // 10
    alone, engine = answer(user_home, budget)
    engine.close()
    with pytest.raises(BudgetError):
        run(engine, asked(SQL, base_alone=False))
    after = run(engine, asked())
    assert alone.moe is not None
    assert after.moe is not None
    assert after.moe.residence.slots == alone.moe.residence.slots > 0
    fewer = run(engine, replace(asked(SQL, base_alone=False), on_budget="fewer"))
    assert fewer.moe is not None
    assert len(fewer.dropped) == 1
    assert fewer.moe.residence.slots == alone.moe.residence.slots
    engine.close()


def test_fewer_slots_come_before_fewer_experts(user_home: HomeFixture, size: int) -> None:
    wanted = asked(SQL, base_alone=False)
    result, engine = answer(user_home, size * 2, SQL, base_alone=False)
    engine.close()
    fewer = run(engine, replace(wanted, on_budget="fewer"))
    assert fewer.dropped == ()
    assert fewer.generated.tokens == result.generated.tokens
    engine.close()
