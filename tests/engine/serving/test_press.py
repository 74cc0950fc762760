"""Texts begin and end between passes; what fails ends what it belongs to, and leaves nothing."""

import time
from typing import Any

import pytest

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.serving.house import AT_ONCE
from expertctl.engine.serving.job import Piece, Started
from expertctl.engine.serving.ticket import Ticket
from expertctl.engine.torch_backend import TorchModel
from expertctl.errors import BudgetError, CancelledError
from tests.engine.serving.workshop import (
    ENDLESS,
    Workshop,
    held_by_others,
    known,
    market,
    request,
    shop,
    workshop,
)
from tests.store.shop import House, fast, house

__all__ = ["fast", "house", "known", "market", "shop"]


class Clock:
    """The time that steps are measured by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_answer_has_the_time_from_its_job_to_its_own_first_token(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    other = shop.submit(request("Sort: 1", "go", max_tokens=ENDLESS))
    shop.turn_until(lambda: other.has_begun)
    clock.now = 2000.0
    job = shop.ready(request("Sort: 2", "sql", max_tokens=ENDLESS), texts=2)
    clock.now = 2001.0
    shop.turn_until(lambda: job.has_begun)
    clock.now = 2003.0
    shop.press.turn()  # there is one row for two answers
    shop.board.call_off(other.ticket.job.id)
    clock.now = 2007.0
    shop.press.turn()
    clock.now = 2011.0
    shop.turn_until(lambda: any(isinstance(e, Piece) and e.number for e in job.events))
    clock.now = 2020.0
    shop.board.call_off(job.ticket.job.id)
    shop.finish(other, job)
    first, second = (result.timings_ms for result in job.results)
    assert (first["ttft"], second["ttft"]) == (1_000.0, 11_000.0)
    assert (first["queue"], second["queue"]) == (1_000.0, 11_000.0)
    assert first["total"] == second["total"] == 20_000.0


def test_a_bug_in_a_pass_ends_the_texts_of_that_pass_and_no_other(shop: Workshop) -> None:
    texts = [shop.ready(request(f"Sort: {n}", "sql", max_tokens=ENDLESS)) for n in range(2)]
    shop.press.turn()
    waiting = shop.ready(request("Sort: 9", "go"))
    model = shop.press.batch._model

    class Broken:
        prefill_parts = 1

        def prefill(self, reading: Any, ids: Any, **_: Any) -> Any:
            return reading.prefill(ids)

        def step(self, _: Any) -> Any:
            raise ZeroDivisionError

    shop.press.batch._model = Broken()  # type: ignore[assignment]  # steps are all that is asked
    shop.turn_until(lambda: all(text.is_over for text in texts))
    shop.press.batch._model = model
    assert [text.error.message for text in texts] == ["the server failed to answer this"] * 2
    assert "ZeroDivisionError" in shop.told[-1]
    shop.finish(waiting)
    assert waiting.results[0].generated.tokens
    assert (shop.board.totals.failed, shop.board.totals.finished) == (2, 1)
    shop.check_idle()


def test_a_text_that_a_bug_keeps_from_beginning_ends_its_own_job(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = shop.ready(request("Sort: 1", "sql", max_tokens=ENDLESS))
    shop.press.turn()
    bad = shop.ready(request("Sort: 2", "go"))

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(TorchModel, "prepare", fail)
        shop.press.turn()
    assert bad.error.message == "the server failed to answer this"
    assert "a text could not begin" in shop.told[-1]
    assert not any(isinstance(event, Started) for event in bad.events)
    assert [text.ticket for text in shop.press.batch.texts] == [good.ticket]
    shop.board.call_off(good.ticket.job.id)
    shop.finish(good)
    assert good.results[0].generated.tokens
    shop.check_idle()


def test_keys_and_values_that_do_not_fit_beside_others_wait_until_those_end(
    shop: Workshop,
) -> None:
    first = shop.ready(request("Sort: 1", max_tokens=ENDLESS))
    shop.press.turn()
    second = shop.ready(request("Sort: 2", max_tokens=ENDLESS))
    with held_by_others(shop, leaving=1000):
        shop.press.turn()
        assert not second.events
        assert second.ticket.stage == "ready"
        shop.board.call_off(first.ticket.job.id)
        shop.turn_until(lambda: second.has_begun)
        assert first.ticket.ended
        shop.board.call_off(second.ticket.job.id)
        shop.finish(second)
    shop.check_idle()


def test_those_that_only_wait_give_back_what_is_pinned_for_them(shop: Workshop) -> None:
    first = shop.ready(request("Sort: 1", max_tokens=ENDLESS))
    second = shop.ready(request("Sort: 2", "go"))
    experts = shop.house.budget.held("experts")
    wanted = _bytes_to_begin(shop, first.ticket)
    with held_by_others(shop, leaving=wanted - 1):
        shop.press.turn()
        assert second.ticket.stage != "ready"
        shop.turn_until(lambda: bool(first.events))
        assert isinstance(first.events[0], Started)
        assert shop.house.budget.held("experts") < experts
        shop.board.call_off(first.ticket.job.id)
        shop.turn_until(lambda: first.is_over)
    shop.finish(second)
    assert second.results[0].generated.tokens
    shop.check_idle()


def test_what_fits_beside_nobody_is_refused_when_nothing_runs(shop: Workshop) -> None:
    alone = shop.ready(request("Sort: 1", max_tokens=ENDLESS))
    with held_by_others(shop, leaving=1000):
        shop.finish(alone)
    assert isinstance(alone.error, BudgetError)
    assert shop.answer(request("Sort: 2")).results[0].generated.tokens
    shop.check_idle()


def test_a_job_that_is_called_off_before_its_row_is_free_gets_none(shop: Workshop) -> None:
    one = shop.ready(request("Sort: 1", "sql"))
    shop.board.call_off(one.ticket.job.id)
    shop.press.turn()
    assert isinstance(one.error, CancelledError)
    assert shop.press.batch.texts == ()
    shop.check_idle()


def test_a_job_that_is_called_off_between_two_answers_ends_with_those_that_began(
    shop: Workshop,
) -> None:
    other = shop.ready(request("Sort: 1", max_tokens=ENDLESS))
    shop.press.turn()
    job = shop.ready(request("Sort: 2", "sql", max_tokens=ENDLESS), texts=2)
    shop.press.turn()
    for one in (job, other):
        shop.board.call_off(one.ticket.job.id)
    shop.finish(job, other)
    assert [result.generated.finish_reason for result in job.results] == ["cancelled"]
    shop.check_idle()


def test_answers_of_one_job_read_its_prompt_once(house: House) -> None:
    wanted = request("one two three four five " * 20, "sql")
    with workshop(house.home, torch_below=0) as shop:
        job = shop.answer(wanted, texts=4)
        first, *others = (result.generated.prefill_tokens for result in job.results)
        assert first == job.results[0].prompt_tokens > 2 * PAGE
        assert all(0 < read <= PAGE for read in others), "what fills no page is not shared"
        kept = shop.house.residents.keeper(shop.house.base.backend).kept_bytes
        assert kept == 0, "nobody asks with its key again"
        shop.check_idle()


def test_a_job_that_reads_for_its_other_answers_keeps_no_row_from_others(house: House) -> None:
    with workshop(house.home, torch_below=0) as shop:
        long = shop.ready(request("one two three four five " * 16, "sql"), texts=2)
        other = shop.ready(request("Sort: 2", "go"))
        shop.press.turn()
        assert [text.ticket for text in shop.press.batch.texts] == [long.ticket, other.ticket]
        shop.finish(long, other)


def test_a_job_that_is_called_off_ends_though_its_next_answer_lacks_memory(shop: Workshop) -> None:
    other = shop.ready(request("Sort: 2", "go", max_tokens=ENDLESS))
    shop.press.turn()
    job = shop.ready(request("Sort: 1", "go", max_tokens=ENDLESS), texts=2)
    wanted = _bytes_to_begin(shop, job.ticket)
    with held_by_others(shop, leaving=wanted + wanted // 2):
        shop.press.turn()
        shop.press.turn()
        assert (job.ticket.begun, job.ticket.stage) == (1, "ready")
        shop.board.call_off(job.ticket.job.id)
        shop.press.turn()
        shop.press.turn()
        shop.turn_until(lambda: job.is_over)
        assert not other.is_over
    shop.board.call_off(other.ticket.job.id)
    shop.finish(other)
    shop.check_idle()


def pages(shop: Workshop, count: int) -> int:
    """The bytes of so many pages."""
    return count * shop.house.base.kv_bytes(PAGE)


def test_texts_that_grow_take_memory_from_those_that_began_last(house: House) -> None:
    asked = [request(f"Sort: {n}", name, max_tokens=400) for n, name in enumerate(("sql", "go"))]
    with workshop(house.home, torch_below=0) as shop:
        alone = [shop.answer(one).results[0].generated.tokens for one in asked]
        assert all(len(tokens) > 2 * AT_ONCE for tokens in alone), "they grow"
        first, second = (shop.ready(one) for one in asked)
        shop.press.turn()
        with held_by_others(shop, leaving=pages(shop, 24)):
            shop.finish(first)
            assert shop.board.totals.paused >= 1
            assert not second.is_over
            shop.finish(second)
        together = [caller.results[0].generated for caller in (first, second)]
        assert [one.tokens for one in together] == alone
        assert [one.prefill_tokens for one in together] == [
            caller.results[0].prompt_tokens for caller in (first, second)
        ]
        shop.check_idle()


def test_a_text_that_pauses_ends_when_it_is_called_off(house: House) -> None:
    asked = [request(f"Sort: {n}", name, max_tokens=400) for n, name in enumerate(("sql", "go"))]
    with workshop(house.home, torch_below=0) as shop:
        first, second = (shop.ready(one) for one in asked)
        shop.press.turn()
        with held_by_others(shop, leaving=pages(shop, 24)):
            shop.turn_until(lambda: shop.board.totals.paused == 1)
            shop.board.call_off(second.ticket.job.id)
            shop.finish(second)
            assert second.results[0].generated.finish_reason == "cancelled"
            assert len(second.results[0].generated.tokens) >= AT_ONCE
            assert not first.is_over
            shop.finish(first)
        shop.check_idle()


def test_nobody_begins_while_a_text_pauses(house: House) -> None:
    asked = [request(f"Sort: {n}", name, max_tokens=400) for n, name in enumerate(("sql", "go"))]
    with workshop(house.home, torch_below=0) as shop:
        first, second = (shop.ready(one) for one in asked)
        shop.press.turn()
        with held_by_others(shop, leaving=pages(shop, 24)):
            shop.turn_until(lambda: shop.board.totals.paused == 1)
            third = shop.submit(request("Sort: 9", "go", max_tokens=2))
            shop.finish(first)
            assert not third.has_begun
            shop.finish(second, third)
        shop.check_idle()


def _bytes_to_begin(shop: Workshop, ticket: Ticket) -> int:
    """What a text takes when it begins: its keys and values, and wider buffers."""
    base, rows = shop.house.base, shop.house.settings.rows
    assert ticket.prepared is not None
    capacity = ticket.prepared.prompt.capacity
    wider = base.buffer_bytes(capacity, rows=rows) - shop.house.budget.held("buffers")
    return base.kv_bytes(capacity) + wider
