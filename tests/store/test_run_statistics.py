"""What remembered runs come to, against counts made by hand."""

import sqlite3
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from expertctl.reference import Digest
from expertctl.store.catalogue import RunHistory
from expertctl.store.index_database import IndexDatabase
from expertctl.store.run_record import RunTimes
from expertctl.store.run_statistics import RunStatistics, RunSummary, local_day
from tests.store.fixtures import DAY, EXPERT_X, EXPERT_Y, NOW, make_run

TODAY = local_day(NOW)


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    return RunHistory(IndexDatabase(tmp_path / "index.db"), clock=lambda: NOW)


def make_statistics(history: RunHistory, *, days: int = 3, today: date = TODAY) -> RunStatistics:
    return RunStatistics.from_history(history, days=days, today=today)


def test_no_run_comes_to_nothing(history: RunHistory) -> None:
    empty = make_statistics(history)
    assert (empty.runs.jobs, empty.experts, empty.base_only.jobs) == ((), (), ())
    assert [day.day for day in empty.days] == [TODAY - timedelta(days=n) for n in (2, 1, 0)]
    assert (empty.runs.success, empty.runs.total_ms) == (None, None)


def test_runs_are_counted(history: RunHistory) -> None:
    times = [RunTimes(ttft=ms, total=10 * ms) for ms in (1.0, 2.0, 9.0)]
    for number, each in enumerate(times):
        history.record_run(make_run(number, times=each, validation="passed"))
    history.record_run(make_run(3, validation="failed"))
    history.record_run(make_run(4, finish_reason="error"))
    history.record_run(make_run(5, alone=True))
    history.rate_run(make_run(0).job_id, "bad")
    history.rate_run(make_run(5).job_id, "good")
    runs = make_statistics(history).runs
    assert len(runs.jobs) == 6
    assert (runs.good, runs.bad, runs.checked, runs.passed, runs.errors) == (1, 1, 4, 3, 1)
    assert (runs.first_token_ms, runs.total_ms) == (2.0, 20.0)
    assert runs.success == 3 / 5


def test_the_most_used_expert_is_first_and_counts_of_forgotten_runs_stay(
    history: RunHistory, tmp_path: Path
) -> None:
    for number in range(3):
        history.record_run(make_run(number, EXPERT_X, EXPERT_Y))
    history.record_run(make_run(3, EXPERT_Y))
    history.record_run(make_run(5, EXPERT_Y))
    with sqlite3.connect(tmp_path / "index.db") as database:
        database.execute("DELETE FROM job_experts WHERE number = 5")
        database.execute("DELETE FROM jobs WHERE number = 5")
    database.close()
    history.record_run(make_run(4, alone=True))
    history.rate_run(make_run(3).job_id, "good")
    y, x = make_statistics(history).experts
    assert (y.ref, y.uses, len(y.runs.jobs), y.last_used) == (EXPERT_Y.ref, 5, 4, NOW)
    assert (x.ref, x.uses, len(x.runs.jobs)) == (EXPERT_X.ref, 3, 3)
    assert y.success == pytest.approx(3 / 5)
    assert x.success is None
    assert len(make_statistics(history).base_only.jobs) == 1


def test_a_version_that_was_installed_again_is_one_row(history: RunHistory) -> None:
    again = replace(EXPERT_X, content_digest=Digest.compute(b"built again"))
    history.record_run(make_run(0, EXPERT_X, at=NOW - DAY))
    history.record_run(make_run(1, again, at=NOW))
    history.rate_run(make_run(0).job_id, "bad")
    [x] = make_statistics(history).experts
    assert (x.ref, x.content_digest) == (EXPERT_X.ref, again.content_digest)
    assert (x.uses, len(x.runs.jobs), x.runs.bad, x.last_used) == (2, 2, 1, NOW)
    assert x.success is None, "what was said of other content says nothing of this one"


def test_a_run_that_only_failed_names_its_expert_without_a_use(history: RunHistory) -> None:
    history.record_run(make_run(1, finish_reason="error"))
    [x] = make_statistics(history).experts
    assert (x.uses, x.last_used, x.runs.errors) == (0, None, 1)


def test_days_have_no_gap_and_end_today(history: RunHistory) -> None:
    for number, age in enumerate((0.0, 2.0, 2.0, 9.0)):
        history.record_run(make_run(number, at=NOW - age * DAY))
    days = make_statistics(history, days=4).days
    assert [len(day.runs.jobs) for day in days] == [0, 2, 0, 1]
    assert days[-1].day == TODAY


def test_runs_of_nothing_have_no_figures() -> None:
    assert (RunSummary(()).success, RunSummary(()).first_token_ms) == (None, None)
