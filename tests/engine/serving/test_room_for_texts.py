"""A server that begins in little memory says how long its texts may be, to the token."""

import re
from dataclasses import replace

import pytest

from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.errors import BudgetError
from tests.engine.serving.workshop import SETTINGS, known, market, request, workshop
from tests.store.shop import House, fast, house

__all__ = ["fast", "house", "known", "market"]


@pytest.fixture(params=[TORCH_BELOW, 0], ids=["torch", "kernels"])
def torch_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_server_in_little_memory_says_how_long_a_text_may_be(
    house: House, torch_below: int
) -> None:
    wanted = request("Sort: 1", max_tokens=40)
    with workshop(house.home, torch_below=torch_below) as shop:
        limit = shop.least_budget(wanted)
        bound = shop.house.bound(wanted)
        tokens = shop.house.prepared(bound, shop.desk.plan(bound).result()).prompt.capacity
        assert not any("room for" in line for line in shop.told)
    enough = replace(SETTINGS, budget=limit)
    with workshop(house.home, enough, torch_below=torch_below) as shop:
        [said] = [line for line in shop.told if "room for" in line]
        assert shop.answer(wanted).results
    longest = int(re.search(r"there is room for texts up to (\d+) tokens", said)[1])  # type: ignore[index]
    assert longest >= tokens, "pages of keys and values hold more than one token"
    more = longest - tokens
    with workshop(house.home, enough, torch_below=torch_below) as shop:
        assert shop.answer(request("Sort: 1", max_tokens=40 + more)).results
        refused = shop.answer(request("Sort: 1", max_tokens=41 + more))
        assert isinstance(refused.error, BudgetError)
