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
    known,
    make_request,
    market,
    open_engine_harness,
    reserve_all_but,
    shop,
)
from tests.store.fixtures import HomeFixture, fast, house

__all__ = ["fast", "house", "known", "market", "shop"]


def damage(house: HomeFixture, name: str) -> None:
    """Change a bit of an expert's weights, behind the server."""
    [stored] = [e for e in house.store.list_experts() if str(e.package) == f"acme/{name}"]
    weights = max(stored.files, key=lambda file: file.size)
    path = house.store.paths.blob(weights.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def lacks_memory(caller: SubmittedRequest) -> bool:
    return caller.ticket.memory_missing_since is not None


def test_an_expert_whose_bytes_changed_fails_its_own_job_and_is_remembered(
    shop: EngineHarness, house: HomeFixture
) -> None:
    damage(house, "sql")
    bad, good = (
        shop.submit(make_request("Sort: 1", "sql")),
        shop.submit(make_request("Sort: 1", "go")),
    )
    shop.finish(bad, good)
    assert isinstance(bad.error, DigestError)
    assert good.results[0].generated.tokens
    shop.check_idle()
    shop.processor.plan(
        shop.runner.bind_request(make_request())
    ).result()  # behind what is remembered
    blamed = [job for job in shop.planner.catalogue.history.list_runs() if job.blamed]
    assert [[expert.ref for expert in job.experts] for job in blamed] == [["acme/sql@1.0.0"]]


def test_where_the_home_lies_is_told_to_who_runs_the_server_and_to_no_caller(
    shop: EngineHarness, house: HomeFixture
) -> None:
    """A folder lies in the place of the catalogue: it is asked for each plan, a job's or not."""
    index = house.home.index
    for path in index.parent.glob(f"{index.name}*"):
        path.unlink()
    index.mkdir()
    before = len(shop.messages)
    refused = [shop.answer(make_request("Sort: 1", "sql")).error for _ in range(2)]
    with pytest.raises(StoreError) as planned:
        shop.processor.plan(shop.runner.bind_request(make_request())).result()
    for error in (*refused, planned.value):
        assert isinstance(error, StoreError)
        assert error.message == "a file of this server cannot be used"
        assert str(house.home.root) not in error.hint
    errors = [line for line in shop.messages[before:] if line.startswith("error: ")]
    assert errors == [f"error: {index} is not a regular file"], "once, however many are refused"
    index.rmdir()
    assert shop.answer(make_request("Sort: 1", "sql")).results
    shop.check_idle()


def test_a_check_that_breaks_ends_one_job_and_is_told(shop: EngineHarness) -> None:
    def check(_: str) -> FormatCheck:
        raise ZeroDivisionError

    bad, good = shop.submit(make_request(), check=check), shop.submit(make_request())
    shop.finish(bad, good)
    assert bad.error.message == "the server failed to answer this"
    assert "ZeroDivisionError" in shop.messages[-1]
    assert good.results[0].generated.tokens
    shop.check_idle()


def test_a_check_that_takes_long_holds_up_no_other_job(shop: EngineHarness) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def check(_: str) -> FormatCheck:
        begun.set()
        assert may_end.wait(60)
        return FormatCheck(True)

    slow = shop.submit(make_request(), check=check)
    shop.step_until(begun.is_set)
    quick = shop.answer(make_request("Sort: 1", "sql"))
    assert quick.results[0].generated.tokens
    assert not slow.is_over
    may_end.set()
    shop.finish(slow)
    assert slow.results[0].validation_passed


def test_a_check_may_leave_the_usual_one_a_part_of_the_answer(shop: EngineHarness) -> None:
    wanted = make_request("Answer with JSON only: a list of numbers")
    whole = shop.answer(wanted, check=lambda _: "[1, 2]")
    assert whole.results[0].validation_passed is True
    part = shop.answer(wanted, check=lambda _: "[1, 2] is")
    assert part.results[0].validation_passed is True


def test_an_answer_that_was_cut_at_the_limit_does_not_fail_the_check_of_a_request(
    shop: EngineHarness,
) -> None:
    done = shop.answer(make_request("Sort: 1"), check=lambda _: FormatCheck(False, "not JSON"))
    [result] = done.results
    assert result.generated.finish_reason == "length"
    assert result.validation_passed is None
    assert [w for w in result.warnings if "not JSON" in w] == []


def test_an_expert_that_finds_no_memory_comes_again_when_some_is_given_back(
    shop: EngineHarness,
) -> None:
    first = shop.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    shop.loop.run_pass()
    with reserve_all_but(shop, leaving=1000):
        second = shop.submit(make_request("Sort: 2", "go"))
        shop.wait(lambda: lacks_memory(second))
        assert (second.events, second.ticket.memory) == ([], None)
    shop.step_until(lambda: second.is_over)
    assert second.results[0].generated.tokens
    assert not lacks_memory(second)
    shop.scheduler.cancel(first.ticket.job.id)
    shop.finish(first)
    shop.check_idle()


def test_a_job_that_waits_for_memory_can_be_called_off(shop: EngineHarness) -> None:
    first = shop.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    shop.loop.run_pass()
    with reserve_all_but(shop, leaving=1000):
        second = shop.submit(make_request("Sort: 2", "go"))
        shop.wait(lambda: lacks_memory(second))
        shop.scheduler.cancel(second.ticket.job.id)
        shop.wait(lambda: second.is_over)
    assert isinstance(second.error, CancelledError)
    assert not first.is_over
    shop.scheduler.cancel(first.ticket.job.id)
    shop.finish(first)
    shop.check_idle()


def test_an_expert_that_nobody_can_make_room_for_is_refused(shop: EngineHarness) -> None:
    with reserve_all_but(shop, leaving=1000):
        job = shop.answer(make_request("Sort: 2", "go"))
    assert isinstance(job.error, BudgetError)
    assert "acme/go" in job.error.message
    assert shop.answer(make_request("Sort: 2", "go")).results[0].generated.tokens
    shop.check_idle()


def test_an_idle_server_gives_up_wide_buffers_for_an_expert(shop: EngineHarness) -> None:
    shop.answer(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    wide = shop.runner.budget.reserved_bytes("buffers")
    with reserve_all_but(shop, leaving=1000):
        job = shop.answer(make_request("Sort: 2", "go", max_tokens=2))
        assert job.results[0].generated.tokens
        assert shop.runner.budget.reserved_bytes("buffers") < wide
    shop.check_idle()


def test_whoever_waits_for_memory_is_not_overtaken_for_ever(
    shop: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PATIENCE_SECONDS", 1e-9)
    first = shop.submit_until_ready(make_request("Sort: 1", max_tokens=ENDLESS_TOKENS))
    shop.loop.run_pass()
    with reserve_all_but(shop, leaving=1000):
        large = shop.submit(make_request("Sort: 2", "go"))
        shop.wait(lambda: lacks_memory(large))
        small = shop.submit(make_request("Sort: 3"))
        assert small.ticket.stage == "waiting"
    shop.step_until(lambda: small.ticket.stage != "waiting")
    assert large.ticket.planned is not None
    assert not lacks_memory(large)
    shop.scheduler.cancel(first.ticket.job.id)
    shop.finish(first, large, small)
    shop.check_idle()


def test_a_job_that_failed_is_kept_by_nobody(shop: EngineHarness) -> None:
    job = shop.answer(make_request("word " * 9000, "sql"))
    failed_id, job.ticket = job.ticket.job.id, shop.answer(make_request()).ticket
    gc.collect()  # who works keeps what they did last until the next job
    tickets = [one for one in gc.get_objects() if type(one) is RequestState]
    assert failed_id not in {ticket.job.id for ticket in tickets}
    assert isinstance(job.error, UsageError)  # the caller has it still


def test_a_plan_that_does_not_fit_is_answered_with_fewer_experts_which_is_told(
    house: HomeFixture,
) -> None:
    both = make_request("Sort: 1", "sql", "go")
    limit = least_budget(house, both) - 1
    fewer = adapt_batching(replace(SETTINGS, memory_budget=limit), on_budget="fewer")
    with open_engine_harness(house.home, adapt_batching(fewer, on_budget="queue")) as shop:
        assert isinstance(shop.answer(both).error, BudgetError)
    with open_engine_harness(house.home, fewer) as shop:
        [result] = shop.answer(both).results
        [dropped] = result.dropped
        [kept] = result.planned.result.plan.experts
        assert {dropped.ref, kept.ref} == {"acme/sql@1.0.0", "acme/go@1.0.0"}
        assert dropped.warning in result.warnings
        name = kept.ref.removeprefix("acme/").removesuffix("@1.0.0")
        [alone] = shop.answer(make_request("Sort: 1", name)).results
        assert alone.generated.tokens == result.generated.tokens
        assert shop.runner.budget.peak <= limit
        assert dict(shop.scheduler.totals.experts) == {kept.ref: 2}


def least_budget(house: HomeFixture, wanted: RunRequest) -> int:
    """The smallest budget that a server takes a request with."""
    with open_engine_harness(house.home) as shop:
        return shop.find_least_budget(wanted)
