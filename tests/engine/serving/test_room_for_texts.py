"""A server that begins in little memory says how long its texts may be, to the token."""

import re
from dataclasses import replace

import pytest

from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.errors import BudgetError
from tests.engine.serving.harness import (
    SETTINGS,
    engine_packages,
    known,
    make_request,
    open_engine_harness,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "known", "user_home"]


@pytest.fixture(params=[NUMPY_MAX_BYTES, 0], ids=["numpy", "kernels"])
def numpy_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_server_in_little_memory_says_how_long_a_text_may_be(
    user_home: HomeFixture, numpy_below: int
) -> None:
    wanted = make_request("Sort: 1", max_tokens=40)
    with open_engine_harness(user_home.home, numpy_below=numpy_below) as package_factory:
        limit = package_factory.find_least_budget(wanted)
        bound = package_factory.runner.bind_request(wanted)
        tokens = package_factory.runner.prepare(
            bound, package_factory.processor.plan(bound).result()
        ).prompt.capacity
        assert not any("memory suffices" in line for line in package_factory.messages)
    enough = replace(SETTINGS, memory_budget=limit)
    with open_engine_harness(user_home.home, enough, numpy_below=numpy_below) as package_factory:
        [said] = [line for line in package_factory.messages if "memory suffices" in line]
        assert package_factory.answer(wanted).results
    longest = int(re.search(r"memory suffices for sequences of up to (\d+) tokens", said)[1])  # type: ignore[index]
    assert longest >= tokens, "pages of keys and values hold more than one token"
    more = longest - tokens
    with open_engine_harness(user_home.home, enough, numpy_below=numpy_below) as package_factory:
        assert package_factory.answer(make_request("Sort: 1", max_tokens=40 + more)).results
        refused = package_factory.answer(make_request("Sort: 1", max_tokens=41 + more))
        assert isinstance(refused.error, BudgetError)
