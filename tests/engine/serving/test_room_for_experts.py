"""A server of routed experts leaves its installed experts the room that they take."""

from pathlib import Path

import pytest

from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.job import Failed
from expertctl.errors import BudgetError
from expertctl.package.base_model import read_base
from tests.engine.market import Market
from tests.engine.moe.test_cached_runs import LARGE, PARTS
from tests.engine.serving.workshop import request, workshop
from tests.factories import write_base
from tests.store.shop import House, fast, house

__all__ = ["fast", "house"]
EXPERTS = 16


@pytest.fixture
def size(house: House, tmp_path: Path) -> int:
    """What a small base takes, for which there are experts that change all of its experts."""
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
    house.bases.add(base)
    market = Market(tmp_path / "market", base, read_base(base))
    names = (f"experts.{number}.{part}" for number in range(EXPERTS) for part in PARTS)
    targets = ("q_proj", *names)
    for name, rank in (("small", 2), ("large", 16)):
        adapter = ("lora", {"targets": targets, "rank": rank, "scale": 0.4, "seed": rank})
        house.install(market.package(f"acme/{name}", adapters=[adapter]))
    return sum(file.stat().st_size for file in base.glob("*.safetensors"))


def answers(house: House, budget: int, *names: str) -> tuple[list[list[int]], int]:
    """Return the tokens of an answer with each of some experts, and how many slots a layer has."""
    settings = BatchSettings(budget=budget, rows=1)
    with workshop(house.home, settings, torch_below=0) as shop:
        found = []
        for name in names:
            (result,) = shop.answer(request("Sort: 3, 1, 2", name)).results
            found.append(list(result.generated.tokens))
        (alone,) = shop.answer(request()).results
        assert alone.moe is not None
        return found, alone.moe.residence.slots


@pytest.mark.parametrize("tenths", [18, 20])
def test_the_largest_has_room_and_the_others_take_turns_with_it(
    tenths: int, house: House, size: int
) -> None:
    names = ("large", "small", "large")
    right, all_slots = answers(house, LARGE, *names)
    assert all_slots == EXPERTS
    found, slots = answers(house, size * tenths // 10, *names)
    assert found == right
    assert 0 < slots < EXPERTS


def test_where_the_largest_cannot_have_room_the_next_one_has(house: House, size: int) -> None:
    right, _ = answers(house, LARGE, "small")
    budget = size * 14 // 10
    found, slots = answers(house, budget, "small")
    assert found == right
    assert 0 < slots < EXPERTS
    with workshop(house.home, BatchSettings(budget=budget, rows=1), torch_below=0) as shop:
        *_, last = shop.answer(request("Sort: 3, 1, 2", "large")).events
    assert isinstance(last, Failed)
    assert isinstance(last.error, BudgetError)
