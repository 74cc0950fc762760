"""``expertctl stats`` and ``feedback``: how experts were used, and user ratings of answers.

Statistics are shown as bars and sparklines of block characters, in ASCII where stdout cannot
encode them.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, cast

import typer

from expertctl.cli.completion import complete_experts
from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_count,
    format_table,
    note,
    terminal_width,
    warn,
)
from expertctl.cli.prompt_input import STDIN, is_piped, read_text
from expertctl.errors import UsageError
from expertctl.settings import load_settings
from expertctl.store.catalogue import MAX_RUNS, Catalogue
from expertctl.store.run_record import PairGain, RunRecord, SuccessRates, UsedExpert, UserVerdict
from expertctl.store.run_statistics import (
    MAX_NEWEST_RUNS,
    DayStatistics,
    ExpertStatistics,
    RunStatistics,
    RunSummary,
)

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-~=+*#"
NO_VALUE = "·"
_ASCII_NO_VALUE = " "
_DEFAULT_COLUMNS = 80


@dataclass(frozen=True, slots=True)
class TerminalCanvas:
    """The width of a terminal, and whether it can show block characters."""

    columns: int
    has_blocks: bool

    @classmethod
    def for_stdout(cls) -> "TerminalCanvas":
        """Return the canvas of stdout; for a pipe it is 80 columns wide."""
        width = terminal_width(sys.stdout) or _DEFAULT_COLUMNS
        return cls(width, _can_encode(_EIGHTHS + _LEVELS + NO_VALUE, sys.stdout.encoding))

    def draw_bar(self, share: float, width: int) -> str:
        """Draw a share of 1 as a bar of up to ``width`` characters, never empty above 0."""
        share = min(1.0, max(0.0, share))
        if not self.has_blocks:
            return "#" * max(round(share * width), int(share > 0))
        eighths = max(round(share * width * 8), int(share > 0))
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

    def draw_sparkline(self, values: Sequence[float | None], *, maximum: float) -> str:
        """Draw one character a value, as high as its share of the maximum; None is a dot."""
        levels = _LEVELS if self.has_blocks else _ASCII_LEVELS
        nothing = NO_VALUE if self.has_blocks else _ASCII_NO_VALUE
        top = len(levels) - 1
        return "".join(
            nothing if value is None else levels[min(top, int(value / maximum * top + 0.5))]
            for value in values
        )


def _can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_SHOWN_EXPERTS = 15
_SHOWN_JOBS = 5
_NARROWEST_BAR, _WIDEST_BAR = 4, 24
_NO_BAR = 46
"""Columns of a row besides its name and its bar."""
_RATE_NOTE = (
    "SUCCESS is smoothed: (good + 2) / (good + bad + 4), where older runs and format checks count "
    "less"
)
_LABEL = 10
"""Columns before a sparkline."""
_CAPTION = 16
"""Columns after a sparkline."""
_HEADER = ["EXPERT", "USES", "", "SUCCESS", "SAID", "FIRST", "TOTAL"]


def format_stats(tally: RunStatistics, canvas: TerminalCanvas) -> str:
    """Return all statistics; drawings are not wider than the canvas."""
    parts = [
        [_format_summary(tally.runs)],
        _format_experts(tally, canvas),
        _format_days(tally, canvas),
        _format_newest(tally),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _format_summary(runs: RunSummary) -> str:
    count = len(runs.jobs)
    parts = [f"{runs.good} good, {runs.bad} bad"] if runs.good + runs.bad else []
    form = [f"format passed {runs.passed} of {runs.checked}"] if runs.checked else []
    errors = [format_count(runs.errors, "error")] if runs.errors else []
    since = datetime.fromtimestamp(runs.jobs[-1].at).astimezone().date().isoformat()
    return ", ".join([f"{format_count(count, 'run')} since {since}", *errors, *parts, *form])


def _format_experts(tally: RunStatistics, canvas: TerminalCanvas) -> list[str]:
    shown, alone = tally.experts[:_SHOWN_EXPERTS], tally.base_only
    lines = [(each.ref, each.uses, each.success, each.runs) for each in shown]
    if alone.jobs:
        lines.append(("base alone", len(alone.jobs), None, alone))
    most = max(uses for _, uses, _, _ in lines)
    room = canvas.columns - _NO_BAR - max(len(name) for name, *_ in lines)
    bar = min(room, _WIDEST_BAR) if room >= _NARROWEST_BAR else 0
    rows = [
        [
            name,
            f"{uses:>4}",
            canvas.draw_bar(uses / most if most else 0.0, bar) if bar else "",
            "-" if success is None else f"{success:.2f}",
            *_format_run_figures(runs),
        ]
        for name, uses, success, runs in lines
    ]
    more = len(tally.experts) - len(shown)
    remainder = [f"and {format_count(more, 'more expert')}: see --json"] if more else []
    rated = any(success is not None for _, _, success, _ in lines)
    return [format_table(_HEADER, rows), *remainder, *([_RATE_NOTE] if rated else [])]


def _format_run_figures(runs: RunSummary) -> list[str]:
    verdicts = f"+{runs.good} -{runs.bad}" if runs.good + runs.bad else "-"
    return [
        verdicts,
        _format_milliseconds(runs.first_token_ms),
        _format_milliseconds(runs.total_ms),
    ]


def _format_days(tally: RunStatistics, canvas: TerminalCanvas) -> list[str]:
    """Draw the newest days that there is room for, one character each."""
    days = tally.days[-max(1, canvas.columns - _LABEL - _CAPTION) :]
    counts = [len(day.runs.jobs) for day in days]
    if not any(counts):
        return [f"no runs in {format_count(len(days), 'day')}"]
    totals = [day.runs.total_ms for day in days]
    slowest = max((ms for ms in totals if ms is not None), default=0.0)
    first, last = days[0].day.isoformat(), days[-1].day.isoformat()
    return [
        f"{format_count(len(days), 'day')}, {first} to {last}",
        _format_sparkline("runs", [n or None for n in counts], f"most {max(counts)}", canvas),
        _format_sparkline(
            "success", [day.runs.success for day in days], "of 1", canvas, maximum=1.0
        ),
        _format_sparkline("total", totals, f"most {_format_milliseconds(slowest)}", canvas),
    ]


def _format_sparkline(
    label: str,
    values: Sequence[float | None],
    caption: str,
    canvas: TerminalCanvas,
    *,
    maximum: float | None = None,
) -> str:
    top = maximum or max((value for value in values if value is not None), default=0.0) or 1.0
    return f"  {label.ljust(_LABEL - 2)}{canvas.draw_sparkline(values, maximum=top)}  {caption}"


def _format_newest(tally: RunStatistics) -> list[str]:
    rows = [_format_job(job) for job in tally.runs.jobs[:_SHOWN_JOBS]]
    header = ["JOB", "WHEN", "SAID", "FORM", "TOKENS/S", "ANSWERED BY"]
    return [format_table(header, rows, shorten=("ANSWERED BY",))]


def _format_job(job: RunRecord) -> list[str]:
    return [
        job.job_id[:8],
        datetime.fromtimestamp(job.at).astimezone().strftime("%m-%d %H:%M"),
        job.verdict or "-",
        job.validation or "-",
        _format_speed(job),
        " + ".join(used.ref for used in job.experts) or "base alone",
    ]


def _format_speed(job: RunRecord) -> str:
    return "-" if job.decode_tokens_per_s is None else f"{job.decode_tokens_per_s:.0f}"


def _format_milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.0f} ms"


_Document = dict[str, object]


def stats(
    ref: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="Only this expert.", autocompletion=complete_experts),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=366, help="How many days to draw.")] = 14,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete the history of runs and ratings.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show how often experts were used and how well they did. The data stays on this machine.

    Example: expertctl stats --days 30
    """
    catalogue = Catalogue(load_settings().home.index)
    if clear and ref is not None:
        raise UsageError(
            "--clear deletes all runs, not those of one expert", hint="expertctl stats --clear"
        )
    if clear:
        count = catalogue.history.clear()
        warn(catalogue.notes)
        emit({"cleared": count}, f"deleted {format_count(count, 'run')}", as_json=as_json)
        return
    tally = RunStatistics.from_history(catalogue.history, days=days, today=_get_today(), only=ref)
    gains = catalogue.history.list_gains()
    warn(catalogue.notes)
    if not tally.runs.jobs:
        note("no runs yet; try `expertctl run PROMPT`")
    text = format_stats(tally, TerminalCanvas.for_stdout()) if tally.runs.jobs else ""
    emit(_build_stats_document(tally, gains), text, as_json=as_json)


def _get_today() -> date:
    return datetime.now().astimezone().date()


def _build_stats_document(tally: RunStatistics, gains: Sequence[PairGain]) -> _Document:
    return {
        "kept": MAX_RUNS,
        **_build_runs_document(tally.runs),
        "base_alone": _build_runs_document(tally.base_only),
        "experts": [_build_expert_stats_document(expert) for expert in tally.experts],
        "days": [_build_day_document(day) for day in tally.days],
        "jobs": [_build_job_document(job) for job in tally.runs.jobs[:MAX_NEWEST_RUNS]],
        "gains": [_build_gain_document(gain) for gain in gains],
    }


def _build_runs_document(runs: RunSummary) -> _Document:
    return {
        "runs": len(runs.jobs),
        "errors": runs.errors,
        "good": runs.good,
        "bad": runs.bad,
        "checked": runs.checked,
        "passed": runs.passed,
        "first_token_ms": _round(runs.first_token_ms, 3),
        "total_ms": _round(runs.total_ms, 3),
    }


def _build_expert_stats_document(expert: ExpertStatistics) -> _Document:
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "uses": expert.uses,
        "last_used": _format_time(expert.last_used),
        "success": _round(expert.success, 4),
        **_build_runs_document(expert.runs),
    }


def _build_day_document(day: DayStatistics) -> _Document:
    return {"date": day.day.isoformat(), **_build_runs_document(day.runs)}


def _build_job_document(job: RunRecord) -> _Document:
    figures = job.figures
    return {
        "job_id": job.job_id,
        "at": _format_time(job.at),
        "task": job.task,
        "base": job.base,
        "experts": [used.ref for used in job.experts],
        "finish_reason": job.finish_reason,
        "validation_passed": None if job.validation is None else job.validation == "passed",
        "verdict": job.verdict,
        "prompt_tokens": job.prompt_tokens,
        "generated_tokens": job.generated_tokens,
        "first_token_ms": _round(job.times.ttft, 3),
        "total_ms": _round(job.times.total, 3),
        "prefill_tokens_per_s": _round(job.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": _round(job.decode_tokens_per_s, 2),
        "kv_reused_tokens": figures and figures.kv_reused_tokens,
        "threads": figures and figures.threads,
        "ssd_bytes": figures and figures.ssd_bytes,
        "ram_bytes": figures and figures.ram_bytes,
    }


def _build_gain_document(gain: PairGain) -> _Document:
    return {
        "first": str(gain.first),
        "second": str(gain.second),
        "base": gain.base,
        "gain": round(gain.gain, 4),
        "low": round(gain.low, 4),
        "high": round(gain.high, 4),
        "p": gain.p,
        "n": gain.n,
        "sure": gain.is_significant,
        "at": _format_time(gain.at),
    }


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _format_time(seconds: float | None) -> str | None:
    """Return a time as ISO 8601, with the UTC offset of this machine."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


_HINT = "`expertctl feedback last good`; `expertctl stats` shows the runs"


def feedback(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB good|bad",
            help="The id of a run, its first characters, or last; - or none reads it from stdin, "
            "as an id or as the output of `run --json`. Then the rating.",
            show_default=False,
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Rate an answer as good or bad. The router learns from it; nothing leaves this machine.

    Example: expertctl feedback last good
    """
    job, verdict = _parse_words(words)
    catalogue = Catalogue(load_settings().home.index)
    message = _save_verdict(catalogue, job, verdict)
    warn(catalogue.notes)
    emit(_build_feedback_document(message), _format_feedback(message), as_json=as_json)


def _parse_words(words: Sequence[str]) -> tuple[str, UserVerdict]:
    *jobs, verdict = words
    if len(jobs) > 1:
        message = f"feedback takes a run and good or bad, not {len(words)} words"
        raise UsageError(message, hint=_HINT)
    if verdict not in ("good", "bad"):
        raise UsageError(f"{verdict[:40]!r} is neither good nor bad", hint=_HINT)
    job = jobs[0] if jobs and jobs[0] != STDIN else _read_piped_job_id()
    return job, cast(UserVerdict, verdict)


def _read_piped_job_id() -> str:
    """Return the id of a run that was piped: alone, or in the output of ``run --json``.

    Raises:
        UsageError: when nothing was piped.
    """
    text = read_text("the run").strip() if is_piped() else ""
    with suppress(ValueError, RecursionError):
        document = json.loads(text)
        text = (
            str(document["job_id"]) if isinstance(document, dict) and "job_id" in document else text
        )
    if not text:
        raise UsageError("no run is named", hint=_HINT)
    return text


def parse_verdict(words: Sequence[str]) -> UserVerdict:
    """Parse the argument of ``/feedback`` in a chat.

    Raises:
        UsageError: when it is neither good nor bad.
    """
    match list(words):
        case ["good"]:
            return "good"
        case ["bad"]:
            return "bad"
        case _:
            raise UsageError("an answer is good or bad", hint="/feedback good")


def record_verdict(catalogue: Catalogue, job: str, verdict: UserVerdict) -> str:
    """Record that an answer was good or bad; return the new success rates of its experts.

    Raises:
        NotFoundError: when the run is not in the history.
        StoreError: when the file cannot be written.
        DiskFullError: when there is no space left.
    """
    return _format_feedback(_save_verdict(catalogue, job, verdict))


@dataclass(frozen=True, slots=True)
class _Judgement:
    """A rated run, and the success rates before and after."""

    job: RunRecord
    before: SuccessRates
    after: SuccessRates

    def compare_rates(self, used: UsedExpert) -> tuple[float | None, float | None]:
        """Return the rate of an expert at the task, before and after."""
        digest, task = used.content_digest, self.job.task
        return self.before.find_rate(digest, task=task), self.after.find_rate(digest, task=task)


def _save_verdict(catalogue: Catalogue, job: str, verdict: UserVerdict) -> _Judgement:
    before = catalogue.read_success_rates()
    return _Judgement(
        catalogue.history.rate_run(job, verdict), before, catalogue.read_success_rates()
    )


def _build_feedback_document(judgement: _Judgement) -> dict[str, object]:
    return {
        "job_id": judgement.job.job_id,
        "verdict": judgement.job.verdict,
        "task": judgement.job.task,
        "experts": [_build_expert_document(used, judgement) for used in judgement.job.experts],
    }


def _build_expert_document(used: UsedExpert, judgement: _Judgement) -> dict[str, object]:
    before, after = judgement.compare_rates(used)
    return {
        "ref": used.ref,
        "content_digest": str(used.content_digest),
        "success_before": _round(before, 4),
        "success": _round(after, 4),
    }


def _format_feedback(judgement: _Judgement) -> str:
    head = f"job {judgement.job.job_id[:8]} was rated {judgement.job.verdict}"
    if not judgement.job.experts:
        return f"{head}; the base answered alone"
    return "\n".join([head, *(_format_expert(used, judgement) for used in judgement.job.experts)])


def _format_expert(used: UsedExpert, judgement: _Judgement) -> str:
    before, after = judgement.compare_rates(used)
    rates = f"{_format_rate(after)}, before {_format_rate(before)}"
    return f"  {used.ref}: smoothed success rate at {judgement.job.task} {rates}"


def _format_rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.2f}"
