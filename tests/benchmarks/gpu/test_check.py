"""The check of a GPU machine, rehearsed on the processor, and what its page says of failures."""

import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check
from benchmarks.gpu.check import CheckRun, PartResult, format_page, make_document
from benchmarks.gpu.packages import ROOT
from benchmarks.harness import Row, judge

MACHINE = {
    "expertctl": "1.0", "python": "3.12.3", "torch": "2.11", "device": "A GPU", "memory": 8e9,
    "cuda": "13.0", "driver": None,
}  # fmt: skip
MISSED = judge(Row("decode", 1.0, "copy", 2.0, "GB/s", "higher", 0.5, None), ">= 0.7")
REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="assert 1 ==&#10; 2"/></testcase>
<testcase classname="tests.b" name="three"><skipped message="needs a device"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def run(tmp_path: Path) -> CheckRun:
    return CheckRun(Path(sys.executable), tmp_path, time.monotonic(), is_rehearsal=False)


def test_a_rehearsal_runs_every_part_and_judges_numerics_alone(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--rehearse", "--json", file],
        env={**os.environ, "PYTHON": sys.executable}, cwd=tmp_path, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert done.stdout == format_page(document) + "\n"
    assert "rehearsed on the processor" in done.stdout
    assert done.stdout.endswith("result: ok\n")
    assert done.stdout.count("\n") <= 60, "a page"
    parts = {part["name"]: part for part in document["parts"]}
    assert list(parts) == list(check.PART_SECONDS)
    assert parts["tests"]["outcome"].endswith(" skipped")
    assert [row["ok"] for row in parts["numerics"]["rows"]] == [True, True]
    for name, rows in (("qwen3-0.6b", 7), ("qwen3-4b", 7), ("routed", 1)):
        assert len(parts[name]["rows"]) == rows
        assert all(row["ok"] is None and row["ours"] > 0 for row in parts[name]["rows"])


def test_without_a_device_it_says_so_and_how_to_rehearse(
    run: CheckRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check.check_machine(run, ["tests"], None) == check.NO_DEVICE == 3
    said = capsys.readouterr()
    assert "sees no CUDA device" in said.err
    assert "--rehearse" in said.err
    assert said.out == ""


def test_a_part_that_fails_says_why_in_its_last_lines(
    run: CheckRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check.PART_SECONDS, "unknown", 60)
    found = run.run_part("unknown")
    assert (found.is_ok, found.outcome, found.rows) == (False, "failed with status 2", [])
    assert any("invalid choice: 'unknown'" in line for line in found.log)


def test_a_process_is_ended_at_its_limit_with_all_that_it_started(
    run: CheckRun, tmp_path: Path
) -> None:
    path = tmp_path / "locked"
    path.touch()
    child = f"import fcntl, signal; fcntl.flock(open({str(path)!r}), fcntl.LOCK_EX); signal.pause()"
    parent = f"import subprocess; subprocess.run({[sys.executable, '-c', child]!r})"
    status, _ = run.run_process([sys.executable, "-c", parent], 1)
    assert status is None
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the child has it


def test_a_part_is_not_started_when_no_time_is_left(tmp_path: Path) -> None:
    late = CheckRun(Path(sys.executable), tmp_path, time.monotonic() - 358, is_rehearsal=False)
    found = late.run_part("numerics")
    assert (found.outcome, found.is_ok) == ("not started: no time was left", False)


@pytest.mark.parametrize(
    ("status", "report", "outcome", "is_ok"),
    [
        (0, REPORT, "1 passed, 1 failed, 1 skipped", True),
        (1, REPORT, "1 passed, 1 failed, 1 skipped", False),
        (0, "<a><testcase><skipped/></testcase></a>", "1 skipped", False),
        (2, None, "failed with status 2", False),
        (None, None, "stopped at its limit", False),
    ],
)
def test_tests_are_judged_by_their_status_and_must_have_run(
    run: CheckRun, tmp_path: Path, status: int | None, report: str | None, outcome: str, is_ok: bool
) -> None:
    path = tmp_path / "tests.report"
    if report is not None:
        path.write_text(report)
    assert run._judge("tests", path, status) == (outcome, is_ok, [])


def test_failing_tests_are_named_with_their_message(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text(REPORT)
    assert check.read_failures(path) == ["tests.a::two: assert 1 == 2"]


def test_tests_of_devices_are_found_by_their_mark(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("@pytest.mark.gpu\ndef test(): ...\n")
    (tmp_path / "test_b.py").write_text("def test(): ...\n")
    assert check.find_gpu_tests(tmp_path) == [tmp_path / "test_a.py"]
    assert ROOT / "tests/engine/torch/test_on_cuda.py" in check.find_gpu_tests(ROOT / "tests")


def page_of(*results: PartResult) -> str:
    document: dict[str, Any] = make_document(MACHINE, results, seconds=100, rehearsal=False)
    return format_page(json.loads(json.dumps(document)))


def test_a_page_names_missed_targets_and_what_failed() -> None:
    page = page_of(
        PartResult("tests", 140, "1 passed, 1 failed", False, 20.0, log=["tests.a::two: no"]),
        PartResult("qwen3-4b", 75, "1 missed", False, 30.0, [asdict(MISSED)]),
    )
    assert "A GPU, 8 GB, driver unknown" in page
    assert "tests          20.0 s of 140 s   1 passed, 1 failed" in page
    assert "missed: decode: 0.5, target >= 0.7" in page
    assert "  tests.a::two: no" in page
    assert page.endswith("result: not ok")


def test_a_page_of_good_parts_ends_well() -> None:
    assert page_of(PartResult("numerics", 30, "done", True, 3.0)).endswith("result: ok")
