"""Every byte that a batch takes is held before it is taken, and what cannot be had is refused."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from expertctl.engine.cpu.backend import PackedModel
from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.errors import BaseMismatchError, BudgetError, UsageError
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import (
    SETTINGS,
    EngineHarness,
    adapt_batching,
    known,
    make_request,
    market,
    open_engine_harness,
)
from tests.store.fixtures import HomeFixture, fast, house

__all__ = ["fast", "house", "known", "market"]

ROWS = 4


@pytest.fixture(params=[NUMPY_MAX_BYTES, 0], ids=["numpy", "kernels"])
def numpy_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def shop(house: HomeFixture, numpy_below: int) -> Iterator[EngineHarness]:
    settings = adapt_batching(SETTINGS, rows=ROWS)
    with open_engine_harness(house.home, settings, numpy_below=numpy_below) as shop:
        yield shop


def test_buffers_are_for_the_widest_that_came_until_nothing_runs(shop: EngineHarness) -> None:
    house, held = shop.runner, shop.runner.budget.reserved_bytes
    least = house.base.buffer_bytes(1, rows=ROWS)
    assert held("buffers") == least
    shop.answer(make_request("Sort: 1", max_tokens=300))
    tokens, alone = house._widest_request
    assert held("buffers") == house.base.buffer_bytes(tokens, rows=ROWS) >= least
    shop.answer(make_request("Sort: 1", "sql", max_tokens=2))
    assert house._widest_request[0] == tokens
    width = house._widest_request[1]
    assert width >= alone
    assert held("buffers") == house.base.buffer_bytes(tokens, width=width, rows=ROWS)
    grew = held("buffers") > least  # beside what reading a tiny packed base takes, passes are small
    assert house.free_wide_buffers() == grew
    assert held("buffers") == least
    assert house.model.holds_only_weights == grew
    assert not house.free_wide_buffers()
    shop.check_idle()


def test_the_memory_of_a_batch_is_within_what_is_held(house: HomeFixture) -> None:
    """What numpy takes for passes over several texts, and for their keys and values."""
    settings = adapt_batching(SETTINGS, rows=ROWS)
    with open_engine_harness(house.home, settings) as shop:
        for number in range(ROWS):
            shop.submit_until_ready(make_request(f"Sort: {number}", "sql", max_tokens=200))
        tracemalloc.start()
        try:
            for _ in range(2 * ROWS):
                shop.loop.run_pass()
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        held = shop.runner.memory.held
        assert 0 < taken <= held["kv"] + held["buffers"]


def test_what_kernels_hold_is_within_what_is_held(house: HomeFixture) -> None:
    settings = adapt_batching(SETTINGS, rows=ROWS)
    with open_engine_harness(house.home, settings, numpy_below=0) as shop:
        names = ("sql", "go", "sql", "go")
        jobs = [
            shop.submit_until_ready(make_request(f"Sort: {n}", name))
            for n, name in enumerate(names)
        ]
        shop.step_until(lambda: all(job.has_started for job in jobs))
        model = shop.runner.model
        assert isinstance(model, PackedModel)
        scores = ROWS * shop.runner.base.config.vocab_size * 4
        assert 0 < model.decoder.nbytes + scores <= shop.runner.budget.reserved_bytes("buffers")
        shop.finish(*jobs)
        shop.check_idle()


def test_keys_and_values_that_do_not_fit_leave_the_buffers_as_they_were(
    shop: EngineHarness,
) -> None:
    job = shop.submit_until_ready(make_request("Sort: 1", max_tokens=300))
    house, prepared, memory = shop.runner, job.ticket.prepared, job.ticket.memory
    assert prepared is not None
    assert memory is not None
    before = house.memory.held
    wider = house.base.buffer_bytes(prepared.prompt.capacity, rows=ROWS) - before["buffers"]
    limit, house.budget.limit = house.budget.limit, house.budget.used + wider
    with pytest.raises(BudgetError), house.open_sequence(prepared, memory, cache_key=None):
        pass
    house.budget.limit = limit
    assert house.memory.held == before
    shop.finish(job)
    shop.check_idle()


@pytest.mark.parametrize("experts", [(), ("sql",), ("sql", "go")], ids=len)
def test_what_is_let_in_runs_alone_and_what_is_not_lacks_a_byte(
    house: HomeFixture, numpy_below: int, experts: tuple[str, ...]
) -> None:
    wanted = make_request("Sort: 1", *experts, max_tokens=40)
    with open_engine_harness(house.home, numpy_below=numpy_below) as shop:
        limit = shop.find_least_budget(wanted)
    enough = replace(SETTINGS, memory_budget=limit)
    with open_engine_harness(house.home, enough, numpy_below=numpy_below) as shop:
        assert shop.answer(wanted).results[0].generated.tokens
        assert shop.runner.budget.peak <= limit
    with open_engine_harness(
        house.home, replace(enough, memory_budget=limit - 1), numpy_below=numpy_below
    ) as shop:
        refused = shop.answer(wanted)
        assert isinstance(refused.error, BudgetError)
        assert shop.answer(make_request("Sort: 1", max_tokens=1)).results
        shop.check_idle()


def test_too_little_for_the_rows_names_what_a_server_can_change(house: HomeFixture) -> None:
    settings = adapt_batching(replace(SETTINGS, memory_budget=1000), rows=64)
    match = "the buffers of the batch"
    with (
        pytest.raises(BudgetError, match=match) as refused,
        open_engine_harness(house.home, settings),
    ):
        pytest.fail("a server begins in a kilobyte")
    assert refused.value.hint == "raise --memory-budget, or lower --rows"


def test_a_base_that_was_changed_behind_the_server_is_no_more_served(
    house: HomeFixture, market: EnginePackages
) -> None:
    with open_engine_harness(house.home) as shop:
        bound = shop.runner.bind_request(make_request())
        planned = shop.processor.plan(bound).result()
        identity = replace(planned.base.identity, weights=planned.base.identity.arch)
        other = replace(planned, base=replace(planned.base, identity=identity))
        with pytest.raises(BaseMismatchError, match="was replaced by another base"):
            shop.runner.prepare(bound, other)


def test_another_base_is_refused_by_name(shop: EngineHarness) -> None:
    with pytest.raises(UsageError, match="serves market-base, not other"):
        shop.runner.bind_request(replace(make_request(), base="other"))


def test_each_job_counts_for_its_experts_and_each_tier_has_its_traffic(shop: EngineHarness) -> None:
    """Counted by hand: a plan that is there needs nothing; a new one needs its experts."""
    for experts in (("sql",), ("sql",), ("go",), ("sql", "go"), (), ("go", "sql"), ("sql", "go")):
        assert shop.answer(make_request("Sort: 1", *experts, max_tokens=2)).results
    ram, device = (shop.runner.resources.tiers.traffic[tier] for tier in Tier)
    assert (ram.loads, ram.hits, ram.evictions) == (2, 4, 0)
    assert (device.loads, device.hits, device.evictions) == (4, 2, 0)
    assert dict(shop.scheduler.totals.experts) == {"acme/sql@1.0.0": 5, "acme/go@1.0.0": 4}


def test_an_expert_that_makes_room_is_an_eviction_and_is_loaded_again(house: HomeFixture) -> None:
    with open_engine_harness(house.home) as shop:
        shop.answer(make_request("Sort: 1", "sql", max_tokens=2))
        limit = shop.runner.budget.peak
    with open_engine_harness(house.home, replace(SETTINGS, memory_budget=limit)) as shop:
        for name in ("sql", "go", "sql"):
            assert shop.answer(make_request("Sort: 1", name, max_tokens=2)).results
        ram, device = (shop.runner.resources.tiers.traffic[tier] for tier in Tier)
        assert (ram.loads, ram.hits) == (3, 0)
        assert (device.loads, device.hits) == (3, 0)
        assert ram.evictions == device.evictions == 2
        assert dict(shop.scheduler.totals.experts) == {"acme/sql@1.0.0": 2, "acme/go@1.0.0": 1}
