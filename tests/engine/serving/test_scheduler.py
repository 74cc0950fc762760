"""Which job is in which stage, whoever says so and in whatever order."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.request import RunRequest
from expertctl.engine.result import BytesRead
from expertctl.engine.serving.request import (
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    LoadedPlan,
    RequestState,
)
from expertctl.engine.serving.scheduler import MAX_PREPARED_AHEAD, Scheduler
from expertctl.errors import (
    BudgetError,
    CancelledError,
    ExpertError,
    RateLimitError,
    TimedOutError,
)
from expertctl.routing.request import RouteRequest
from expertctl.user_request import UserMessage

REQUEST = RunRequest(message=UserMessage(prompt="?"), route=RouteRequest(prompt="?"))
ROWS, QUEUE = 2, 4


@dataclass(eq=False)
class QueuedCaller:
    """One who asked, what is pinned for the job, and what was told of it."""

    state: RequestState
    events: list[JobEvent]
    pinned: int = 0

    def pin(self) -> None:
        pins = ExitStack()
        self.pinned += 1
        pins.callback(self._unpin)
        self.state.memory = LoadedPlan(BASE_ONLY, pins, loads=0, bytes_moved=BytesRead())

    def _unpin(self) -> None:
        self.pinned -= 1


def caller(name: str = "one", **options: object) -> QueuedCaller:
    events = list[JobEvent]()
    job = replace(GenerationJob(id=name, request=REQUEST), **options)  # type: ignore[arg-type]  # by name
    return QueuedCaller(RequestState(job, events.append), events)


def entered(scheduler: Scheduler, name: str = "one", **options: object) -> QueuedCaller:
    one = caller(name, **options)
    scheduler.enqueue(one.state)
    return one


def ready(scheduler: Scheduler, name: str = "one") -> QueuedCaller:
    """A job that only waits for a row."""
    one = entered(scheduler, name)
    assert scheduler.take_next() is one.state
    scheduler.mark_loading(one.state)
    one.pin()
    scheduler.mark_ready(one.state)
    return one


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(queue=QUEUE, rows=ROWS)


def test_a_job_goes_from_stage_to_stage_and_its_end_is_told_once(scheduler: Scheduler) -> None:
    one = ready(scheduler)
    scheduler.mark_running(one.state)
    scheduler.release(one.state)
    for _ in range(2):
        scheduler.finish(one.state, JobFinished(()))
    assert one.events == [JobFinished(())]
    assert (one.pinned, scheduler.requests, scheduler.totals.finished) == (0, (), 1)
    scheduler.fail(one.state, ExpertError("late"))
    assert one.events == [JobFinished(())]
    assert scheduler.totals.failed == 0
    scheduler.check_integrity()


def test_no_more_are_prepared_than_there_may_soon_be_rows_for(scheduler: Scheduler) -> None:
    scheduler = Scheduler(queue=9, rows=ROWS)
    callers = [entered(scheduler, str(n)) for n in range(9)]
    prepared = [scheduler.take_next() for _ in range(9)]
    wanted = [one.state for one in callers[: MAX_PREPARED_AHEAD + ROWS]]
    assert [state for state in prepared if state is not None] == wanted
    scheduler.free_rows = 0
    for state in wanted[:3]:
        scheduler.fail(state, ExpertError("no"))
    nobody_yet = scheduler.take_next()
    assert nobody_yet is not None
    assert scheduler.take_next() is None


def test_a_job_that_ended_while_it_was_loaded_keeps_nothing_pinned(scheduler: Scheduler) -> None:
    one = entered(scheduler)
    scheduler.take_next()
    scheduler.mark_loading(one.state)
    scheduler.fail(one.state, ExpertError("the engine ended"))
    one.pin()
    scheduler.mark_ready(one.state)
    assert (one.pinned, list(scheduler.ready), scheduler.preparing_count) == (0, [], 0)
    scheduler.check_integrity()


def test_what_waits_is_called_off_at_once_and_what_runs_is_told_to_stop(
    scheduler: Scheduler,
) -> None:
    first, second = ready(scheduler, "first"), entered(scheduler, "second")
    for name in ("first", "second", "unknown"):
        scheduler.cancel(name)
    [failed] = second.events
    assert isinstance(failed, JobFailed)
    assert isinstance(failed.error, CancelledError)
    assert first.events == []
    assert first.state.find_stop_reason() == "cancelled"
    assert scheduler.totals.cancelled == 1
    scheduler.check_integrity()


def test_an_error_is_told_without_the_frames_that_it_came_through(scheduler: Scheduler) -> None:
    one = entered(scheduler)
    scheduler.take_next()
    try:
        try:
            raise ValueError("a foreign one")
        except ValueError as error:
            raise BudgetError("too much") from error
    except BudgetError as error:
        scheduler.fail(one.state, error)
    [failed] = one.events
    assert isinstance(failed, JobFailed)
    assert (failed.error.__traceback__, failed.error.__cause__) == (None, None)


def test_a_full_line_refuses_and_counts_it(scheduler: Scheduler) -> None:
    for number in range(QUEUE):
        entered(scheduler, str(number))
    with pytest.raises(RateLimitError, match="4 jobs are waiting"):
        entered(scheduler, "more")
    assert scheduler.totals.refused == 1
    scheduler.check_integrity()


def test_a_job_that_is_not_to_be_remembered_is_not_counted(scheduler: Scheduler) -> None:
    one = ready(scheduler)
    one.state.job = replace(one.state.job, remember=False)
    scheduler.mark_running(one.state)
    scheduler.finish(one.state, JobFinished(()))
    assert scheduler.totals.finished == 0
    assert one.events == [JobFinished(())]


class Boards(RuleBasedStateMachine):
    """All that callers, planner, loader and loop may do to a scheduler, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(queue=QUEUE, rows=ROWS)
        self.callers: list[QueuedCaller] = []
        self.counts = {"refused": 0, "failed": 0, "cancelled": 0, "finished": 0}
        self.asked: set[str] = set()
        self.given_up: list[QueuedCaller] = []
        """Those that ended while the loader had them."""

    def of(self, *stages: str) -> list[QueuedCaller]:
        return [one for one in self.callers if one.state.stage in stages]

    def one_of(self, data: st.DataObject, *stages: str) -> QueuedCaller:
        return data.draw(st.sampled_from(self.of(*stages)))

    def has(self, *stages: str) -> bool:
        return bool(self.of(*stages))

    @rule(priority=st.integers(0, 9), texts=st.integers(1, ROWS), owner=st.just("a"))
    def enter(self, priority: int, texts: int, owner: str) -> None:
        scheduler, name = self.scheduler, str(len(self.callers))
        one = caller(name, priority=priority, answers=texts, owner=owner)
        if scheduler.is_closing or self._has_no_place_for(owner):
            with pytest.raises(RateLimitError) as refused:
                scheduler.enqueue(one.state)
            assert 1 <= refused.value.retry_after <= 60
            self.counts["refused"] += 1
            return
        scheduler.enqueue(one.state)
        self.callers.append(one)

    @rule()
    def prepare(self) -> None:
        held = len(self.of("preparing", "loading", "ready"))
        waiting = [one.state for one in self.of("waiting")]
        state = self.scheduler.take_next()
        if not waiting or held >= MAX_PREPARED_AHEAD + self.scheduler.free_rows:
            assert state is None
            return
        assert state in waiting
        assert state.stage == "preparing"

    @precondition(lambda self: self.has("preparing"))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.scheduler.mark_loading(self.one_of(data, "preparing").state)
        assert self.scheduler.is_loading

    @precondition(lambda self: self.has("loading"))
    @rule(data=st.data())
    def find_too_little(self, data: st.DataObject) -> None:
        self.scheduler.mark_waiting_for_memory(self.one_of(data, "loading").state)

    @precondition(lambda self: self.has("loading"))
    @rule(data=st.data())
    def bring(self, data: st.DataObject) -> None:
        one = self.one_of(data, "loading")
        one.pin()
        self.scheduler.mark_ready(one.state)
        assert self.scheduler.ready[-1] is one.state

    @precondition(lambda self: self.given_up)
    @rule(data=st.data())
    def bring_in_vain(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.given_up))
        self.given_up.remove(one)
        one.pin()
        self.scheduler.mark_ready(one.state)

    @precondition(lambda self: self.has("ready"))
    @rule(data=st.data())
    def send_back(self, data: st.DataObject) -> None:
        one, freed = self.one_of(data, "ready"), self.scheduler.freed_count
        self.scheduler.requeue(one.state)
        assert self.scheduler.freed_count > freed  # who waits for memory looks again

    @precondition(lambda self: self.has("ready"))
    @rule()
    def begin(self) -> None:
        first = self.scheduler.ready[0]
        self.scheduler.mark_running(first)
        assert first.stage == "running"

    @rule(free=st.integers(0, ROWS))
    def count_rows(self, free: int) -> None:
        self.scheduler.free_rows = free

    @rule(data=st.data())
    def call_off(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([*self.callers, caller("unknown")]))
        waited = one.state.stage == "waiting" and one in self.callers
        self.scheduler.cancel(one.state.job.id)
        if waited:
            self.counts["cancelled"] += 1
            assert one.state.stage == "ended"

    @precondition(lambda self: self.has("preparing", "loading", "ready", "running"))
    @rule(data=st.data(), error=st.sampled_from([BudgetError, CancelledError, TimedOutError]))
    def fail(self, data: st.DataObject, error: type[ExpertError]) -> None:
        one = self.one_of(data, "preparing", "loading", "ready", "running")
        self._note_given_up(one)
        self.scheduler.fail(one.state, error("no"))
        self.counts["cancelled" if error is CancelledError else "failed"] += 1

    @precondition(lambda self: self.has("running", "concluding"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = self.one_of(data, "running", "concluding")
        one.state.stage = "concluding"
        self.scheduler.release(one.state)
        self.scheduler.finish(one.state, JobFinished(()))
        self.counts["cancelled" if one.state.is_cancelled else "finished"] += 1

    @precondition(lambda self: self.has("ended"))
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        one = self.one_of(data, "ended")
        self.scheduler.fail(one.state, ExpertError("late"))
        self.scheduler.finish(one.state, JobFinished(()))

    @rule()
    def close(self) -> None:
        self.counts["cancelled"] += len(self.of("waiting"))
        self.scheduler.close(seconds=0)
        assert not len(self.scheduler.queue)
        assert all(one.state.is_cancelled for one in self.callers if not one.events)

    @rule()
    def abandon(self) -> None:
        for one in self.callers:
            self._note_given_up(one)
        self.counts["failed"] += len([one for one in self.callers if not one.events])
        self.scheduler.fail_all(ExpertError("the engine ended"))
        assert self.scheduler.is_done

    def _has_no_place_for(self, owner: str) -> bool:
        """All places are taken, or the owner's share of them among those who ask."""
        self.asked.add(owner)
        waiting = [one.state.job.owner for one in self.of("waiting")]
        return len(waiting) == QUEUE or waiting.count(owner) >= QUEUE // len(self.asked)

    def _note_given_up(self, one: QueuedCaller) -> None:
        if one.state.stage == "loading":
            self.given_up.append(one)

    @invariant()
    def all_is_well(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.estimate_wait() >= 0

    @invariant()
    def who_is_here_has_heard_no_end_and_who_is_not_has_heard_one(self) -> None:
        here = set(map(id, self.scheduler.requests))
        for one in self.callers:
            assert len(one.events) == (id(one.state) not in here)
            assert (one.state.stage == "ended") == bool(one.events)

    @invariant()
    def only_who_is_ready_or_runs_has_anything_pinned(self) -> None:
        for one in self.callers:
            assert one.pinned == (one.state.memory is not None)
            assert one.pinned == (one.state.stage in {"ready", "running"})

    @invariant()
    def the_totals_are_what_was_seen(self) -> None:
        totals = self.scheduler.totals
        assert {name: getattr(totals, name) for name in self.counts} == self.counts


TestBoards = Boards.TestCase
