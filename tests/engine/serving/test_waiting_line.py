"""Who is next: by priority, fairly among callers, and nobody waits for ever."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertctl.engine.serving.scheduler import AGING_SECONDS, SHARE_SECONDS, FairRequestQueue


@dataclass(frozen=True)
class QueuedJob:
    owner: str = "a"
    priority: int = 5
    cost: float = 1.0
    number: int = 0


def taken(line: FairRequestQueue[QueuedJob], *, now: float = 0.0) -> list[QueuedJob]:
    found = []
    while (job := line.take(now=now)) is not None:
        found.append(job)
    return found


def line_of(*jobs: QueuedJob, bound: int = 100) -> FairRequestQueue[QueuedJob]:
    line = FairRequestQueue[QueuedJob](bound)
    for job in jobs:
        assert line.add(job, now=0.0)
    return line


def test_the_highest_priority_is_served_first_and_equal_ones_as_they_came() -> None:
    jobs = [QueuedJob(priority=p, number=n) for n, p in enumerate((5, 9, 0, 9, 5))]
    assert [job.number for job in taken(line_of(*jobs))] == [1, 3, 0, 4, 2]


def test_one_caller_with_many_jobs_does_not_hold_up_another_with_one() -> None:
    jobs = [QueuedJob("greedy", number=n) for n in range(5)] + [QueuedJob("modest", number=9)]
    assert [job.number for job in taken(line_of(*jobs))] == [0, 9, 1, 2, 3, 4]


def test_jobs_of_more_answers_count_for_more() -> None:
    jobs = [
        QueuedJob("a", cost=3),
        QueuedJob("a", number=1),
        *(QueuedJob("b", number=n) for n in (2, 3, 4)),
    ]
    assert [job.number for job in taken(line_of(*jobs))] == [0, 2, 3, 4, 1]


def test_who_was_away_has_not_saved_up_turns() -> None:
    line = line_of(*(QueuedJob("a", number=n) for n in range(4)))
    assert [line.take(now=0.0) for _ in range(2)] == [
        QueuedJob("a", number=0),
        QueuedJob("a", number=1),
    ]
    for number in range(4, 8):
        line.add(QueuedJob("b", number=number), now=0.0)
    assert [job.owner for job in taken(line)] == ["b", "a", "b", "a", "b", "b"]


def test_a_job_that_waits_rises_until_it_is_next() -> None:
    line = line_of(QueuedJob("old", priority=0))
    line.add(QueuedJob("new", priority=9), now=9 * AGING_SECONDS - 1)
    assert [j.owner for j in taken(line, now=9 * AGING_SECONDS - 1)] == ["new", "old"]
    line = line_of(QueuedJob("old", priority=0))
    line.add(QueuedJob("new", priority=9), now=10 * AGING_SECONDS)
    assert [j.owner for j in taken(line, now=10 * AGING_SECONDS)] == ["old", "new"]


def test_a_long_line_of_one_caller_does_not_outgrow_the_turns_of_another() -> None:
    line = line_of(*(QueuedJob("many", number=n) for n in range(40)))
    for second in range(15):
        assert line.take(now=float(second)) is not None
    line.add(QueuedJob("one", number=99), now=15.0)
    assert line.take(now=15.0) == QueuedJob("one", number=99)


def test_a_job_rises_among_those_of_its_owner_however_often_others_of_them_are_served() -> None:
    line = line_of(QueuedJob("a", priority=0, number=0))
    for second in range(1, 200):
        assert line.add(QueuedJob("a", priority=9, number=second), now=float(second))
        job = line.take(now=float(second))
        assert job is not None
        if job.number == 0:
            break
    assert second == 9 * AGING_SECONDS


def test_who_asks_alone_has_all_places_and_of_two_each_has_half() -> None:
    line = FairRequestQueue[QueuedJob](8)
    added = [line.add(QueuedJob("many", number=n), now=0.0) for n in range(10)]
    assert added.count(True) == 8
    assert not line.add(QueuedJob("one"), now=1.0), "no place is free"
    for second in range(2, 6):
        assert line.take(now=float(second)) is not None
        assert not line.add(QueuedJob("many"), now=float(second)), "its share is half now"
    assert line.add(QueuedJob("one"), now=6.0)


def test_a_share_is_given_up_by_who_asks_no_more() -> None:
    line = FairRequestQueue[QueuedJob](8)
    assert line.add(QueuedJob("one"), now=0.0)
    later = [line.add(QueuedJob("many", number=n), now=SHARE_SECONDS - 1) for n in range(8)]
    assert later.count(True) == 4
    assert line.add(QueuedJob("many"), now=SHARE_SECONDS)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(4, 6)), min_size=1, max_size=24))
def test_how_many_are_ahead_is_about_how_many_are_served_before(
    asked: list[tuple[str, int]],
) -> None:
    jobs = [QueuedJob(owner, priority, number=n) for n, (owner, priority) in enumerate(asked)]
    line = line_of(*jobs)
    told = {job.number: line.count_ahead(job, now=0.0) for job in jobs}
    assert line.count_ahead(QueuedJob(number=-1), now=0.0) == len(jobs)
    for place, job in enumerate(taken(line)):
        assert abs(told[job.number] - place) <= 3, "others of its priority may be in its turn"


def test_who_is_next_has_nobody_ahead_however_many_wait() -> None:
    line = line_of(*(QueuedJob("many", number=n) for n in range(9)))
    first = next(iter(line))
    urgent = QueuedJob("one", priority=9, number=99)
    assert line.add(urgent, now=0.0)
    assert [line.count_ahead(job, now=0.0) for job in (urgent, first)] == [0, 1]


def test_a_job_that_is_removed_is_not_served() -> None:
    first, second = QueuedJob(number=1), QueuedJob(number=2)
    line = line_of(first, second)
    assert line.remove(first)
    assert not line.remove(first)
    assert taken(line) == [second]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=40))
def test_everybody_is_served_once_and_no_priority_before_a_higher_one(
    asked: list[tuple[str, int]],
) -> None:
    jobs = [QueuedJob(owner, priority, number=n) for n, (owner, priority) in enumerate(asked)]
    order = taken(line_of(*jobs))
    assert sorted(job.number for job in order) == list(range(len(jobs)))
    priorities = [job.priority for job in order]
    assert priorities == sorted(priorities, reverse=True)


class Lines(RuleBasedStateMachine):
    """Callers that come, go and give up."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.now, self.number = FairRequestQueue[QueuedJob](6), 0.0, 0
        self.here: list[QueuedJob] = []
        self.asked: dict[str, float] = {}

    @rule(owner=st.sampled_from("abcd"), priority=st.integers(0, 9), cost=st.integers(1, 4))
    def add(self, owner: str, priority: int, cost: int) -> None:
        self.number += 1
        job = QueuedJob(owner, priority, cost, self.number)
        self.asked[owner] = self.now
        lately = [one for one, at in self.asked.items() if self.now - at < SHARE_SECONDS]
        own = [other for other in self.here if other.owner == owner]
        fits = len(self.here) < 6 and len(own) < 6 // len(lately)
        assert self.line.add(job, now=self.now) == fits
        if fits:
            self.here.append(job)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        job = self.line.take(now=self.now)
        assert (job is None) == (not self.here)
        if job is not None:
            self.here.remove(job)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.here))
        assert self.line.remove(job)
        self.here.remove(job)

    @invariant()
    def all_are_there(self) -> None:
        self.line.check_integrity()
        assert list(self.line) == self.here
        assert self.line.is_full == (len(self.here) == 6)


TestLines = Lines.TestCase
