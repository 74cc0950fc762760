"""What ``expertctl stats`` shows to a person: bars for experts, sparklines for days."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from expertctl.cli.bars import Canvas
from expertctl.cli.output import counted, table
from expertctl.store.job import Job
from expertctl.store.tally import Runs, Tally

_SHOWN_EXPERTS = 15
_SHOWN_JOBS = 5
_NARROWEST_BAR, _WIDEST_BAR = 4, 30
_SHORTEST_NAME, _LONGEST_NAME = 12, 48
_LABEL = 10
"""Columns before a sparkline."""
_TOLD = 16
"""Columns after a sparkline."""
_HEADER = ["EXPERT", "USES", "", "SUCCESS", "SAID", "FIRST", "TOTAL"]
_OPTIONAL = 4
"""Index of the first optional column; without room, the last ones are left out first."""
_CELL = 9
"""Width of an optional column, its gap included."""
_GAP = 2


def stats_text(tally: Tally, canvas: Canvas) -> str:
    """Return all statistics, no line wider than the canvas."""
    parts = [[_head(tally.runs)], _experts(tally, canvas), _days(tally, canvas), _newest(tally)]
    lines = "\n\n".join("\n".join(part) for part in parts if part).splitlines()
    return "\n".join(_cut(line, canvas.columns) for line in lines)


def _head(runs: Runs) -> str:
    count = len(runs.jobs)
    said = [f"{runs.good} good, {runs.bad} bad"] if runs.good + runs.bad else []
    form = [f"form held {runs.passed} of {runs.checked}"] if runs.checked else []
    errors = [counted(runs.errors, "error")] if runs.errors else []
    since = datetime.fromtimestamp(runs.jobs[-1].at).astimezone().date().isoformat()
    return ", ".join([f"{counted(count, 'run')} since {since}", *errors, *said, *form])


def _experts(tally: Tally, canvas: Canvas) -> list[str]:
    shown, alone = tally.experts[:_SHOWN_EXPERTS], tally.alone
    lines = [(each.ref, each.uses, each.success, each.runs) for each in shown]
    if alone.jobs:
        lines.append(("base alone", len(alone.jobs), None, alone))
    most = max(uses for _, uses, _, _ in lines)
    room = _Room.of(canvas, max(len(name) for name, *_ in lines))
    rows = [
        [
            _cut(name, room.name),
            f"{uses:>4}",
            canvas.bar(uses / most if most else 0.0, room.bar).ljust(room.bar),
            "-" if success is None else f"{success:.2f}",
            *_figures(runs),
        ][: room.cells]
        for name, uses, success, runs in lines
    ]
    more = len(tally.experts) - len(shown)
    told = [f"and {counted(more, 'more expert')}: see --json"] if more else []
    return [table(_HEADER[: room.cells], rows), *told]


def _figures(runs: Runs) -> list[str]:
    said = f"+{runs.good} -{runs.bad}" if runs.good + runs.bad else "-"
    return [said, _ms(runs.first_token_ms), _ms(runs.total_ms)]


@dataclass(frozen=True, slots=True)
class _Room:
    """How wide names and bars may be, and how many cells a row has."""

    name: int
    bar: int
    cells: int

    @classmethod
    def of(cls, canvas: Canvas, longest: int) -> Self:
        needed = sum(len(cell) + _GAP for cell in _HEADER[1:_OPTIONAL]) + _NARROWEST_BAR
        wanted = min(longest, _LONGEST_NAME)
        left = canvas.columns - needed - max(_SHORTEST_NAME, min(wanted, canvas.columns // 3))
        cells = min(len(_HEADER), _OPTIONAL + max(0, left) // _CELL)
        left = canvas.columns - needed - (cells - _OPTIONAL) * _CELL
        name = max(_SHORTEST_NAME, min(wanted, left))
        return cls(name, min(_WIDEST_BAR, _NARROWEST_BAR + max(0, left - name)), cells)


def _days(tally: Tally, canvas: Canvas) -> list[str]:
    """Draw the newest days that there is room for, one character each."""
    days = tally.days[-max(1, canvas.columns - _LABEL - _TOLD) :]
    counts = [len(day.runs.jobs) for day in days]
    if not any(counts):
        return [f"no runs in {counted(len(days), 'day')}"]
    totals = [day.runs.total_ms for day in days]
    slowest = max((ms for ms in totals if ms is not None), default=0.0)
    return [
        f"{counted(len(days), 'day')}, {days[0].day.isoformat()} to {days[-1].day.isoformat()}",
        _spark("runs", [n or None for n in counts], f"most {max(counts)}", canvas),
        _spark("success", [day.runs.success for day in days], "of 1", canvas, most=1.0),
        _spark("total", totals, f"most {_ms(slowest)}", canvas),
    ]


def _spark(
    label: str,
    values: Sequence[float | None],
    told: str,
    canvas: Canvas,
    *,
    most: float | None = None,
) -> str:
    top = most or max((value for value in values if value is not None), default=0.0) or 1.0
    return f"  {label.ljust(_LABEL - 2)}{canvas.spark(values, most=top)}  {told}"


def _newest(tally: Tally) -> list[str]:
    rows = [_job(job) for job in tally.runs.jobs[:_SHOWN_JOBS]]
    return [table(["JOB", "WHEN", "SAID", "FORM", "TOKENS/S", "ANSWERED BY"], rows)]


def _job(job: Job) -> list[str]:
    return [
        job.job_id[:8],
        datetime.fromtimestamp(job.at).astimezone().strftime("%m-%d %H:%M"),
        job.verdict or "-",
        job.validation or "-",
        _speed(job),
        " + ".join(used.ref for used in job.experts) or "base alone",
    ]


def _speed(job: Job) -> str:
    return "-" if job.decode_tokens_per_s is None else f"{job.decode_tokens_per_s:.0f}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.0f} ms"


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."
