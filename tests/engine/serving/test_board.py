"""Which job is in which stage, whoever says so and in whatever order."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertctl.engine.compose import BASE_ALONE
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import BytesRead
from expertctl.engine.serving.board import AHEAD, Board
from expertctl.engine.serving.job import Event, Failed, Finished, Job
from expertctl.engine.serving.ticket import InMemory, Ticket
from expertctl.errors import (
    BudgetError,
    CancelledError,
    ExpertError,
    RateLimitError,
    TimedOutError,
)
from expertctl.routing.request import RouteRequest

REQUEST = RunRequest(message=UserMessage(prompt="?"), route=RouteRequest(prompt="?"))
ROWS, QUEUE = 2, 4
MODEL = None
"""No stage of a job asks the model anything."""


@dataclass(eq=False)
class Caller:
    """One who asked, what is pinned for the job, and what was told of it."""

    ticket: Ticket
    events: list[Event]
    pinned: int = 0

    def pin(self) -> None:
        pins = ExitStack()
        self.pinned += 1
        pins.callback(self._unpin)
        self.ticket.memory = InMemory(
            MODEL,  # type: ignore[arg-type]
            BASE_ALONE,
            pins,
            loads=0,
            moved=BytesRead(),
        )

    def _unpin(self) -> None:
        self.pinned -= 1


def caller(name: str = "one", **options: object) -> Caller:
    events = list[Event]()
    job = replace(Job(id=name, request=REQUEST), **options)  # type: ignore[arg-type]  # by name
    return Caller(Ticket(job, events.append), events)


def entered(board: Board, name: str = "one", **options: object) -> Caller:
    one = caller(name, **options)
    board.enter(one.ticket)
    return one


def ready(board: Board, name: str = "one") -> Caller:
    """A job that only waits for a row."""
    one = entered(board, name)
    assert board.next_to_prepare() is one.ticket
    board.loads(one.ticket)
    one.pin()
    board.is_ready(one.ticket)
    return one


@pytest.fixture
def board() -> Board:
    return Board(queue=QUEUE, rows=ROWS)


def test_a_job_goes_from_stage_to_stage_and_its_end_is_told_once(board: Board) -> None:
    one = ready(board)
    board.has_begun(one.ticket)
    board.give_back(one.ticket)
    for _ in range(2):
        board.finish(one.ticket, Finished(()))
    assert one.events == [Finished(())]
    assert (one.pinned, board.tickets, board.totals.finished) == (0, (), 1)
    board.fail(one.ticket, ExpertError("late"))
    assert one.events == [Finished(())]
    assert board.totals.failed == 0
    board.check_integrity()


def test_no_more_are_prepared_than_there_may_soon_be_rows_for(board: Board) -> None:
    board = Board(queue=9, rows=ROWS)
    callers = [entered(board, str(n)) for n in range(9)]
    prepared = [board.next_to_prepare() for _ in range(9)]
    wanted = [one.ticket for one in callers[: AHEAD + ROWS]]
    assert [ticket for ticket in prepared if ticket is not None] == wanted
    board.free_rows = 0
    for ticket in wanted[:3]:
        board.fail(ticket, ExpertError("no"))
    nobody_yet = board.next_to_prepare()
    assert nobody_yet is not None
    assert board.next_to_prepare() is None


def test_a_job_that_ended_while_it_was_loaded_keeps_nothing_pinned(board: Board) -> None:
    one = entered(board)
    board.next_to_prepare()
    board.loads(one.ticket)
    board.fail(one.ticket, ExpertError("the engine ended"))
    one.pin()
    board.is_ready(one.ticket)
    assert (one.pinned, list(board.ready), board.preparing) == (0, [], 0)
    board.check_integrity()


def test_what_waits_is_called_off_at_once_and_what_runs_is_told_to_stop(board: Board) -> None:
    first, second = ready(board, "first"), entered(board, "second")
    for name in ("first", "second", "unknown"):
        board.call_off(name)
    [failed] = second.events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, CancelledError)
    assert first.events == []
    assert first.ticket.stopped() == "cancelled"
    assert board.totals.cancelled == 1
    board.check_integrity()


def test_an_error_is_told_without_the_frames_that_it_came_through(board: Board) -> None:
    one = entered(board)
    board.next_to_prepare()
    try:
        try:
            raise ValueError("a foreign one")
        except ValueError as error:
            raise BudgetError("too much") from error
    except BudgetError as error:
        board.fail(one.ticket, error)
    [failed] = one.events
    assert isinstance(failed, Failed)
    assert (failed.error.__traceback__, failed.error.__cause__) == (None, None)


def test_a_full_line_refuses_and_counts_it(board: Board) -> None:
    for number in range(QUEUE):
        entered(board, str(number))
    with pytest.raises(RateLimitError, match="4 jobs wait already"):
        entered(board, "more")
    assert board.totals.refused == 1
    board.check_integrity()


def test_a_job_that_is_not_to_be_remembered_is_not_counted(board: Board) -> None:
    one = ready(board)
    one.ticket.job = replace(one.ticket.job, remember=False)
    board.has_begun(one.ticket)
    board.finish(one.ticket, Finished(()))
    assert board.totals.finished == 0
    assert one.events == [Finished(())]


class Boards(RuleBasedStateMachine):
    """All that callers, desk, loader and press may say to a board, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board(queue=QUEUE, rows=ROWS)
        self.callers: list[Caller] = []
        self.counts = {"refused": 0, "failed": 0, "cancelled": 0, "finished": 0}
        self.asked: set[str] = set()
        self.given_up: list[Caller] = []
        """Those that ended while the loader had them."""

    def of(self, *stages: str) -> list[Caller]:
        return [one for one in self.callers if one.ticket.stage in stages]

    def one_of(self, data: st.DataObject, *stages: str) -> Caller:
        return data.draw(st.sampled_from(self.of(*stages)))

    def has(self, *stages: str) -> bool:
        return bool(self.of(*stages))

    @rule(priority=st.integers(0, 9), texts=st.integers(1, ROWS), owner=st.just("a"))
    def enter(self, priority: int, texts: int, owner: str) -> None:
        board, name = self.board, str(len(self.callers))
        one = caller(name, priority=priority, texts=texts, owner=owner)
        if board.is_closing or self._has_no_place_for(owner):
            with pytest.raises(RateLimitError) as refused:
                board.enter(one.ticket)
            assert 1 <= refused.value.retry_after <= 60
            self.counts["refused"] += 1
            return
        board.enter(one.ticket)
        self.callers.append(one)

    @rule()
    def prepare(self) -> None:
        held = len(self.of("preparing", "loading", "ready"))
        waiting = [one.ticket for one in self.of("waiting")]
        ticket = self.board.next_to_prepare()
        if not waiting or held >= AHEAD + self.board.free_rows:
            assert ticket is None
            return
        assert ticket in waiting
        assert ticket.stage == "preparing"

    @precondition(lambda self: self.has("preparing"))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.board.loads(self.one_of(data, "preparing").ticket)
        assert self.board.is_loading

    @precondition(lambda self: self.has("loading"))
    @rule(data=st.data())
    def find_too_little(self, data: st.DataObject) -> None:
        self.board.waits_for_memory(self.one_of(data, "loading").ticket)

    @precondition(lambda self: self.has("loading"))
    @rule(data=st.data())
    def bring(self, data: st.DataObject) -> None:
        one = self.one_of(data, "loading")
        one.pin()
        self.board.is_ready(one.ticket)
        assert self.board.ready[-1] is one.ticket

    @precondition(lambda self: self.given_up)
    @rule(data=st.data())
    def bring_in_vain(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.given_up))
        self.given_up.remove(one)
        one.pin()
        self.board.is_ready(one.ticket)

    @precondition(lambda self: self.has("ready"))
    @rule(data=st.data())
    def send_back(self, data: st.DataObject) -> None:
        one, freed = self.one_of(data, "ready"), self.board.freed
        self.board.send_back(one.ticket)
        assert self.board.freed > freed  # who waits for memory looks again

    @precondition(lambda self: self.has("ready"))
    @rule()
    def begin(self) -> None:
        first = self.board.ready[0]
        self.board.has_begun(first)
        assert first.stage == "running"

    @rule(free=st.integers(0, ROWS))
    def count_rows(self, free: int) -> None:
        self.board.free_rows = free

    @rule(data=st.data())
    def call_off(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([*self.callers, caller("unknown")]))
        waited = one.ticket.stage == "waiting" and one in self.callers
        self.board.call_off(one.ticket.job.id)
        if waited:
            self.counts["cancelled"] += 1
            assert one.ticket.stage == "ended"

    @precondition(lambda self: self.has("preparing", "loading", "ready", "running"))
    @rule(data=st.data(), error=st.sampled_from([BudgetError, CancelledError, TimedOutError]))
    def fail(self, data: st.DataObject, error: type[ExpertError]) -> None:
        one = self.one_of(data, "preparing", "loading", "ready", "running")
        self._note_given_up(one)
        self.board.fail(one.ticket, error("no"))
        self.counts["cancelled" if error is CancelledError else "failed"] += 1

    @precondition(lambda self: self.has("running", "concluding"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = self.one_of(data, "running", "concluding")
        one.ticket.stage = "concluding"
        self.board.give_back(one.ticket)
        self.board.finish(one.ticket, Finished(()))
        self.counts["cancelled" if one.ticket.is_cancelled else "finished"] += 1

    @precondition(lambda self: self.has("ended"))
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        one = self.one_of(data, "ended")
        self.board.fail(one.ticket, ExpertError("late"))
        self.board.finish(one.ticket, Finished(()))

    @rule()
    def close(self) -> None:
        self.counts["cancelled"] += len(self.of("waiting"))
        self.board.close(seconds=0)
        assert not len(self.board.line)
        assert all(one.ticket.is_cancelled for one in self.callers if not one.events)

    @rule()
    def abandon(self) -> None:
        for one in self.callers:
            self._note_given_up(one)
        self.counts["failed"] += len([one for one in self.callers if not one.events])
        self.board.abandon(ExpertError("the engine ended"))
        assert self.board.is_done

    def _has_no_place_for(self, owner: str) -> bool:
        """All places are taken, or the owner's share of them among those who ask."""
        self.asked.add(owner)
        waiting = [one.ticket.job.owner for one in self.of("waiting")]
        return len(waiting) == QUEUE or waiting.count(owner) >= QUEUE // len(self.asked)

    def _note_given_up(self, one: Caller) -> None:
        if one.ticket.stage == "loading":
            self.given_up.append(one)

    @invariant()
    def all_is_well(self) -> None:
        self.board.check_integrity()
        assert self.board.expected_wait() >= 0

    @invariant()
    def who_is_here_has_heard_no_end_and_who_is_not_has_heard_one(self) -> None:
        here = set(map(id, self.board.tickets))
        for one in self.callers:
            assert len(one.events) == (id(one.ticket) not in here)
            assert (one.ticket.stage == "ended") == bool(one.events)

    @invariant()
    def only_who_is_ready_or_runs_has_anything_pinned(self) -> None:
        for one in self.callers:
            assert one.pinned == (one.ticket.memory is not None)
            assert one.pinned == (one.ticket.stage in {"ready", "running"})

    @invariant()
    def the_totals_are_what_was_seen(self) -> None:
        totals = self.board.totals
        assert {name: getattr(totals, name) for name in self.counts} == self.counts


TestBoards = Boards.TestCase
