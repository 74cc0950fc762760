"""Memory of a server as on a CUDA device: what jobs wait for, and what is freed when."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.serving.model_runner import ModelRunner
from expertctl.engine.serving.scheduler import MAX_PREPARED_AHEAD
from expertctl.engine.torch.cuda_graph_step import StaticKVCache, StaticKVRow
from expertctl.engine.torch.static_kv_store import StaticKVStore
from expertctl.errors import BudgetError
from tests.engine.serving.harness import (
    EngineHarness,
    adapt_batching,
    engine_packages,
    known,
    make_request,
    open_engine_harness,
)
from tests.engine.serving.test_cuda_rows import (
    SETTINGS,
    backend_of,
    check_answers,
    decoder_of,
    device,
    harness,
    shape_of,
    store_of,
    submit_ready,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["device", "engine_packages", "fast", "harness", "known", "user_home"]


def test_a_job_alone_needs_one_slot_and_jobs_whose_slots_do_not_fit_together_take_turns(
    user_home: HomeFixture,
) -> None:
    wanted = [make_request("Sort: 1", name, max_tokens=40) for name in ("sql", "go")]
    many = adapt_batching(SETTINGS, rows=16)
    with open_engine_harness(user_home.home, many) as harness:
        tiers, limit = harness.runner.resources.tiers, harness.runner.budget.limit
        others = limit - max(map(harness.find_least_budget, wanted))
        with tiers.reserve_during(Tier.DEVICE, "experts", others, what="others"):
            callers = [harness.submit(one) for one in wanted]
            harness.finish(*callers)
        check_answers(user_home, wanted, callers)
        tokens, width, plans = harness.runner._widest_request
        sizes = partial(backend_of(harness).buffer_bytes, tokens, width=width, rows=16)
        assert sizes() == sizes(plans=1) < sizes(plans=2) < sizes(plans=16)
        assert plans == 1
        assert harness.runner.budget.peak <= limit
        assert not harness.runner._running_plans


def test_no_more_jobs_are_prepared_than_the_arena_has_rows_for(user_home: HomeFixture) -> None:
    many = adapt_batching(SETTINGS, rows=16)
    with open_engine_harness(user_home.home, many) as harness:
        tiers, budget = harness.runner.resources.tiers, harness.runner.budget
        row = store_of(harness).nbytes // shape_of(harness)[0]
        store_of(harness).clear()
        wanted = [make_request(f"Sort: {n}, 1", max_tokens=40) for n in range(12)]
        with tiers.reserve_during(
            Tier.DEVICE, "experts", budget.free - int(2.5 * row), what="others"
        ):
            first = submit_ready(harness, wanted[0])
            harness.step_until(lambda: first[0].has_started)
            assert harness.scheduler.free_rows == shape_of(harness)[0] - 1 == 1
            callers = first + [harness.submit(one) for one in wanted[1:]]
            harness.step_until(lambda: callers[1].has_started)
            assert harness.scheduler.free_rows == 0
            assert sum(one.state.stage == "waiting" for one in callers) >= 10 - MAX_PREPARED_AHEAD
            harness.finish(*callers)
        assert harness.scheduler.free_rows == 16
        tiers.clear()


def test_a_job_that_waits_for_rows_takes_no_memory_for_buffers(
    user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen, running = ModelRunner._widen_buffers, list[int]()

    def check(runner: ModelRunner, *, tokens: int, width: int, plans: int) -> None:
        if tokens > 400:
            running.append(len(harness.loop.batch.sequences))
        widen(runner, tokens=tokens, width=width, plans=plans)

    monkeypatch.setattr(ModelRunner, "_widen_buffers", check)
    with open_engine_harness(user_home.home, replace(SETTINGS, memory_budget=8 << 20)) as harness:
        short = harness.submit_until_ready(make_request("Sort: 1", max_tokens=30))
        harness.step_until(lambda: short.has_started)
        long = harness.submit_until_ready(make_request("Sort: 5, 4", "sql", max_tokens=400))
        harness.finish(short, long)
        assert long.results
        assert running == [0]


def test_a_plan_that_is_evicted_is_freed_although_it_had_a_slot(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    wanted = make_request("Sort: 3, 1", "sql", max_tokens=8)
    answers = [harness.answer(wanted)]
    slots = decoder_of(harness)._plans
    assert slots is not None
    [plan] = slots.list_plans().values()
    delta = next(iter(plan.values()))
    block = weakref.ref(delta.tensors[0])
    del plan, delta
    assert block() is not None
    harness.runner.resources.tiers.clear()
    assert block() is None
    answers.append(harness.answer(wanted))
    check_answers(user_home, [wanted] * 2, answers)


@pytest.mark.parametrize("ends", ["finished", "failed"])
def test_a_row_is_given_back_when_nothing_references_it(
    ends: str, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, references = list[weakref.ref[StaticKVRow]](), list[bool]()
    finish = StaticKVStore._finish

    def check(store: StaticKVStore, text: Any, ids: Any) -> None:
        rows.append(weakref.ref(text.cache))
        [sequence] = sequences
        references.append(hasattr(sequence, "session") or hasattr(sequence, "cache"))
        finish(store, text, ids)

    monkeypatch.setattr(StaticKVStore, "_finish", check)
    job = harness.submit(make_request("Sort: 3, 1", "sql", max_tokens=8))
    harness.step_until(lambda: job.has_started)
    sequences = harness.loop.batch.sequences
    if ends == "failed":
        harness.loop._fail(job.state, BudgetError("a test"))
    harness.finish(job)
    assert references == [False]
    assert rows[0]() is None


def test_jobs_that_find_the_device_full_fail_instead_of_giving_way_to_each_other(
    harness: EngineHarness, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs have its memory, which no job can free; each could start within the budget."""
    wanted = [make_request("Sort: 3, 1", name, max_tokens=8) for name in ("sql", "go")]
    tries = 0

    def full(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        assert tries < 20, "this has no end"
        harness.wait(lambda: not harness.scheduler.preparing_count)  # who gave way is ready again
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    store_of(harness).clear()
    with monkeypatch.context() as broken:
        broken.setattr(StaticKVCache, "__init__", full)
        callers = submit_ready(harness, *wanted)
        harness.finish(*callers)
    for caller in callers:
        assert isinstance(caller.error, BudgetError)
        assert "less memory left" in caller.error.message
    again = submit_ready(harness, *wanted)
    harness.finish(*again)
    check_answers(user_home, wanted, again)
