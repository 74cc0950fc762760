"""What remembered runs come to, against counts made by hand."""

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.store.history import History
from expertctl.store.index_database import IndexDatabase
from expertctl.store.job import JobTimes
from expertctl.store.tally import Runs, Tally, day_of
from tests.store.jobs import DAY, NOW, X, Y, a_job

TODAY = day_of(NOW)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(IndexDatabase(tmp_path / "index.db"), clock=lambda: NOW)


def tally(history: History, *, days: int = 3, today: date = TODAY) -> Tally:
    return Tally.of(history, days=days, today=today)


def test_no_run_comes_to_nothing(history: History) -> None:
    empty = tally(history)
    assert (empty.runs.jobs, empty.experts, empty.alone.jobs) == ((), (), ())
    assert [day.day for day in empty.days] == [TODAY - timedelta(days=n) for n in (2, 1, 0)]
    assert (empty.runs.success, empty.runs.total_ms) == (None, None)


def test_runs_are_counted(history: History) -> None:
    times = [JobTimes(ttft=ms, total=10 * ms) for ms in (1.0, 2.0, 9.0)]
    for number, each in enumerate(times):
        history.record(a_job(number, times=each, validation="passed"))
    history.record(a_job(3, validation="failed"))
    history.record(a_job(4, finish_reason="error"))
    history.record(a_job(5, alone=True))
    history.judge(a_job(0).job_id, "bad")
    history.judge(a_job(5).job_id, "good")
    runs = tally(history).runs
    assert len(runs.jobs) == 6
    assert (runs.good, runs.bad, runs.checked, runs.passed, runs.errors) == (1, 1, 4, 3, 1)
    assert (runs.first_token_ms, runs.total_ms) == (2.0, 20.0)
    assert runs.success == 3 / 5


def test_the_most_used_expert_is_first_and_counts_of_forgotten_runs_stay(history: History) -> None:
    for number in range(3):
        history.record(a_job(number, X, Y))
    history.record(a_job(3, Y))
    history.count_use(Y.content_digest)
    history.record(a_job(4, alone=True))
    history.judge(a_job(3).job_id, "good")
    y, x = tally(history).experts
    assert (y.ref, y.uses, len(y.runs.jobs), y.last_used) == (Y.ref, 5, 4, NOW)
    assert (x.ref, x.uses, len(x.runs.jobs)) == (X.ref, 3, 3)
    assert y.success == pytest.approx(3 / 5)
    assert x.success is None
    assert len(tally(history).alone.jobs) == 1


def test_a_version_that_was_installed_again_is_one_row(history: History) -> None:
    again = replace(X, content_digest=Digest.of(b"built again"))
    history.record(a_job(0, X, at=NOW - DAY))
    history.record(a_job(1, again, at=NOW))
    history.judge(a_job(0).job_id, "bad")
    [x] = tally(history).experts
    assert (x.ref, x.content_digest) == (X.ref, again.content_digest)
    assert (x.uses, len(x.runs.jobs), x.runs.bad, x.last_used) == (2, 2, 1, NOW)
    assert x.success is None, "what was said of other content says nothing of this one"


def test_a_run_that_only_failed_names_its_expert_without_a_use(history: History) -> None:
    history.record(a_job(1, finish_reason="error"))
    [x] = tally(history).experts
    assert (x.uses, x.last_used, x.runs.errors) == (0, None, 1)


def test_days_have_no_gap_and_end_today(history: History) -> None:
    for number, age in enumerate((0.0, 2.0, 2.0, 9.0)):
        history.record(a_job(number, at=NOW - age * DAY))
    days = tally(history, days=4).days
    assert [len(day.runs.jobs) for day in days] == [0, 2, 0, 1]
    assert days[-1].day == TODAY


def test_runs_of_nothing_have_no_figures() -> None:
    assert (Runs(()).success, Runs(()).first_token_ms) == (None, None)
