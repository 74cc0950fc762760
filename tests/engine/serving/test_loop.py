"""Texts begin and end between passes; what fails ends what it belongs to, and leaves nothing."""

import time
from typing import Any

import pytest

from expertctl.engine.cpu.plain_backend import PlainModel
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.model_runner import INITIAL_ANSWER_TOKENS
from expertctl.engine.serving.request import JobStarted, RequestState
from expertctl.errors import BudgetError, CancelledError
from tests.engine.serving.harness import (
    ENDLESS_TOKENS,
    EngineHarness,
    engine_packages,
    harness,
    known,
    make_request,
    open_engine_harness,
    reserve_all_but,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "harness", "known", "user_home"]


class StepClock:
    """The time that steps are measured by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_answer_has_the_time_from_its_job_to_its_own_first_token(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StepClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    other = harness.submit(make_request("Sort: 1", "go", max_tokens=ENDLESS_TOKENS))
    harness.step_until(lambda: other.has_started)
    clock.now = 2000.0
    job = harness.submit_until_ready(
        make_request("Sort: 2", "sql", max_tokens=ENDLESS_TOKENS), answers=2
    )
    clock.now = 2001.0
    harness.step_until(lambda: job.has_started)
    clock.now = 2003.0
    harness.loop.run_pass()  # there is one row for two answers
    harness.scheduler.cancel(other.state.job.id)
    clock.now = 2007.0
    harness.loop.run_pass()
    clock.now = 2011.0
    harness.step_until(lambda: any(isinstance(e, OutputDelta) and e.number for e in job.events))
    clock.now = 2020.0
    harness.scheduler.cancel(job.state.job.id)
    harness.finish(other, job)
    first, second = (result.timings_ms for result in job.results)
    assert (first["ttft"], second["ttft"]) == (1_000.0, 11_000.0)
    assert (first["queue"], second["queue"]) == (1_000.0, 11_000.0)
    assert first["total"] == second["total"] == 20_000.0


def test_a_bug_in_a_pass_ends_the_texts_of_that_pass_and_no_other(harness: EngineHarness) -> None:
    texts = [
        harness.submit_until_ready(make_request(f"Sort: {n}", "sql", max_tokens=ENDLESS_TOKENS))
        for n in range(2)
    ]
    harness.loop.run_pass()
    waiting = harness.submit_until_ready(make_request("Sort: 9", "go"))
    model = harness.loop.batch._model

    class Broken:
        prefill_parts = 1

        def prefill(self, reading: Any, ids: Any, **_: Any) -> Any:
            return reading.prefill(ids)

        def step(self, _: Any) -> Any:
            raise ZeroDivisionError

    harness.loop.batch._model = Broken()  # type: ignore[assignment]  # steps are all that is asked
    harness.step_until(lambda: all(text.is_over for text in texts))
    harness.loop.batch._model = model
    assert [text.error.message for text in texts] == ["the server failed to answer this"] * 2
    assert "ZeroDivisionError" in harness.messages[-1]
    harness.finish(waiting)
    assert waiting.results[0].generated.tokens
    assert (harness.scheduler.totals.failed, harness.scheduler.totals.finished) == (2, 1)
    harness.check_idle()


def test_a_text_that_a_bug_keeps_from_beginning_ends_its_own_job(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = harness.submit_until_ready(make_request("Sort: 1", "sql", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    bad = harness.submit_until_ready(make_request("Sort: 2", "go"))

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(PlainModel, "prepare", fail)
        harness.loop.run_pass()
    assert bad.error.message == "the server failed to answer this"
    assert "a sequence could not start" in harness.messages[-1]
    assert not any(isinstance(event, JobStarted) for event in bad.events)
    assert [text.consumer for text in harness.loop.batch.sequences] == [good.state]
    harness.scheduler.cancel(good.state.job.id)
    harness.finish(good)
    assert good.results[0].generated.tokens
    harness.check_idle()


def test_keys_and_values_that_do_not_fit_beside_others_wait_until_those_end(
    harness: EngineHarness,
) -> None:
    first = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    second = harness.submit_until_ready(make_request("Sort: 2", max_tokens=ENDLESS_TOKENS))
    with reserve_all_but(harness, leaving=1000):
        harness.loop.run_pass()
        assert not second.events
        assert second.state.stage == "ready"
        harness.scheduler.cancel(first.state.job.id)
        harness.step_until(lambda: second.has_started)
        assert first.state.outputs
        harness.scheduler.cancel(second.state.job.id)
        harness.finish(second)
    harness.check_idle()


def test_those_that_only_wait_give_back_what_is_pinned_for_them(harness: EngineHarness) -> None:
    first = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    second = harness.submit_until_ready(make_request("Sort: 2", "go"))
    experts = harness.runner.budget.reserved_bytes("experts")
    wanted = _bytes_to_begin(harness, first.state)
    with reserve_all_but(harness, leaving=wanted - 1):
        harness.loop.run_pass()
        assert second.state.stage != "ready"
        harness.step_until(lambda: bool(first.events))
        assert isinstance(first.events[0], JobStarted)
        assert harness.runner.budget.reserved_bytes("experts") < experts
        harness.scheduler.cancel(first.state.job.id)
        harness.step_until(lambda: first.is_over)
    harness.finish(second)
    assert second.results[0].generated.tokens
    harness.check_idle()


def test_what_fits_beside_nobody_is_refused_when_nothing_runs(harness: EngineHarness) -> None:
    alone = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    with reserve_all_but(harness, leaving=1000):
        harness.finish(alone)
    assert isinstance(alone.error, BudgetError)
    assert harness.answer(make_request("Sort: 2")).results[0].generated.tokens
    harness.check_idle()


def test_a_job_that_is_called_off_before_its_row_is_free_gets_none(harness: EngineHarness) -> None:
    one = harness.submit_until_ready(make_request("Sort: 1", "sql"))
    harness.scheduler.cancel(one.state.job.id)
    harness.loop.run_pass()
    assert isinstance(one.error, CancelledError)
    assert harness.loop.batch.sequences == ()
    harness.check_idle()


def test_a_job_that_is_called_off_between_two_answers_ends_with_those_that_began(
    harness: EngineHarness,
) -> None:
    other = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    job = harness.submit_until_ready(
        make_request("Sort: 2", "sql", max_tokens=ENDLESS_TOKENS), answers=2
    )
    harness.loop.run_pass()
    for one in (job, other):
        harness.scheduler.cancel(one.state.job.id)
    harness.finish(job, other)
    assert [result.generated.finish_reason for result in job.results] == ["cancelled"]
    harness.check_idle()


def test_answers_of_one_job_read_its_prompt_once(user_home: HomeFixture) -> None:
    wanted = make_request("one two three four five " * 20, "sql")
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        job = harness.answer(wanted, answers=4)
        first, *others = (result.generated.prefill_tokens for result in job.results)
        assert first == job.results[0].prompt_tokens > 2 * KV_PAGE_TOKENS
        assert all(0 < read <= KV_PAGE_TOKENS for read in others), (
            "what fills no page is not shared"
        )
        kept = harness.runner.resources.get_kv_store(harness.runner.base.backend).cached_bytes
        assert kept == 0, "nobody asks with its key again"
        harness.check_idle()


def test_a_job_that_reads_for_its_other_answers_keeps_no_row_from_others(
    user_home: HomeFixture,
) -> None:
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        long = harness.submit_until_ready(
            make_request("one two three four five " * 16, "sql"), answers=2
        )
        other = harness.submit_until_ready(make_request("Sort: 2", "go"))
        harness.loop.run_pass()
        assert [text.consumer for text in harness.loop.batch.sequences] == [long.state, other.state]
        harness.finish(long, other)


def test_a_job_that_is_called_off_ends_though_its_next_answer_lacks_memory(
    harness: EngineHarness,
) -> None:
    other = harness.submit_until_ready(make_request("Sort: 2", "go", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    job = harness.submit_until_ready(
        make_request("Sort: 1", "go", max_tokens=ENDLESS_TOKENS), answers=2
    )
    wanted = _bytes_to_begin(harness, job.state)
    with reserve_all_but(harness, leaving=wanted + wanted // 2):
        harness.loop.run_pass()
        harness.loop.run_pass()
        assert (job.state.started_count, job.state.stage) == (1, "ready")
        harness.scheduler.cancel(job.state.job.id)
        harness.step_until(lambda: job.state.stage in {"concluding", "ended"})
        harness.wait(lambda: job.is_over)  # a thread writes its end; further passes take memory
        assert not other.is_over
    harness.scheduler.cancel(other.state.job.id)
    harness.finish(other)
    harness.check_idle()


def pages(harness: EngineHarness, count: int) -> int:
    """The bytes of so many pages."""
    return count * harness.runner.base.kv_bytes(KV_PAGE_TOKENS)


def test_texts_that_grow_take_memory_from_those_that_began_last(user_home: HomeFixture) -> None:
    asked = [
        make_request(f"Sort: {n}", name, max_tokens=400) for n, name in enumerate(("sql", "go"))
    ]
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        alone = [harness.answer(one).results[0].generated.tokens for one in asked]
        assert all(len(tokens) > 2 * INITIAL_ANSWER_TOKENS for tokens in alone), "they grow"
        first, second = (harness.submit_until_ready(one) for one in asked)
        harness.loop.run_pass()
        with reserve_all_but(harness, leaving=pages(harness, 24)):
            harness.finish(first)
            assert harness.scheduler.totals.paused >= 1
            assert not second.is_over
            harness.finish(second)
        together = [caller.results[0].generated for caller in (first, second)]
        assert [one.tokens for one in together] == alone
        assert [one.prefill_tokens for one in together] == [
            caller.results[0].prompt_tokens for caller in (first, second)
        ]
        harness.check_idle()


def test_a_text_that_pauses_ends_when_it_is_called_off(user_home: HomeFixture) -> None:
    asked = [
        make_request(f"Sort: {n}", name, max_tokens=400) for n, name in enumerate(("sql", "go"))
    ]
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        first, second = (harness.submit_until_ready(one) for one in asked)
        harness.loop.run_pass()
        with reserve_all_but(harness, leaving=pages(harness, 24)):
            harness.step_until(lambda: harness.scheduler.totals.paused == 1)
            harness.scheduler.cancel(second.state.job.id)
            harness.finish(second)
            assert second.results[0].generated.finish_reason == "cancelled"
            assert len(second.results[0].generated.tokens) >= INITIAL_ANSWER_TOKENS
            assert not first.is_over
            harness.finish(first)
        harness.check_idle()


def test_nobody_begins_while_a_text_pauses(user_home: HomeFixture) -> None:
    asked = [
        make_request(f"Sort: {n}", name, max_tokens=400) for n, name in enumerate(("sql", "go"))
    ]
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        first, second = (harness.submit_until_ready(one) for one in asked)
        harness.loop.run_pass()
        with reserve_all_but(harness, leaving=pages(harness, 24)):
            harness.step_until(lambda: harness.scheduler.totals.paused == 1)
            third = harness.submit(make_request("Sort: 9", "go", max_tokens=2))
            harness.finish(first)
            assert not third.has_started
            harness.finish(second, third)
        harness.check_idle()


def _bytes_to_begin(harness: EngineHarness, state: RequestState) -> int:
    """What a text takes when it begins: its first keys and values, and wider buffers."""
    base, rows = harness.runner.base, harness.runner.rows
    assert state.prepared is not None
    prompt, held = state.prepared.prompt, harness.runner.budget.reserved_bytes("buffers")
    wider = max(base.buffer_bytes(prompt.capacity, rows=rows) - held, 0)
    first = min(prompt.capacity, prompt.virtual + len(prompt.ids) + INITIAL_ANSWER_TOKENS)
    return base.kv_bytes(first) + wider
