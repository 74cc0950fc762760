"""Runs, what is said of them, and what that makes of their experts."""

import multiprocessing
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import NotFoundError, UsageError
from expertctl.store.catalogue import MAX_RUNS, Catalogue, RunHistory
from expertctl.store.index_database import IndexDatabase
from expertctl.store.run_record import RunFigures, RunRecord, RunTimes, UsedExpert, UserVerdict
from tests.store.fixtures import DAY, EXPERT_X, EXPERT_Y, NOW, make_gain, make_run


class HistoryClock:
    """A time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HistoryClock:
    return HistoryClock()


@pytest.fixture
def history(tmp_path: Path, clock: HistoryClock) -> RunHistory:
    return RunHistory(IndexDatabase(tmp_path / "index.db"), clock=clock)


def job(
    number: int, *experts: UsedExpert, clock: HistoryClock, at: float | None = None, **said: Any
) -> RunRecord:
    return make_run(number, *experts, at=clock.now if at is None else at, **said)


def rate(
    history: RunHistory, expert: UsedExpert = EXPERT_X, task: str | None = None
) -> float | None:
    return history.read_success_rates().find_rate(expert.content_digest, task=task)


FIGURES = RunFigures(
    prefill_ms=12.5,
    prefill_tokens=10,
    kv_reused_tokens=2,
    decode_steps=9,
    threads=2,
    ssd_bytes=8_000_000,
    ram_bytes=4_000_000,
)


def judge(
    history: RunHistory, verdict: UserVerdict, *, number: int, clock: HistoryClock
) -> RunRecord:
    return history.rate_run(job(number, clock=clock).job_id, verdict)


def test_a_run_is_read_back_as_it_was(history: RunHistory, clock: HistoryClock) -> None:
    whole = job(
        1,
        EXPERT_X,
        EXPERT_Y,
        clock=clock,
        validation="passed",
        prompt_tokens=12,
        generated_tokens=30,
        times=RunTimes(route=1.5, load=2.5, ttft=3.5, decode=4.5, total=5.5),
        figures=FIGURES,
    )
    assert history.record_run(whole)
    assert history.record_run(job(2, clock=clock))
    assert history.list_runs() == [job(2, clock=clock), whole]


def test_how_fast_a_run_was_follows_from_its_figures(
    history: RunHistory, clock: HistoryClock
) -> None:
    history.record_run(job(1, clock=clock, times=RunTimes(decode=4.5), figures=FIGURES))
    [read] = history.list_runs()
    assert read.prefill_tokens_per_s == pytest.approx(10 / 0.0125)
    assert read.decode_tokens_per_s == pytest.approx(9 / 0.0045)
    one = replace(read, figures=replace(FIGURES, decode_steps=0, prefill_ms=0.0))
    assert (one.prefill_tokens_per_s, one.decode_tokens_per_s) == (None, None)
    unknown = replace(read, figures=None)
    assert (unknown.prefill_tokens_per_s, unknown.decode_tokens_per_s) == (None, None)


def test_runs_of_a_version_without_figures_are_read_and_stay(
    tmp_path: Path, clock: HistoryClock
) -> None:
    path = tmp_path / "index.db"
    RunHistory(IndexDatabase(path), clock=clock).record_run(job(1, clock=clock))
    with sqlite3.connect(path) as older:
        older.execute("DROP TABLE job_figures")
        older.execute("PRAGMA user_version = 1")
    older.close()
    catalogue = Catalogue(path)
    assert [each.figures for each in catalogue.history.list_runs()] == [None]
    catalogue.history.record_run(job(2, clock=clock, figures=FIGURES))
    assert [each.figures for each in catalogue.history.list_runs()] == [FIGURES, None]
    assert catalogue.history.rate_run("last", "good").figures == FIGURES
    assert catalogue.notes == []
    assert catalogue.find_problems() == []


def test_an_absent_history_is_empty_and_stays_absent(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "index.db")
    assert catalogue.history.list_runs() == []
    assert catalogue.find_sure_gains() == {}
    assert catalogue.read_success_rates().find_rate(EXPERT_X.content_digest, task="default") is None
    assert catalogue.read_revision() == 0
    assert catalogue.history.clear() == 0
    with pytest.raises(NotFoundError, match="no run is remembered") as told:
        catalogue.history.rate_run("last", "good")
    assert "expertctl run" in told.value.hint
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_yet_judged_has_no_rate(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, clock=clock))
    assert rate(history) is None
    assert history.read_usage_counts()[EXPERT_X.content_digest].uses == 1


def test_the_last_word_counts_once(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, clock=clock))
    assert judge(history, "good", number=1, clock=clock).verdict == "good"
    assert rate(history) == pytest.approx(3 / 5)
    for _ in range(3):
        judge(history, "good", number=1, clock=clock)
    assert rate(history) == pytest.approx(3 / 5)
    judge(history, "bad", number=1, clock=clock)
    assert rate(history) == pytest.approx(2 / 5)
    usage = history.read_usage_counts()[EXPERT_X.content_digest]
    assert (usage.uses, usage.successes, usage.failures) == (1, 0, 1)


def test_the_word_of_a_person_replaces_what_its_form_said(
    history: RunHistory, clock: HistoryClock
) -> None:
    history.record_run(job(1, clock=clock, validation="failed"))
    assert rate(history) == pytest.approx(2 / 4.5)
    judge(history, "good", number=1, clock=clock)
    assert rate(history) == pytest.approx(3 / 5)
    history.record_run(job(2, clock=clock, validation="passed"))
    assert rate(history) == pytest.approx(3.25 / 5.25)


def test_an_answer_that_was_cut_is_not_blamed_for_its_form(
    history: RunHistory, clock: HistoryClock
) -> None:
    history.record_run(job(1, clock=clock, validation="failed", finish_reason="length"))
    assert rate(history) is None


def test_the_experts_of_a_chain_share_a_word(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, EXPERT_X, EXPERT_Y, clock=clock))
    judge(history, "good", number=1, clock=clock)
    assert rate(history, EXPERT_X) == rate(history, EXPERT_Y) == pytest.approx(2.5 / 4.5)


def test_evidence_halves_in_thirty_days(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, clock=clock))
    judge(history, "bad", number=1, clock=clock)
    clock.now += 30 * DAY
    history.record_run(job(2, EXPERT_Y, clock=clock))
    assert rate(history) == pytest.approx(2 / 4.5)
    history.record_run(job(3, clock=clock))
    judge(history, "good", number=3, clock=clock)
    assert rate(history) == pytest.approx(3 / 5.5)


def test_a_word_on_an_old_run_counts_from_now_on(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, clock=clock))
    clock.now += 300 * DAY
    judge(history, "good", number=1, clock=clock)
    assert rate(history) == pytest.approx(3 / 5)
    clock.now += 30 * DAY
    judge(history, "bad", number=1, clock=clock)
    assert rate(history) == pytest.approx(2 / 5)


def test_a_clock_that_was_set_back_takes_and_gives_nothing(
    history: RunHistory, clock: HistoryClock
) -> None:
    history.record_run(job(1, clock=clock))
    judge(history, "good", number=1, clock=clock)
    clock.now -= 3000 * DAY
    history.record_run(job(2, clock=clock))
    assert rate(history) == pytest.approx(3 / 5)
    judge(history, "good", number=2, clock=clock)
    assert rate(history) == pytest.approx(4 / 6)


def test_what_an_expert_is_worth_depends_on_the_task(
    history: RunHistory, clock: HistoryClock
) -> None:
    for number in range(8):
        history.record_run(job(number, clock=clock, task="default"))
        judge(history, "good", number=number, clock=clock)
    for number in range(8, 16):
        history.record_run(job(number, clock=clock, task="translation"))
        judge(history, "bad", number=number, clock=clock)
    at_default, at_translation = rate(history, task="default"), rate(history, task="translation")
    assert rate(history) == pytest.approx(10 / 20)
    assert at_default == pytest.approx((8 + 4 * (2 / 12)) / 12)
    assert at_translation == pytest.approx(4 * (10 / 12) / 12)
    assert rate(history, task="classification") == rate(history)


def test_runs_are_named_by_their_beginning(history: RunHistory, clock: HistoryClock) -> None:
    for number, job_id in enumerate(("ab" + "0" * 30, "abc" + "0" * 29, "b" * 32)):
        history.record_run(job(number, clock=clock, job_id=job_id))
    assert history.rate_run("b", "good").job_id == "b" * 32
    assert history.rate_run("ABC", "good").job_id == "abc" + "0" * 29
    assert history.rate_run("ab" + "0" * 30, "good").job_id == "ab" + "0" * 30
    assert history.rate_run("last", "bad").job_id == "b" * 32
    with pytest.raises(UsageError, match="several runs begin with 'ab': ab00000000, abc0000000"):
        history.rate_run("ab", "good")


@pytest.mark.parametrize("name", ["c", "", "%", "b_", "bb' OR 1 = 1 --", "ß", "b" * 33, "\0"])
def test_a_run_that_is_not_there_is_not_found(
    name: str, history: RunHistory, clock: HistoryClock
) -> None:
    history.record_run(job(1, clock=clock, job_id="b" * 32))
    with pytest.raises(NotFoundError, match="is remembered") as told:
        history.rate_run(name, "good")
    assert "expertctl stats" in told.value.hint


def test_many_runs_that_begin_alike_are_not_all_listed(
    history: RunHistory, clock: HistoryClock
) -> None:
    for number in range(6):
        history.record_run(job(number, clock=clock, job_id=f"a{number}" + "0" * 30))
    with pytest.raises(UsageError, match=r"a00000000, a10000000, a20000000 and more"):
        history.rate_run("a", "good")


def test_the_last_run_is_one_that_answered(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, clock=clock))
    history.record_run(job(2, clock=clock, finish_reason="error"))
    assert history.rate_run("last", "good").job_id == job(1, clock=clock).job_id


def test_only_the_newest_runs_are_kept_and_their_evidence_stays(
    history: RunHistory, clock: HistoryClock
) -> None:
    history.record_run(job(0, clock=clock))
    judge(history, "good", number=0, clock=clock)
    rows = [(f"{number:032x}", clock.now, "default", "base", "stop") for number in range(MAX_RUNS)]

    history._database.write(
        lambda db: db.executemany(
            "INSERT INTO jobs (job_id, at, task, base, finish_reason, blamed, prompt_tokens, "
            "generated_tokens) VALUES (?, ?, ?, ?, ?, 0, 0, 0)",
            rows,
        ).connection.commit()
    )
    history.record_run(job(-1, clock=clock))
    jobs = history.list_runs()
    assert len(jobs) == MAX_RUNS
    assert jobs[0].job_id == job(-1, clock=clock).job_id
    with pytest.raises(NotFoundError):
        judge(history, "bad", number=0, clock=clock)
    assert rate(history) == pytest.approx(3 / 5)


def test_a_judgement_or_a_failure_changes_the_revision_and_a_plain_run_does_not(
    tmp_path: Path, clock: HistoryClock
) -> None:
    catalogue = Catalogue(tmp_path / "index.db")
    history = catalogue.history
    seen = [catalogue.read_revision()]

    def changed() -> bool:
        seen.append(catalogue.read_revision())
        return seen[-1] != seen[-2]

    history.record_run(job(1, clock=clock))
    history.record_run(job(2, clock=clock, validation="passed"))
    assert not changed()
    history.rate_run("last", "good")
    assert changed()
    history.rate_run("last", "good")
    assert not changed()
    history.record_run(job(3, clock=clock, validation="failed"))
    assert changed()
    history.record_run(job(4, clock=clock, finish_reason="error"))
    assert changed()
    history.record_gain(make_gain())
    assert changed()
    history.clear()
    assert changed()
    catalogue.path.unlink()
    catalogue.history.record_run(job(5, clock=clock, finish_reason="error"))
    assert changed()
    assert len(set(seen)) == 7


def test_another_process_sees_what_is_said(tmp_path: Path, clock: HistoryClock) -> None:
    catalogue = Catalogue(tmp_path / "index.db")
    catalogue.history.record_run(job(1, clock=clock))
    before = (
        catalogue.read_revision(),
        catalogue.read_success_rates().find_rate(EXPERT_X.content_digest),
    )

    def say() -> None:
        Catalogue(tmp_path / "index.db").history.rate_run("last", "good")

    other = multiprocessing.get_context("fork").Process(target=say)
    other.start()
    other.join(60)
    assert other.exitcode == 0
    assert catalogue.read_revision() != before[0]
    assert before[1] is None
    assert catalogue.read_success_rates().find_rate(EXPERT_X.content_digest) is not None


def test_many_processes_judge_without_losing_a_word(tmp_path: Path, clock: HistoryClock) -> None:
    history = Catalogue(tmp_path / "index.db").history
    for number in range(40):
        history.record_run(job(number, clock=clock, at=0.0))

    def say(first: int) -> None:
        own = RunHistory(IndexDatabase(tmp_path / "index.db"), clock=clock)
        for number in range(first, 40, 4):
            own.rate_run(job(number, clock=clock).job_id, "good")

    context = multiprocessing.get_context("fork")
    others = [context.Process(target=say, args=(first,)) for first in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    history = RunHistory(IndexDatabase(tmp_path / "index.db"), clock=clock)
    assert rate(history) == pytest.approx(42 / 44)
    assert history.read_usage_counts()[EXPERT_X.content_digest].successes == 40


def test_threads_and_processes_lose_no_run(tmp_path: Path, clock: HistoryClock) -> None:
    """A lock of SQLite is gone when anybody in its process closes another handle of the file."""

    def work(first: int) -> None:
        history = Catalogue(tmp_path / "index.db").history
        with ThreadPoolExecutor(3) as threads:
            numbers = range(first * 100, first * 100 + 30)
            assert all(threads.map(lambda n: history.record_run(job(n, clock=clock)), numbers))

    context = multiprocessing.get_context("fork")
    others = [context.Process(target=work, args=(first,)) for first in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    catalogue = Catalogue(tmp_path / "index.db")
    assert len(catalogue.history.list_runs()) == 90
    assert catalogue.history.read_usage_counts()[EXPERT_X.content_digest].uses == 90
    catalogue.check_integrity()


def test_a_run_that_was_killed_while_it_was_remembered_leaves_a_whole_history(
    tmp_path: Path, clock: HistoryClock
) -> None:
    """Kill writers at any moment: what they were told is there, is there."""
    path, said = tmp_path / "index.db", tmp_path / "said"

    def work(first: int) -> None:
        history = Catalogue(path).history
        with said.open("a") as told:
            for number in range(first, first + 10_000):
                assert history.record_run(job(number, clock=clock))
                told.write(f"{job(number, clock=clock).job_id}\n")
                told.flush()

    context = multiprocessing.get_context("fork")
    for turn in range(8):
        writer = context.Process(target=work, args=(turn * 10_000,))
        writer.start()
        while len(said.read_text().split() if said.exists() else ()) < 3 * (turn + 1):
            assert writer.is_alive()
        writer.kill()
        writer.join(60)
    catalogue = Catalogue(path)
    there = {each.job_id for each in catalogue.history.list_runs()}
    assert set(said.read_text().split()) <= there
    assert catalogue.notes == []
    catalogue.check_integrity()


def test_clearing_forgets_all_but_gains(history: RunHistory, clock: HistoryClock) -> None:
    history.record_run(job(1, clock=clock))
    history.record_run(job(2, clock=clock))
    judge(history, "good", number=1, clock=clock)
    history.record_gain(make_gain())
    assert history.clear() == 2
    assert history.list_runs() == []
    assert history.read_usage_counts() == {}
    assert rate(history) is None
    assert list(history.find_sure_gains()) == [(EXPERT_X.content_digest, EXPERT_Y.content_digest)]


def test_only_sure_gains_count(history: RunHistory) -> None:
    pair = (EXPERT_X.content_digest, EXPERT_Y.content_digest)
    history.record_gain(make_gain())
    assert history.find_sure_gains() == {pair: 0.2}
    history.record_gain(make_gain(base="other", gain=0.1, at=2.0))
    assert history.find_sure_gains() == {pair: 0.1}
    assert history.find_sure_gains(base="base") == {pair: 0.2}
    assert history.find_sure_gains(base="third") == {}
    history.record_gain(make_gain(low=-0.01, at=3.0))
    assert history.find_sure_gains(base="base") == {}
    history.record_gain(make_gain(p=0.06, at=4.0))
    assert history.find_sure_gains(base="base") == {}
    assert [each.at for each in history.list_gains()] == [4.0, 2.0]


def test_nobody_else_may_read_the_history(
    history: RunHistory, clock: HistoryClock, tmp_path: Path
) -> None:
    history.record_run(job(1, clock=clock))
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_of_an_older_version_gets_the_new_tables_and_keeps_its_own(
    tmp_path: Path, clock: HistoryClock
) -> None:
    with sqlite3.connect(tmp_path / "index.db") as old:
        old.execute(
            "CREATE TABLE usage (content_digest TEXT PRIMARY KEY, uses INTEGER, "
            "successes INTEGER, failures INTEGER, last_used FLOAT)"
        )
        old.execute("INSERT INTO usage VALUES (?, 7, 0, 0, 1.0)", [str(EXPERT_X.content_digest)])
    old.close()
    (tmp_path / "index.db").chmod(0o600)
    catalogue = Catalogue(tmp_path / "index.db")
    assert catalogue.history.list_runs() == []
    assert catalogue.read_revision() == 0
    assert catalogue.read_success_rates().find_rate(EXPERT_X.content_digest) is None
    assert catalogue.find_problems() == []
    catalogue.history.record_run(job(1, clock=clock))
    usage = catalogue.history.read_usage_counts().get(EXPERT_X.content_digest)
    assert usage is not None
    assert usage.uses == 8
    assert catalogue.notes == []
    catalogue.check_integrity()
