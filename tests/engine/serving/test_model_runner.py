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
    engine_packages,
    known,
    make_request,
    open_engine_harness,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "known", "user_home"]

ROWS = 4


@pytest.fixture(params=[NUMPY_MAX_BYTES, 0], ids=["numpy", "kernels"])
def numpy_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def harness(user_home: HomeFixture, numpy_below: int) -> Iterator[EngineHarness]:
    settings = adapt_batching(SETTINGS, rows=ROWS)
    with open_engine_harness(user_home.home, settings, numpy_below=numpy_below) as harness:
        yield harness


def test_buffers_are_for_the_widest_that_came_until_nothing_runs(harness: EngineHarness) -> None:
    user_home, held = harness.runner, harness.runner.budget.reserved_bytes
    least = user_home.base.buffer_bytes(1, rows=ROWS)
    assert held("buffers") == least
    harness.answer(make_request("Sort: 1", max_tokens=300))
    tokens, alone, _ = user_home._widest_request
    assert held("buffers") == user_home.base.buffer_bytes(tokens, rows=ROWS) >= least
    harness.answer(make_request("Sort: 1", "sql", max_tokens=2))
    assert user_home._widest_request[0] == tokens
    width = user_home._widest_request[1]
    assert width >= alone
    assert held("buffers") == user_home.base.buffer_bytes(tokens, width=width, rows=ROWS)
    grew = held("buffers") > least  # beside what reading a tiny packed base takes, passes are small
    assert user_home.free_wide_buffers() == grew
    assert held("buffers") == least
    assert user_home.model.holds_only_weights == grew
    assert not user_home.free_wide_buffers()
    harness.check_idle()


def test_the_memory_of_a_batch_is_within_what_is_held(user_home: HomeFixture) -> None:
    """What numpy takes for passes over several texts, and for their keys and values."""
    settings = adapt_batching(SETTINGS, rows=ROWS)
    with open_engine_harness(user_home.home, settings) as harness:
        for number in range(ROWS):
            harness.submit_until_ready(make_request(f"Sort: {number}", "sql", max_tokens=200))
        tracemalloc.start()
        try:
            for _ in range(2 * ROWS):
                harness.loop.run_pass()
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        held = harness.runner.memory.held
        assert 0 < taken <= held["kv"] + held["buffers"]


def test_what_kernels_hold_is_within_what_is_held(user_home: HomeFixture) -> None:
    settings = adapt_batching(SETTINGS, rows=ROWS)
    with open_engine_harness(user_home.home, settings, numpy_below=0) as harness:
        names = ("sql", "go", "sql", "go")
        jobs = [
            harness.submit_until_ready(make_request(f"Sort: {n}", name))
            for n, name in enumerate(names)
        ]
        harness.step_until(lambda: all(job.has_started for job in jobs))
        model = harness.runner.model
        assert isinstance(model, PackedModel)
        scores = ROWS * harness.runner.base.config.vocab_size * 4
        assert 0 < model.decoder.nbytes + scores <= harness.runner.budget.reserved_bytes("buffers")
        harness.finish(*jobs)
        harness.check_idle()


def test_keys_and_values_that_do_not_fit_leave_the_buffers_as_they_were(
    harness: EngineHarness,
) -> None:
    job = harness.submit_until_ready(make_request("Sort: 1", max_tokens=300))
    user_home, prepared, memory = harness.runner, job.state.prepared, job.state.memory
    assert prepared is not None
    assert memory is not None
    before = user_home.memory.held
    wider = user_home.base.buffer_bytes(prepared.prompt.capacity, rows=ROWS) - before["buffers"]
    limit, user_home.budget.limit = user_home.budget.limit, user_home.budget.used + wider
    with pytest.raises(BudgetError), user_home.open_sequence(prepared, memory, cache_key=None):
        pass
    user_home.budget.limit = limit
    assert user_home.memory.held == before
    harness.finish(job)
    harness.check_idle()


@pytest.mark.parametrize("experts", [(), ("sql",), ("sql", "go")], ids=len)
def test_what_is_let_in_runs_alone_and_what_is_not_lacks_a_byte(
    user_home: HomeFixture, numpy_below: int, experts: tuple[str, ...]
) -> None:
    wanted = make_request("Sort: 1", *experts, max_tokens=40)
    with open_engine_harness(user_home.home, numpy_below=numpy_below) as harness:
        limit = harness.find_least_budget(wanted)
    enough = replace(SETTINGS, memory_budget=limit)
    with open_engine_harness(user_home.home, enough, numpy_below=numpy_below) as harness:
        assert harness.answer(wanted).results[0].generated.tokens
        assert harness.runner.budget.peak <= limit
    with open_engine_harness(
        user_home.home, replace(enough, memory_budget=limit - 1), numpy_below=numpy_below
    ) as harness:
        refused = harness.answer(wanted)
        assert isinstance(refused.error, BudgetError)
        assert harness.answer(make_request("Sort: 1", max_tokens=1)).results
        harness.check_idle()


def test_too_little_for_the_rows_names_what_a_server_can_change(user_home: HomeFixture) -> None:
    settings = adapt_batching(replace(SETTINGS, memory_budget=1000), rows=64)
    match = "the buffers of the batch"
    with (
        pytest.raises(BudgetError, match=match) as refused,
        open_engine_harness(user_home.home, settings),
    ):
        pytest.fail("a server begins in a kilobyte")
    assert refused.value.hint == "raise --memory-budget, or lower --rows"


def test_a_base_that_was_changed_behind_the_server_is_no_more_served(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    with open_engine_harness(user_home.home) as harness:
        bound = harness.runner.bind_request(make_request())
        planned = harness.processor.plan(bound).result()
        identity = replace(planned.base.identity, weights=planned.base.identity.arch)
        other = replace(planned, base=replace(planned.base, identity=identity))
        with pytest.raises(BaseMismatchError, match="was replaced by another base"):
            harness.runner.prepare(bound, other)


def test_another_base_is_refused_by_name(harness: EngineHarness) -> None:
    with pytest.raises(UsageError, match="serves market-base, not other"):
        harness.runner.bind_request(replace(make_request(), base="other"))


def test_each_job_counts_for_its_experts_and_each_tier_has_its_traffic(
    harness: EngineHarness,
) -> None:
    """Counted by hand: a plan that is there needs nothing; a new one needs its experts."""
    for experts in (("sql",), ("sql",), ("go",), ("sql", "go"), (), ("go", "sql"), ("sql", "go")):
        assert harness.answer(make_request("Sort: 1", *experts, max_tokens=2)).results
    ram, device = (harness.runner.resources.tiers.traffic[tier] for tier in Tier)
    assert (ram.loads, ram.hits, ram.evictions) == (2, 4, 0)
    assert (device.loads, device.hits, device.evictions) == (4, 2, 0)
    assert dict(harness.scheduler.totals.experts) == {"acme/sql@1.0.0": 5, "acme/go@1.0.0": 4}


def test_an_expert_that_makes_room_is_an_eviction_and_is_loaded_again(
    user_home: HomeFixture,
) -> None:
    with open_engine_harness(user_home.home) as harness:
        harness.answer(make_request("Sort: 1", "sql", max_tokens=2))
        limit = harness.runner.budget.peak
    with open_engine_harness(user_home.home, replace(SETTINGS, memory_budget=limit)) as harness:
        for name in ("sql", "go", "sql"):
            assert harness.answer(make_request("Sort: 1", name, max_tokens=2)).results
        ram, device = (harness.runner.resources.tiers.traffic[tier] for tier in Tier)
        assert (ram.loads, ram.hits) == (3, 0)
        assert (device.loads, device.hits) == (3, 0)
        assert ram.evictions == device.evictions == 2
        assert dict(harness.scheduler.totals.experts) == {"acme/sql@1.0.0": 2, "acme/go@1.0.0": 1}
