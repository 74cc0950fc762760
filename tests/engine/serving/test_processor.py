"""Before and after the batch: a job that fails there ends alone; what lacks memory waits."""

import gc
import threading
from dataclasses import replace

import pytest

from expertctl.engine.request import RunRequest
from expertctl.engine.serving import scheduler
from expertctl.engine.serving.request import RequestState
from expertctl.engine.text.answer_format import FormatCheck
from expertctl.errors import BudgetError, CancelledError, DigestError, StoreError, UsageError
from tests.engine.serving.harness import (
    ENDLESS_TOKENS,
    SETTINGS,
    EngineHarness,
    SubmittedRequest,
    adapt_batching,
    engine_packages,
    harness,
    known,
    make_request,
    open_engine_harness,
    reserve_all_but,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "harness", "known", "user_home"]


def damage(user_home: HomeFixture, name: str) -> None:
    """Change a bit of an expert's weights, behind the server."""
    [stored] = [e for e in user_home.store.list_experts() if str(e.package) == f"acme/{name}"]
    weights = max(stored.files, key=lambda file: file.size)
    path = user_home.store.paths.blob(weights.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def lacks_memory(caller: SubmittedRequest) -> bool:
    return caller.state.memory_missing_since is not None


def test_an_expert_whose_bytes_changed_fails_its_own_job_and_is_remembered(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    damage(user_home, "sql")
    bad, good = (
        harness.submit(make_request("Sort: 1", "sql")),
        harness.submit(make_request("Sort: 1", "go")),
    )
    harness.finish(bad, good)
    assert isinstance(bad.error, DigestError)
    assert good.results[0].generated.tokens
    harness.check_idle()
    harness.processor.plan(
        harness.runner.bind_request(make_request())
    ).result()  # behind what is remembered
    blamed = [job for job in harness.planner.catalogue.history.list_runs() if job.blamed]
    assert [[expert.ref for expert in job.experts] for job in blamed] == [["acme/sql@1.0.0"]]


def test_where_the_home_lies_is_told_to_who_runs_the_server_and_to_no_caller(
    harness: EngineHarness, user_home: HomeFixture
) -> None:
    """A folder lies in the place of the catalogue: it is asked for each plan, a job's or not."""
    index = user_home.home.index
    for path in index.parent.glob(f"{index.name}*"):
        path.unlink()
    index.mkdir()
    before = len(harness.messages)
    refused = [harness.answer(make_request("Sort: 1", "sql")).error for _ in range(2)]
    with pytest.raises(StoreError) as planned:
        harness.processor.plan(harness.runner.bind_request(make_request())).result()
    for error in (*refused, planned.value):
        assert isinstance(error, StoreError)
        assert error.message == "a file of this server cannot be used"
        assert str(user_home.home.root) not in error.hint
    errors = [line for line in harness.messages[before:] if line.startswith("error: ")]
    assert errors == [f"error: {index} is not a regular file"], "once, however many are refused"
    index.rmdir()
    assert harness.answer(make_request("Sort: 1", "sql")).results
    harness.check_idle()


def test_a_check_that_breaks_ends_one_job_and_is_told(harness: EngineHarness) -> None:
    def check(_: str) -> FormatCheck:
        raise ZeroDivisionError

    bad, good = harness.submit(make_request(), check=check), harness.submit(make_request())
    harness.finish(bad, good)
    assert bad.error.message == "the server failed to answer this"
    assert "ZeroDivisionError" in harness.messages[-1]
    assert good.results[0].generated.tokens
    harness.check_idle()


def test_a_check_that_takes_long_holds_up_no_other_job(harness: EngineHarness) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def check(_: str) -> FormatCheck:
        begun.set()
        assert may_end.wait(60)
        return FormatCheck(True)

    slow = harness.submit(make_request(), check=check)
    harness.step_until(begun.is_set)
    quick = harness.answer(make_request("Sort: 1", "sql"))
    assert quick.results[0].generated.tokens
    assert not slow.is_over
    may_end.set()
    harness.finish(slow)
    assert slow.results[0].validation_passed


def test_a_check_may_leave_the_usual_one_a_part_of_the_answer(harness: EngineHarness) -> None:
    wanted = make_request("Answer with JSON only: a list of numbers")
    whole = harness.answer(wanted, check=lambda _: "[1, 2]")
    assert whole.results[0].validation_passed is True
    part = harness.answer(wanted, check=lambda _: "[1, 2] is")
    assert part.results[0].validation_passed is True


def test_an_answer_that_was_cut_at_the_limit_does_not_fail_the_check_of_a_request(
    harness: EngineHarness,
) -> None:
    done = harness.answer(make_request("Sort: 1"), check=lambda _: FormatCheck(False, "not JSON"))
    [result] = done.results
    assert result.generated.finish_reason == "length"
    assert result.validation_passed is None
    assert [w for w in result.warnings if "not JSON" in w] == []


def test_an_expert_that_finds_no_memory_comes_again_when_some_is_given_back(
    harness: EngineHarness,
) -> None:
    first = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    with reserve_all_but(harness, leaving=1000):
        second = harness.submit(make_request("Sort: 2", "go"))
        harness.wait(lambda: lacks_memory(second))
        assert (second.events, second.state.memory) == ([], None)
    harness.step_until(lambda: second.is_over)
    assert second.results[0].generated.tokens
    assert not lacks_memory(second)
    harness.scheduler.cancel(first.state.job.id)
    harness.finish(first)
    harness.check_idle()


def test_a_job_that_waits_for_memory_can_be_called_off(harness: EngineHarness) -> None:
    first = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    with reserve_all_but(harness, leaving=1000):
        second = harness.submit(make_request("Sort: 2", "go"))
        harness.wait(lambda: lacks_memory(second))
        harness.scheduler.cancel(second.state.job.id)
        harness.wait(lambda: second.is_over)
    assert isinstance(second.error, CancelledError)
    assert not first.is_over
    harness.scheduler.cancel(first.state.job.id)
    harness.finish(first)
    harness.check_idle()


def test_an_expert_that_nobody_can_make_room_for_is_refused(harness: EngineHarness) -> None:
    with reserve_all_but(harness, leaving=1000):
        job = harness.answer(make_request("Sort: 2", "go"))
    assert isinstance(job.error, BudgetError)
    assert "acme/go" in job.error.message
    assert harness.answer(make_request("Sort: 2", "go")).results[0].generated.tokens
    harness.check_idle()


def test_an_idle_server_gives_up_wide_buffers_for_an_expert(harness: EngineHarness) -> None:
    harness.answer(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    wide = harness.runner.budget.reserved_bytes("buffers")
    with reserve_all_but(harness, leaving=1000):
        job = harness.answer(make_request("Sort: 2", "go", max_tokens=2))
        assert job.results[0].generated.tokens
        assert harness.runner.budget.reserved_bytes("buffers") < wide
    harness.check_idle()


def test_whoever_waits_for_memory_is_not_overtaken_for_ever(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PATIENCE_SECONDS", 1e-9)
    first = harness.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    harness.loop.run_pass()
    with reserve_all_but(harness, leaving=1000):
        large = harness.submit(make_request("Sort: 2", "go"))
        harness.wait(lambda: lacks_memory(large))
        small = harness.submit(make_request("Sort: 3"))
        assert small.state.stage == "waiting"
    harness.step_until(lambda: small.state.stage != "waiting")
    assert large.state.planned is not None
    assert not lacks_memory(large)
    harness.scheduler.cancel(first.state.job.id)
    harness.finish(first, large, small)
    harness.check_idle()


def test_a_job_that_failed_is_kept_by_nobody(harness: EngineHarness) -> None:
    job = harness.answer(make_request("word " * 9000, "sql"))
    failed_id, job.state = job.state.job.id, harness.answer(make_request()).state
    gc.collect()  # who works keeps what they did last until the next job
    states = [one for one in gc.get_objects() if type(one) is RequestState]
    assert failed_id not in {state.job.id for state in states}
    assert isinstance(job.error, UsageError)  # the caller has it still


def test_a_plan_that_does_not_fit_is_answered_with_fewer_experts_which_is_told(
    user_home: HomeFixture,
) -> None:
    both = make_request("Sort: 1", "sql", "go")
    limit = least_budget(user_home, both) - 1
    fewer = adapt_batching(replace(SETTINGS, memory_budget=limit), on_budget="fewer")
    with open_engine_harness(user_home.home, adapt_batching(fewer, on_budget="queue")) as harness:
        assert isinstance(harness.answer(both).error, BudgetError)
    with open_engine_harness(user_home.home, fewer) as harness:
        [result] = harness.answer(both).results
        [dropped] = result.dropped
        [kept] = result.planned.result.plan.experts
        assert {dropped.ref, kept.ref} == {"acme/sql@1.0.0", "acme/go@1.0.0"}
        assert dropped.warning in result.warnings
        name = kept.ref.removeprefix("acme/").removesuffix("@1.0.0")
        [alone] = harness.answer(make_request("Sort: 1", name)).results
        assert alone.generated.tokens == result.generated.tokens
        assert harness.runner.budget.peak <= limit
        assert dict(harness.scheduler.totals.experts) == {kept.ref: 2}


def least_budget(user_home: HomeFixture, wanted: RunRequest) -> int:
    """The smallest budget that a server takes a request with."""
    with open_engine_harness(user_home.home) as harness:
        return harness.find_least_budget(wanted)
