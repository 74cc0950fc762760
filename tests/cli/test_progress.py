"""Progress bars on a terminal, and lines where there is none."""

import io
import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from expertctl.cli import progress
from expertctl.cli.progress import (
    StepBar,
    _build_amount_column,
    make_line_reporter,
    show_download,
    show_loading,
    show_progress,
)
from expertctl.settings import format_size


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, as_json, silent in [
        (Terminal(), False, False),
        (Terminal(), True, True),
        (io.StringIO(), False, True),
    ]:
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress("hashing", 10, as_json=as_json) as advance:
            advance(10)
        assert (stream.getvalue() == "") == silent


def test_a_bar_shows_no_question_marks_where_nobody_knows_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress("loading", None) as advance:
        advance(5_200_000_000)
    assert "5.2 GB" in stream.getvalue()
    assert "?" not in stream.getvalue().replace("?25", ""), "but in what hides the cursor"


@pytest.mark.parametrize(("completed", "told"), [(0, ""), (1, "1 byte"), (2_500_000, "2.5 MB")])
def test_a_bar_tells_no_size_before_the_first_byte(completed: int, told: str) -> None:
    task: Any = SimpleNamespace(completed=completed, fields={})
    assert str(_build_amount_column().render(task)) == told


def test_without_a_terminal_a_line_now_and_then_tells_the_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    report = make_line_reporter("evaluating", 400, clock=lambda: now)
    for number in range(1, 401):
        now = float(number)
        report(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 39
    assert lines[0] == "evaluating: 10 of 400, about 6 min left"
    assert lines[-1] == "evaluating: 390 of 400, about 10 s left"


def test_lines_about_a_download_name_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    report = make_line_reporter(
        "downloading", 4_000_000, clock=lambda: now, format_count=format_size
    )
    now = 10.0
    report(1_000_000)
    said = capsys.readouterr().err
    assert said == "downloading: 1.0 MB of 4.0 MB, about 30 s left\n"


def test_a_short_download_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show_download(10, as_json=True) as report:
        report(10)
    assert capsys.readouterr().err == ""


def test_hours_of_work_tell_fewer_lines_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    """60 lines in 600 s, then one each sixtieth: 61 / 60 to the power of n is 86400 / 600."""
    now = 0.0
    report = make_line_reporter("evaluating", 86_400 + 1, clock=lambda: now)
    for number in range(1, 86_401):
        now = float(number)
        report(1)
    expected = 60 + math.log(86_400 / 600, 61 / 60)
    assert expected - 10 < len(capsys.readouterr().err.splitlines()) <= expected


def test_the_first_answer_may_take_long(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    report = make_line_reporter("evaluating", 2, clock=lambda: now)
    for number in range(25):
        now = float(number)
        report(0)
    assert capsys.readouterr().err.splitlines() == ["evaluating: 0 of 2"] * 2


def test_what_is_done_quickly_tells_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    report = make_line_reporter("evaluating", 400, clock=lambda: 0.0)
    for _ in range(400):
        report(1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_how_many_kernels_are_compiled_beside_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_loading("loading", as_json=False) as bar:
        bar(2_500_000)
        bar.report_kernels(0, 0)
        for batch in (24, 2):
            for done in range(batch):
                bar.report_kernels(done, batch)
                bar(1_000_000)
            bar.report_kernels(batch, batch)
        bars = bar._bars
        assert bars is not None
        bars.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert all(re.search(f"compiling kernels .* {done} of 24 ", shown) for done in range(24))
    assert re.search("compiling kernels .* 1 of 2 ", shown)
    last = shown.rpartition("loading")[2]
    assert "compiling" not in last
    assert "28.5 MB" in last
    [loading] = bars.tasks
    assert not loading.finished, "its end is unknown"


def test_without_a_terminal_lines_count_the_kernels_of_each_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expertctl.cli.progress.LINE_SECONDS", 0.0)
    with show_loading("loading", as_json=False) as bar:
        for total in (3, 2):
            for done in range(total + 1):
                bar.report_kernels(done, total)
    lines = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "compiling kernels: 0 of 3",
        "compiling kernels: 1 of 3",
        "compiling kernels: 2 of 3",
        "compiling kernels: 0 of 2",
        "compiling kernels: 1 of 2",
    ]


def test_with_json_on_a_terminal_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_loading("loading", as_json=True) as bar:
        bar(1)
        bar.report_kernels(0, 2)
    assert stream.getvalue() == ""


def test_a_bar_of_the_prompt_takes_the_place_of_that_of_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_loading("loading", as_json=False) as bar:
        bar(2_500_000)
        for done in (0, 512, 700):
            bar.report_reading(done, 700)
            bar(0)
        bars = bar._bars
        assert bars is not None
        bars.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = shown.rpartition("reading the prompt")[2]
    assert "loading" not in last
    assert "700 of 700" in last
    with show_loading("loading", as_json=True) as silent:
        silent.report_reading(0, 700)


def test_steps_that_were_done_before_say_nothing_of_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    report = make_line_reporter(
        "training", 100, clock=lambda: now, before=60, describe=lambda: ", loss 0.500"
    )
    now = 10.0
    report(10)
    said = capsys.readouterr().err
    assert said == "training: 70 of 100, about 30 s left, loss 0.500\n"


def test_steps_are_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    bar = StepBar("training", as_json=False)
    for step in (41, 42, 43):
        bar(step, 50, f"loss {step / 100}")
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub("about .* left", "…", line) for line in lines] == [
        "training: 41 of 50, loss 0.41",
        "training: 42 of 50, …, loss 0.42",
        "training: 43 of 50, …, loss 0.43",
    ]


def test_steps_are_a_bar_with_its_text_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    bar = StepBar("training", as_json=False)
    bar(41, 50, "loss 0.41")
    bar(42, 50, "loss 0.42")
    bar.close()
    shown = stream.getvalue()
    assert "training, loss 0.42" in shown
    assert "42/50" in shown
