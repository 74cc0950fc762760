"""Jobs that nobody waits for, in any order of events, and whom they are told to."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import JobFailed, JobFinished
from expertctl.errors import CancelledError, ExpertError, NotFoundError, TimedOutError
from expertctl.schema.strict_json import JsonObject
from expertctl.server.native.jobs import JobStore, StoredJob
from tests.server.harness import STARTED, make_finished

OWNERS = ("ada", "bob", "cleo")
Question = Callable[..., StoredJob]


def describe(event: JobFinished) -> JsonObject:
    return {"text": event.results[0].generated.text}


class JobStoreClock:
    """A clock that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ExpectedJob:
    """What a job must look like, kept by the plainest of means."""

    def __init__(self, owner: str, submitted: float) -> None:
        self.owner, self.submitted = owner, submitted
        self.status, self.text, self.size = "queued", "", 0
        self.ended: float | None = None


class Machine(RuleBasedStateMachine):
    """Submits, starts, ends, calls off, waits and asks, as three callers."""

    running = Bundle("running")
    jobs = Bundle("jobs")

    @initialize(seconds=st.integers(1, 50), count=st.integers(1, 4), size=st.integers(1, 6))
    def begin(self, seconds: int, count: int, size: int) -> None:
        self.seconds, self.count, self.most = seconds, count, 1200 * size
        self.clock = JobStoreClock()
        self.store = JobStore(
            kept_seconds=seconds, kept_per_owner=count, kept_bytes=self.most, clock=self.clock
        )
        self.told: dict[str, ExpectedJob] = {}
        self.ended: list[str] = []
        self.order: list[str] = []
        self.number = 0

    @rule(target=running, owner=st.sampled_from(OWNERS))
    def submit(self, owner: str) -> str:
        self.number += 1
        job_id = f"{self.number:032x}"
        self.store.add(job_id, owner=owner, submitted=self.clock(), describe=describe)
        self.told[job_id] = ExpectedJob(owner, self.clock())
        return job_id

    @rule(job_id=consumes(running))
    def refuse(self, job_id: str) -> None:
        """The engine did not take it."""
        self.store.drop(job_id)
        del self.told[job_id]

    @rule(job_id=running)
    def start(self, job_id: str) -> None:
        self.store.record_event(job_id, STARTED)
        told = self.told[job_id]
        told.status = "processing" if told.status == "queued" else told.status

    @rule(job_id=running, text=st.text("xü", max_size=5))
    def write(self, job_id: str, text: str) -> None:
        self.store.record_event(job_id, OutputDelta(0, text))
        self.told[job_id].text += text

    @rule(target=jobs, job_id=consumes(running), more=st.text("y", max_size=300))
    def finish(self, job_id: str, more: str) -> str:
        told = self.told[job_id]
        reason = "cancelled" if told.status == "cancelled" else "length"
        told.text += more
        self.store.record_event(job_id, make_finished(told.text, reason, job_id=job_id))
        return self._end(job_id, "finished")

    @rule(
        target=jobs, job_id=consumes(running), error=st.sampled_from([TimedOutError, ExpertError])
    )
    def fail(self, job_id: str, error: type[ExpertError]) -> str:
        self.store.record_event(job_id, JobFailed(error("no")))
        return self._end(job_id, "failed")

    @rule(target=jobs, job_id=consumes(running))
    def end_as_the_server_ends(self, job_id: str) -> str:
        self.store.record_event(job_id, JobFailed(CancelledError("the server ends")))
        return self._end(job_id, "cancelled")

    @rule(job_id=running)
    def call_off(self, job_id: str) -> None:
        told = self.told[job_id]
        told.status = "cancelled"
        self._compare(job_id, self.store.cancel(job_id, owner=told.owner))

    @rule(job_id=jobs)
    def call_off_what_is_over(self, job_id: str) -> None:
        self._ask(job_id, self.store.cancel)

    @rule(job_id=st.one_of(running, jobs))
    def ask(self, job_id: str) -> None:
        self._ask(job_id, self.store.find)

    @rule(job_id=st.one_of(running, jobs))
    def ask_as_somebody_else(self, job_id: str) -> None:
        told = self.told[job_id]
        other = next(owner for owner in OWNERS if owner != told.owner)
        for question in (self.store.find, self.store.cancel):
            with pytest.raises(NotFoundError) as foreign:
                question(job_id, owner=other)
            unknown = job_id[:-1] + "z"
            with pytest.raises(NotFoundError) as missing:
                question(unknown, owner=other)
            assert foreign.value.message.replace(job_id, unknown) == missing.value.message
            assert foreign.value.hint == missing.value.hint

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(job_id=jobs, text=st.text("z", min_size=1, max_size=3))
    def hear_too_late(self, job_id: str, text: str) -> None:
        """An event after the end changes nothing."""
        self.store.record_event(job_id, OutputDelta(0, text))
        self.store.record_event(job_id, make_finished(text))
        self._ask(job_id, self.store.find)

    @invariant()
    def what_ended_last_can_be_asked_for(self) -> None:
        """Whatever others collect: the last answer of each caller is there for its time."""
        if hasattr(self, "store"):
            last = {job.owner: job_id for job_id, job in self.by_end()}
            for owner, job_id in last.items():
                if not self._is_old(job_id):
                    assert self.store.find(job_id, owner=owner).id == job_id

    def by_end(self) -> Iterator[tuple[str, ExpectedJob]]:
        """All jobs that ended, kept or not, in that order."""
        return ((job_id, self.told[job_id]) for job_id in self.order)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()

    def _end(self, job_id: str, status: str) -> str:
        told = self.told[job_id]
        told.status = told.status if told.status == "cancelled" else status
        told.ended = self.clock()
        self.ended.append(job_id)
        self.order.append(job_id)
        kept = self.store.find(job_id, owner=told.owner)
        told.size = kept.size
        self._forget()
        return job_id

    def _forget(self) -> None:
        """Who is kept: the newest of each owner, as long as there is time and room.

        What is too old takes no room from others, so it goes first.
        """
        self.ended = [job_id for job_id in self.ended if not self._is_old(job_id)]
        while True:
            gone = next(self._superfluous(), None)
            if gone is None:
                return
            self.ended.remove(gone)

    def _superfluous(self) -> Iterator[str]:
        for owner in OWNERS:
            own = [job_id for job_id in self.ended if self.told[job_id].owner == owner]
            yield from own[: -self.count]
        if sum(self.told[job_id].size for job_id in self.ended) > self.most:
            yield from self._put_out()

    def _put_out(self) -> Iterator[str]:
        """The oldest of whoever takes most, of those that have more than one.

        Of two that take as much, the one whose oldest ended first.
        """
        own = {o: [each for each in self.ended if self.told[each].owner == o] for o in OWNERS}
        several = [ids for ids in own.values() if len(ids) > 1]
        if several:
            sizes = [sum(self.told[each].size for each in ids) for ids in several]
            largest = [ids for ids, size in zip(several, sizes, strict=True) if size == max(sizes)]
            oldest = {ids[0] for ids in largest}
            yield next(job_id for job_id in self.ended if job_id in oldest)

    def _is_old(self, job_id: str) -> bool:
        ended = self.told[job_id].ended
        return ended is not None and ended < self.clock() - self.seconds

    def _ask(self, job_id: str, question: Question) -> None:
        told = self.told[job_id]
        if told.ended is not None and (self._is_old(job_id) or job_id not in self.ended):
            with pytest.raises(NotFoundError):
                question(job_id, owner=told.owner)
        else:
            self._compare(job_id, question(job_id, owner=told.owner))

    def _compare(self, job_id: str, job: StoredJob) -> None:
        told = self.told[job_id]
        assert (job.status, job.text, job.submitted) == (told.status, told.text, told.submitted)
        assert job.ended == told.ended


TestJobs = Machine.TestCase
TestJobs.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_job_tells_its_text_as_it_comes_and_then_its_result() -> None:
    store = JobStore(clock=JobStoreClock())
    store.add("a" * 32, owner="ada", submitted=999.5, describe=describe)
    store.record_event("a" * 32, STARTED)
    store.record_event("a" * 32, OutputDelta(0, "1, "))
    store.record_event("a" * 32, OutputDelta(0, "2"))
    running = store.find("a" * 32, owner="ada")
    assert (running.status, running.text, running.result) == ("processing", "1, 2", None)
    assert (running.submitted, running.started, running.ended) == (999.5, 1000.0, None)
    store.record_event("a" * 32, make_finished("1, 2, 3"))
    over = store.find("a" * 32, owner="ada")
    assert (over.status, over.text, over.ended) == ("finished", "1, 2, 3", 1000.0)
    assert over.result is not None
    assert msgspec.json.decode(over.result) == {"text": "1, 2, 3"}


def test_a_job_that_is_called_off_keeps_what_came_of_it() -> None:
    store = JobStore(clock=JobStoreClock())
    store.add("a" * 32, owner="ada", submitted=1.0, describe=describe)
    assert store.cancel("a" * 32, owner="ada").status == "cancelled"
    store.record_event("a" * 32, make_finished("1, 2", "cancelled"))
    over = store.find("a" * 32, owner="ada")
    assert (over.status, over.text, over.error) == ("cancelled", "1, 2", None)


def test_who_collects_much_puts_out_nobody_else() -> None:
    store = JobStore(kept_bytes=20_000, clock=JobStoreClock())

    def end(job_id: str, owner: str, size: int) -> None:
        store.add(job_id, owner=owner, submitted=1.0, describe=describe)
        store.record_event(job_id, make_finished("x" * size, job_id=job_id))
        store.check_integrity()

    end("first", "ada", 10)
    for number in range(100):
        end(f"bulk-{number}", "bob", 500)
    end("second", "ada", 500)
    for job_id in ("first", "second"):
        assert store.find(job_id, owner="ada").status == "finished"
    assert store.find("bulk-99", owner="bob").status == "finished"
    with pytest.raises(NotFoundError):
        store.find("bulk-0", owner="bob")


def test_of_two_callers_with_equal_bytes_the_one_whose_answer_is_oldest_loses_it() -> None:
    store = JobStore(kept_bytes=3500, clock=JobStoreClock())
    for number, owner in enumerate(("cleo", "ada", "ada", "cleo")):
        store.add(str(number), owner=owner, submitted=1.0, describe=describe)
    for number, owner in ((2, "ada"), (0, "cleo"), (3, "cleo"), (1, "ada")):
        store.record_event(str(number), JobFailed(ExpertError("no")))
        assert store.find(str(number), owner=owner).ended is not None
    with pytest.raises(NotFoundError):
        store.find("2", owner="ada")
    for number, owner in ((0, "cleo"), (3, "cleo"), (1, "ada")):
        assert store.find(str(number), owner=owner).status == "failed"


def test_the_last_answer_is_kept_however_large_it_is() -> None:
    store = JobStore(kept_bytes=1000, clock=JobStoreClock())
    for number, owner in enumerate(OWNERS * 2):
        store.add(str(number), owner=owner, submitted=1.0, describe=describe)
        store.record_event(str(number), make_finished("x" * 5000, job_id=str(number)))
    store.check_integrity()
    for number, owner in enumerate(OWNERS, start=len(OWNERS)):
        assert store.find(str(number), owner=owner).text == "x" * 5000


def test_events_and_questions_from_many_threads_leave_it_in_order() -> None:
    store = JobStore(kept_per_owner=5)
    begin = threading.Barrier(4)

    def work(owner: int) -> None:
        begin.wait()
        for number in range(200):
            job_id, name = f"{owner}-{number}", f"owner-{owner % 2}"
            store.add(job_id, owner=name, submitted=0.0, describe=describe)
            store.record_event(job_id, OutputDelta(0, "x"))
            assert store.find(job_id, owner=name).text == "x"
            store.record_event(job_id, make_finished("xy"))
            store.check_integrity()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    store.check_integrity()
