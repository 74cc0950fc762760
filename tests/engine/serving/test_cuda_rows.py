"""A server as on a CUDA device, with the processor in its place: rows of one static cache.

What each job gets is held against the same request alone, which numpy answers on the processor.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.torch import devices
from expertctl.engine.torch.cuda_backend import CudaBackend
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.static_kv_store import StaticKVStore
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import BudgetError, UsageError
from expertctl.package.base_model import read_base
from expertctl.package.model_config import read_model_config
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import (
    EngineHarness,
    SubmittedRequest,
    adapt_batching,
    engine_packages,
    known,
    make_request,
    open_engine_harness,
)
from tests.engine.serving.test_engine import EventReader, alone, job, planner
from tests.engine.test_runtime_kinds import OPTIONS, install
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "install", "known", "user_home"]

FREE = 64 << 20
SETTINGS = EngineConfig(
    device="cuda", memory_budget=32 << 20, batching=BatchingConfig(rows=4, queue=32)
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the processor, with memory of its own."""
    monkeypatch.setattr(devices, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: FREE + devices.LIBRARY_RESERVE)


@pytest.fixture
def harness(user_home: HomeFixture) -> Iterator[EngineHarness]:
    with open_engine_harness(user_home.home, SETTINGS) as harness:
        yield harness


def store_of(harness: EngineHarness) -> StaticKVStore:
    store = harness.runner.resources.get_kv_store(harness.runner.base.backend)
    assert isinstance(store, StaticKVStore)
    return store


def shape_of(harness: EngineHarness) -> tuple[int, int]:
    arena = store_of(harness)._arena
    assert arena is not None
    return arena.rows, arena.capacity


def backend_of(harness: EngineHarness) -> CudaBackend:
    backend = harness.runner.base.backend
    assert isinstance(backend, CudaBackend)
    return backend


def decoder_of(harness: EngineHarness) -> CudaGraphDecoder:
    decoder = harness.runner.model.decoder  # type: ignore[attr-defined]  # of the CUDA model
    assert isinstance(decoder, CudaGraphDecoder)
    return decoder


def submit_ready(harness: EngineHarness, *wanted: RunRequest) -> list[SubmittedRequest]:
    """Put jobs into the line, and wait until they lack nothing but a row."""
    return [harness.submit_until_ready(one) for one in wanted]


def by_numpy(user_home: HomeFixture, wanted: RunRequest) -> RunResult:
    return alone(user_home, wanted, NUMPY_MAX_BYTES)


def check_answers(
    user_home: HomeFixture, wanted: list[RunRequest], callers: list[SubmittedRequest]
) -> None:
    for one, caller in zip(wanted, callers, strict=True):
        [result] = caller.results
        assert result.numerics.backend == "cuda"
        assert result.generated.tokens == by_numpy(user_home, one).generated.tokens


def test_rows_with_different_plans_are_decoded_together_and_get_what_each_gets_alone(
    harness: EngineHarness, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, sizes = CudaGraphDecoder._step, list[int]()

    def seen(decoder: CudaGraphDecoder, rows: Any, arena: Any) -> None:
        sizes.append(len(rows))
        step(decoder, rows, arena)

    monkeypatch.setattr(CudaGraphDecoder, "_step", seen)
    wanted = [
        make_request("Sort: 3, 1", "sql", max_tokens=60),
        make_request("Sort: 3, 1", "go", max_tokens=50),
        make_request("Say it once", "sql", "go", max_tokens=60),
        make_request("Sort: 9, 8, 7, 6", max_tokens=60),
    ]
    callers = submit_ready(harness, *wanted)
    harness.finish(*callers)
    check_answers(user_home, wanted, callers)
    assert len({caller.results[0].generated.tokens for caller in callers}) == 4
    assert max(sizes) == 4, "one step for all rows"
    counts = harness.loop.batch.counts
    assert (counts.steps, counts.step_rows) == (len(sizes), sum(sizes))
    assert shape_of(harness)[0] == 4


def test_experts_of_every_kind_stand_side_by_side(
    harness: EngineHarness, user_home: HomeFixture, install: Callable[..., None]
) -> None:
    for kind in OPTIONS:
        install(kind)
    wanted = [make_request("Sort: 3, 1", kind.replace("_", "-"), max_tokens=12) for kind in OPTIONS]
    callers = submit_ready(harness, *wanted)
    harness.finish(*callers)
    check_answers(user_home, wanted, callers)


def test_a_real_engine_answers_more_jobs_than_rows(user_home: HomeFixture) -> None:
    engine = ServingEngine(planner(user_home), SETTINGS)
    engine.start()
    names = [(), ("sql",), ("go",), ("sql", "go")]
    wanted = [make_request(f"Sort: {n}, 1", *names[n % 4], max_tokens=5 + n) for n in range(10)]
    readers = [EventReader(engine, job(one)) for one in wanted]
    for one, reader in zip(wanted, readers, strict=True):
        [result] = reader.end().results
        expected = by_numpy(user_home, one).generated
        assert result.generated.tokens == expected.tokens
        assert result.generated.text == expected.text == reader.text
    snapshot = engine.take_snapshot()
    assert snapshot.rows == 4
    assert snapshot.counts.step_rows > snapshot.counts.steps
    assert snapshot.kv_in_use == 0
    assert snapshot.totals.finished == 10
    engine.check_integrity()
    engine.close()
    assert engine._runner.budget.used == 0


def test_answers_of_a_job_share_the_prompt_that_the_first_one_reads(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    wanted = make_request("Sort: 3, 1, 2", "sql", temperature=1.5, max_tokens=16)
    results = harness.answer(wanted, answers=3).results
    expected = by_numpy(user_home, wanted)
    assert results[0].generated.tokens == expected.generated.tokens
    assert len({result.generated.tokens for result in results}) == 3
    reused = [result.kv_reused_tokens for result in results]
    assert reused == [0, expected.prompt_tokens - 1, expected.prompt_tokens - 1]
    with pytest.raises(UsageError, match="5 answers requested, at most 4 are possible"):
        ServingEngine(planner(user_home), SETTINGS).submit(job(wanted, answers=5), lambda _: None)


def test_the_next_turn_reads_only_what_is_new_while_others_run(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    turn = replace(make_request("one two three four five six"), cache_key="a")
    first = harness.answer(turn).results[0]
    others = submit_ready(harness, *(make_request(f"Sort: {n}", max_tokens=60) for n in range(2)))
    harness.step_until(lambda: all(other.has_started for other in others))
    again, stranger = (
        harness.answer(replace(turn, cache_key=key)).results[0] for key in ("a", "b")
    )
    assert not any(other.is_over for other in others)
    assert again.kv_reused_tokens == first.prompt_tokens - 1
    assert stranger.kv_reused_tokens == 0
    expected = by_numpy(user_home, turn).generated.tokens
    assert first.generated.tokens == again.generated.tokens == stranger.generated.tokens == expected
    harness.runner.resources.forget("a")
    assert harness.answer(turn).results[0].kv_reused_tokens == 0
    harness.finish(*others)


def test_jobs_without_a_key_do_not_replace_a_conversation_that_is_kept(
    user_home: HomeFixture,
) -> None:
    with open_engine_harness(user_home.home, SETTINGS) as harness:
        row = store_of(harness).nbytes // 4
    one = adapt_batching(SETTINGS, kept_kv=row)
    with open_engine_harness(user_home.home, one) as harness:
        assert store_of(harness)._max_cached == 1
        turn = replace(make_request("one two three four five six"), cache_key="a")
        first = harness.answer(turn).results[0]
        harness.answer(make_request("Sort: 2"))
        again = harness.answer(turn).results[0]
        assert again.kv_reused_tokens == first.prompt_tokens - 1


def test_a_text_longer_than_the_rows_waits_for_the_others_and_has_them_all_to_itself(
    user_home: HomeFixture,
) -> None:
    little = replace(SETTINGS, memory_budget=7 << 20)
    with open_engine_harness(user_home.home, little) as harness:
        plan = backend_of(harness).arena
        assert plan is not None
        assert plan.capacity < 400 < plan.longest
        usual = shape_of(harness)
        short = [make_request(f"Sort: {n}", max_tokens=30) for n in range(2)]
        running = submit_ready(harness, *short)
        harness.step_until(lambda: all(caller.has_started for caller in running))
        long = make_request("Sort: 5, 4", "sql", max_tokens=400)
        waiting = harness.submit_until_ready(long)
        harness.step_until(lambda: waiting.has_started)
        assert [text.consumer for text in harness.loop.batch.sequences] == [waiting.state]
        harness.finish(waiting, *running)
        rows, capacity = shape_of(harness)
        assert rows < usual[0] == 4
        assert capacity > usual[1]
        after = harness.answer(short[0])
        assert shape_of(harness) == usual
        check_answers(user_home, [*short, long, short[0]], [*running, waiting, after])
        results = harness.answer(long, answers=3).results
        assert shape_of(harness) == (rows, capacity), "more answers than long rows take turns"
        assert len({result.generated.tokens for result in results}) == 1
        assert [result.kv_reused_tokens for result in results[1:]] == [
            results[0].prompt_tokens - 1
        ] * 2


def test_where_memory_is_short_rows_are_fewer_and_jobs_wait_for_them(
    user_home: HomeFixture,
) -> None:
    with open_engine_harness(user_home.home, SETTINGS) as harness:
        tiers, budget = harness.runner.resources.tiers, harness.runner.budget
        row = store_of(harness).nbytes // 4
        store_of(harness).clear()
        wanted = [make_request(f"Sort: {n}, 1", max_tokens=8) for n in range(5)]
        with tiers.reserve_during(
            Tier.DEVICE, "experts", budget.free - int(2.5 * row), what="others"
        ):
            callers = submit_ready(harness, *wanted)
            harness.finish(*callers)
            assert shape_of(harness)[0] == 2
            check_answers(user_home, wanted, callers)
        tiers.clear()


def test_a_job_with_the_least_memory_is_answered_and_with_less_it_is_refused(
    user_home: HomeFixture,
) -> None:
    wanted = make_request("Sort: 1", "sql", max_tokens=40)
    with open_engine_harness(user_home.home, SETTINGS) as harness:
        limit = harness.find_least_budget(wanted)
    enough = replace(SETTINGS, memory_budget=limit + (64 << 10))
    with open_engine_harness(user_home.home, enough) as harness:
        least = harness.find_least_budget(wanted)
        assert least <= harness.runner.budget.limit
        caller = harness.answer(wanted)
        check_answers(user_home, [wanted], [caller])
        assert harness.runner.budget.peak <= harness.runner.budget.limit
        refused = harness.answer(make_request("Sort: 1", "sql", "go", max_tokens=450))
        assert isinstance(refused.error, BudgetError)
        assert harness.answer(wanted).results


def test_a_server_without_memory_for_one_token_does_not_start(user_home: HomeFixture) -> None:
    engine = ServingEngine(planner(user_home), replace(SETTINGS, memory_budget=280 << 10))
    with pytest.raises(BudgetError, match="held: buffers"):
        engine.start()
    engine.close()
    assert engine._runner.budget.used == 0


def test_what_steps_hold_is_what_was_reserved_for_them(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    wanted = [make_request(f"Sort: {n}", *names, max_tokens=30) for n, names in enumerate(
        (["sql"], ["go"], ["sql", "go"], []))]  # fmt: skip
    callers = submit_ready(harness, *wanted)
    harness.step_until(lambda: all(caller.has_started for caller in callers))
    decoder = decoder_of(harness)
    backend, (tokens, width, plans) = backend_of(harness), harness.runner._widest_request
    reserved = harness.runner.budget.reserved_bytes("buffers")
    assert plans == 3
    assert reserved == backend.buffer_bytes(tokens, width=width, rows=4, plans=plans)
    narrow = backend.buffer_bytes(tokens, rows=4)
    assert decoder._plans is not None
    assert decoder._plans.slots == 4, "three different plans"
    assert 0 < decoder._plans.nbytes <= reserved - narrow
    assert decoder.nbytes <= reserved
    harness.finish(*callers)


@pytest.mark.parametrize("name", ["step", "prefill", "prepare"])
def test_a_device_that_is_full_fails_the_jobs_of_that_moment_and_answers_the_next(
    name: str, harness: EngineHarness, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [make_request("Sort: 3, 1", expert, max_tokens=12) for expert in ("sql", "go")]

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    places: dict[str, tuple[type, str]] = {
        "step": (CudaGraphDecoder, "_step"),
        "prefill": (Decoder, "prefill"),
        "prepare": (CudaGraphDecoder, "_prepare_inputs"),
    }
    with monkeypatch.context() as broken:
        broken.setattr(*places[name], full)
        callers = submit_ready(harness, *wanted)
        harness.finish(*callers)
    for caller in callers:
        assert isinstance(caller.error, BudgetError)
        assert "less memory left" in caller.error.message
    assert harness.runner.kv_in_use == 0
    again = submit_ready(harness, *wanted)
    harness.finish(*again)
    check_answers(user_home, wanted, again)


def test_a_job_that_is_cancelled_leaves_its_row_to_the_next_one(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    endless = [make_request(f"Sort: {n}", max_tokens=450) for n in range(4)]
    running = submit_ready(harness, *endless)
    harness.step_until(lambda: all(caller.has_started for caller in running))
    wanted = make_request("Sort: 3, 1", "go", max_tokens=8)
    waiting = harness.submit_until_ready(wanted)
    harness.scheduler.cancel(running[2].state.job.id)
    harness.step_until(lambda: waiting.is_over)
    check_answers(user_home, [wanted], [waiting])
    for caller in running:
        harness.scheduler.cancel(caller.state.job.id)
    harness.finish(*running)
    assert any(isinstance(event, OutputDelta) for event in running[0].events)


@pytest.mark.all
@pytest.mark.parametrize("share", [None, 135], ids=["all resident", "some resident"])
def test_rows_of_a_base_of_routed_experts_get_what_each_gets_alone(
    share: int | None, user_home: HomeFixture, tmp_path: Path
) -> None:
    base = write_base(
        tmp_path / "routed", arch="qwen3_moe", tie=False, seed=2, layers=3, hidden=64, head_dim=16,
        num_experts=24, num_experts_per_tok=3, moe_intermediate_size=320,
    )  # fmt: skip
    user_home.bases.add(base)
    packages = EnginePackages(tmp_path / "market", base, read_base(base))
    routed: dict[str, Any] = {"targets": ("q_proj", "experts.3.up_proj"), "scale": 0.4, "seed": 7}
    user_home.install(
        packages.package("acme/dense", adapters=[("lora", {"targets": ("q_proj", "o_proj")})]),
        packages.package("acme/routed", adapters=[("lora", routed)]),
    )
    wanted = [
        replace(make_request(f"Sort: {n}", *names, max_tokens=10), base="routed")
        for n, names in enumerate(([], ["dense"], ["routed"], []))
    ]
    size = CudaBackend(read_model_config(base), "float32", rows=3).weight_bytes
    budget = 60 << 20 if share is None else size * share // 100
    settings = replace(adapt_batching(SETTINGS, rows=3), base="routed", memory_budget=budget)
    with open_engine_harness(user_home.home, settings) as harness:
        model = harness.runner.model
        assert model.nbytes == backend_of(harness).weight_bytes
        assert (model.experts is None) == (share is None)
        callers = submit_ready(harness, *wanted)
        harness.finish(*callers)
        check_answers(user_home, wanted, callers)
        counts = harness.loop.batch.counts
        assert counts.step_rows > counts.steps
        assert harness.runner.budget.peak <= budget
        assert model.nbytes == backend_of(harness).weight_bytes
