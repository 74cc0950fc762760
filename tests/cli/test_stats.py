"""``stats`` as a person types it: what it counts, how it is drawn, and how it is forgotten."""

import io
import sys
from datetime import date, datetime, time, timedelta
from pathlib import Path

import pytest

from expertctl.cli import app, stats
from expertctl.digest import Digest
from expertctl.schema.validation import find_problems
from expertctl.store.catalogue import Catalogue
from expertctl.store.run_record import RunFigures, RunTimes, UsedExpert
from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import EXPERT_X, EXPERT_Y, make_gain, make_run

__all__ = ["expertctl"]

TODAY = date.today() - timedelta(days=1)
"""No midnight passes within it, and all of it is over."""

FIGURES = RunFigures(
    prefill_ms=80.0,
    prefill_tokens=40,
    kv_reused_tokens=12,
    decode_steps=50,
    threads=2,
    ssd_bytes=9_000_000,
    ram_bytes=0,
)


def noon(days_ago: int = 0) -> float:
    return datetime.combine(TODAY - timedelta(days=days_ago), time(12)).timestamp()


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_get_today", lambda: TODAY)


@pytest.fixture
def catalogue(home: Path) -> Catalogue:
    return Catalogue(home / "index.db")


@pytest.fixture
def used(catalogue: Catalogue) -> Catalogue:
    """A home with five runs of the last three days."""
    times = RunTimes(ttft=40.0, total=300.0)
    for number, age in enumerate((2, 1, 0, 0)):
        experts = (EXPERT_X, EXPERT_Y) if number == 1 else (EXPERT_X,)
        catalogue.history.record_run(make_run(number, *experts, at=noon(age), times=times))
    slow = RunTimes(ttft=90.0, decode=400.0, total=12_000.0)
    catalogue.history.record_run(
        make_run(4, alone=True, at=noon(), validation="passed", times=slow, figures=FIGURES)
    )
    catalogue.history.rate_run(make_run(0).job_id, "good")
    return catalogue


def test_it_has_an_example(expertctl: CommandRunner) -> None:
    text = expertctl("stats", "--help").out
    assert "expertctl stats --days 30" in text.split("Example")[1]


def test_an_empty_home_has_no_runs_and_stays_empty(expertctl: CommandRunner, home: Path) -> None:
    said = expertctl("stats")
    assert (said.out, said.err) == ("", "no runs yet; try `expertctl run PROMPT`\n")
    document = expertctl("stats", "--days", "2", "--json").document
    assert find_problems(document, "stats") == []
    assert (document["runs"], document["experts"], len(document["days"])) == (0, [], 2)
    assert expertctl("stats", "--clear", "--json").document == {"cleared": 0}
    assert not home.exists()


def test_runs_are_drawn(expertctl: CommandRunner, used: Catalogue) -> None:
    lines = expertctl("stats", "--days", "4").out.splitlines()
    assert lines[0].endswith(", 1 good, 0 bad, format passed 1 of 1")
    assert lines[2].split() == ["EXPERT", "USES", "SUCCESS", "SAID", "FIRST", "TOTAL"]
    figures = ["0.60", "+1", "-0", "40", "ms", "300", "ms"]
    assert lines[3].split() == ["acme/x@1.0.0", "4", "█" * 22, *figures]
    assert lines[4].split()[:4] == ["acme/y@1.0.0", "1", "█████▌", "-"]
    assert lines[5].split()[-4:] == ["90", "ms", "12.0", "s"]
    assert lines[6].startswith("SUCCESS is smoothed: ")
    assert lines[8].startswith("4 days, ")
    assert lines[9] == "  runs    ·▃▃█  most 3"
    assert lines[10] == "  success ·█·█  of 1"
    assert lines[11] == "  total   ·███  most 300 ms"
    assert lines[13].split() == ["JOB", "WHEN", "SAID", "FORM", "TOKENS/S", "ANSWERED", "BY"]
    assert lines[14].split()[0] == make_run(4).job_id[:8]
    assert lines[14].endswith("  -     passed  125       base alone")
    assert lines[-1].endswith("acme/x@1.0.0")


def test_the_document_has_every_figure(expertctl: CommandRunner, used: Catalogue) -> None:
    used.history.record_gain(make_gain())
    document = expertctl("stats", "--json").document
    assert find_problems(document, "stats") == []
    assert (document["runs"], document["good"], document["checked"]) == (5, 1, 1)
    assert [(e["ref"], e["uses"], e["success"]) for e in document["experts"]] == [
        ("acme/x@1.0.0", 4, 0.6),
        ("acme/y@1.0.0", 1, None),
    ]
    assert document["base_alone"]["runs"] == 1
    assert [(gain["gain"], gain["sure"]) for gain in document["gains"]] == [(0.2, True)]
    assert [day["runs"] for day in document["days"][-3:]] == [1, 1, 3]
    assert [job["job_id"] for job in document["jobs"]] == [
        make_run(n).job_id for n in (4, 3, 2, 1, 0)
    ]
    newest, before = document["jobs"][:2]
    assert (newest["prefill_tokens_per_s"], newest["decode_tokens_per_s"]) == (500.0, 125.0)
    assert (newest["kv_reused_tokens"], newest["threads"], newest["ssd_bytes"]) == (
        12,
        2,
        9_000_000,
    )
    assert (before["decode_tokens_per_s"], before["threads"], before["ram_bytes"]) == (None,) * 3


def width_of(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("columns", [40, 60, 80, 132])
def test_no_line_is_wider_than_the_terminal(
    columns: int, expertctl: CommandRunner, used: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = UsedExpert("acme/a-longer-name@1.0.0", Digest.compute(b"long"))
    used.history.record_run(make_run(9, long, EXPERT_X, EXPERT_Y, at=noon()))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert width_of(expertctl("stats", "--days", "366").out) <= columns


def test_days_without_runs_are_said(expertctl: CommandRunner, catalogue: Catalogue) -> None:
    catalogue.history.record_run(make_run(1, at=noon(40)))
    assert "\nno runs in 14 days\n" in expertctl("stats").out


def test_many_experts_are_not_all_drawn(expertctl: CommandRunner, catalogue: Catalogue) -> None:
    for number in range(17):
        expert = UsedExpert(f"acme/e{number}@1.0.0", Digest.compute(str(number).encode()))
        catalogue.history.record_run(make_run(number, expert))
    assert "\nand 2 more experts: see --json\n" in expertctl("stats").out


def test_a_terminal_without_blocks_gets_ascii(
    used: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert app.run(["stats", "--days", "4"]) == 0
    shown.flush()
    text = shown.buffer.getvalue().decode("ascii")
    assert "\\u" not in text
    assert "\n  runs     --#  most 3\n" in text


def test_what_was_remembered_is_forgotten_when_it_is_asked_for(
    expertctl: CommandRunner, used: Catalogue
) -> None:
    assert expertctl("stats", "--clear").out == "deleted 5 runs\n"
    assert expertctl("stats", "--json").document["runs"] == 0
    assert used.read_success_rates().find_rate(EXPERT_X.content_digest) is None
    assert used.history.read_usage_counts().get(EXPERT_X.content_digest) is None


@pytest.mark.parametrize("days", ["0", "367", "x"])
def test_days_are_bounded(days: str, expertctl: CommandRunner) -> None:
    assert "--days" in expertctl("stats", "--days", days, exit_code=2).err


def test_a_damaged_history_is_told_and_begins_anew(
    expertctl: CommandRunner, used: Catalogue
) -> None:
    used.path.write_bytes(b"no database " * 500)
    said = expertctl("stats")
    assert "warning: " in said.err
    assert "was damaged" in said.err
    assert "no runs yet" in said.err


@pytest.mark.parametrize("name", ["acme/y", "acme/y@1.0.0"])
def test_one_expert_is_looked_at(name: str, expertctl: CommandRunner, used: Catalogue) -> None:
    document = expertctl("stats", name, "--json").document
    assert find_problems(document, "stats") == []
    assert (document["runs"], document["base_alone"]["runs"]) == (1, 0)
    assert [expert["ref"] for expert in document["experts"]] == ["acme/y@1.0.0"]
    assert "acme/x@1.0.0" not in expertctl("stats", name).out.split("JOB")[0]


def test_an_expert_without_a_run_is_not_found(expertctl: CommandRunner, used: Catalogue) -> None:
    said = expertctl("stats", "acne/x", exit_code=3)
    assert "error: no run of 'acne/x' is remembered\n\nhint: did you mean acme/x" in said.err
    said = expertctl("stats", "other/thing-of-another-kind", exit_code=3)
    assert "hint: `expertctl stats` shows all experts" in said.err


def test_only_all_runs_are_forgotten(expertctl: CommandRunner, used: Catalogue) -> None:
    said = expertctl("stats", "acme/x", "--clear", exit_code=2)
    assert "--clear deletes all runs" in said.err
    assert len(used.history.list_runs()) == 5
