"""A server that begins in little memory says how long its texts may be, to the token."""

import re
from dataclasses import replace

import pytest

from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.errors import BudgetError
from tests.engine.serving.harness import SETTINGS, known, make_request, market, open_engine_harness
from tests.store.fixtures import HomeFixture, fast, house

__all__ = ["fast", "house", "known", "market"]


@pytest.fixture(params=[NUMPY_MAX_BYTES, 0], ids=["numpy", "kernels"])
def numpy_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_server_in_little_memory_says_how_long_a_text_may_be(
    house: HomeFixture, numpy_below: int
) -> None:
    wanted = make_request("Sort: 1", max_tokens=40)
    with open_engine_harness(house.home, numpy_below=numpy_below) as shop:
        limit = shop.find_least_budget(wanted)
        bound = shop.runner.bind_request(wanted)
        tokens = shop.runner.prepare(bound, shop.processor.plan(bound).result()).prompt.capacity
        assert not any("memory suffices" in line for line in shop.messages)
    enough = replace(SETTINGS, memory_budget=limit)
    with open_engine_harness(house.home, enough, numpy_below=numpy_below) as shop:
        [said] = [line for line in shop.messages if "memory suffices" in line]
        assert shop.answer(wanted).results
    longest = int(re.search(r"memory suffices for sequences of up to (\d+) tokens", said)[1])  # type: ignore[index]
    assert longest >= tokens, "pages of keys and values hold more than one token"
    more = longest - tokens
    with open_engine_harness(house.home, enough, numpy_below=numpy_below) as shop:
        assert shop.answer(make_request("Sort: 1", max_tokens=40 + more)).results
        refused = shop.answer(make_request("Sort: 1", max_tokens=41 + more))
        assert isinstance(refused.error, BudgetError)
