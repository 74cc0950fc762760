"""``expertctl stats``: how often experts were used, how well they did, how long it took."""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, counted, emit, note, warn
from expertctl.errors import UsageError
from expertctl.settings import load_settings
from expertctl.store.catalogue import Catalogue
from expertctl.store.history import KEPT_JOBS
from expertctl.store.job import Job
from expertctl.store.pair_gain import PairGain
from expertctl.store.tally import NEWEST, DayTally, ExpertTally, Runs, Tally

_Document = dict[str, object]


def stats(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="Only this expert.", show_default=False)
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=366, help="How many days to draw.")] = 14,
    clear: Annotated[bool, typer.Option("--clear", help="Forget all runs and judgements.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show how often experts were used and how well they did. It is known on this machine alone.

    Example: expertctl stats --days 30
    """
    catalogue = Catalogue(load_settings().home.index)
    if clear and ref is not None:
        raise UsageError(
            "--clear forgets all runs, not those of one expert", hint="expertctl stats --clear"
        )
    if clear:
        count = catalogue.history.clear()
        warn(catalogue.notes)
        emit({"cleared": count}, f"forgot {counted(count, 'run')}", as_json=as_json)
        return
    tally = Tally.of(catalogue.history, days=days, today=_today(), only=ref)
    gains = catalogue.history.pair_gains()
    warn(catalogue.notes)
    if not tally.runs.jobs:
        note("no runs yet; `expertctl run PROMPT` makes one")
    emit(_document(tally, gains), _text(tally), as_json=as_json)


def _today() -> date:
    return datetime.now().astimezone().date()


def _text(tally: Tally) -> str:
    from expertctl.cli.bars import Canvas
    from expertctl.cli.stats_view import stats_text

    return stats_text(tally, Canvas.of_stdout()) if tally.runs.jobs else ""


def _document(tally: Tally, gains: Sequence[PairGain]) -> _Document:
    return {
        "kept": KEPT_JOBS,
        **_runs(tally.runs),
        "base_alone": _runs(tally.alone),
        "experts": [_expert(expert) for expert in tally.experts],
        "days": [_day(day) for day in tally.days],
        "jobs": [_job(job) for job in tally.runs.jobs[:NEWEST]],
        "gains": [_gain(gain) for gain in gains],
    }


def _runs(runs: Runs) -> _Document:
    return {
        "runs": len(runs.jobs),
        "errors": runs.errors,
        "good": runs.good,
        "bad": runs.bad,
        "checked": runs.checked,
        "passed": runs.passed,
        "first_token_ms": _rounded(runs.first_token_ms, 3),
        "total_ms": _rounded(runs.total_ms, 3),
    }


def _expert(expert: ExpertTally) -> _Document:
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "uses": expert.uses,
        "last_used": _when(expert.last_used),
        "success": _rounded(expert.success, 4),
        **_runs(expert.runs),
    }


def _day(day: DayTally) -> _Document:
    return {"date": day.day.isoformat(), **_runs(day.runs)}


def _job(job: Job) -> _Document:
    figures = job.figures
    return {
        "job_id": job.job_id,
        "at": _when(job.at),
        "task": job.task,
        "base": job.base,
        "experts": [used.ref for used in job.experts],
        "finish_reason": job.finish_reason,
        "validation_passed": None if job.validation is None else job.validation == "passed",
        "verdict": job.verdict,
        "prompt_tokens": job.prompt_tokens,
        "generated_tokens": job.generated_tokens,
        "first_token_ms": _rounded(job.times.ttft, 3),
        "total_ms": _rounded(job.times.total, 3),
        "prefill_tokens_per_s": _rounded(job.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": _rounded(job.decode_tokens_per_s, 2),
        "kv_reused_tokens": figures and figures.kv_reused_tokens,
        "threads": figures and figures.threads,
        "ssd_bytes": figures and figures.ssd_bytes,
        "ram_bytes": figures and figures.ram_bytes,
    }


def _gain(gain: PairGain) -> _Document:
    return {
        "first": str(gain.first),
        "second": str(gain.second),
        "base": gain.base,
        "gain": round(gain.gain, 4),
        "low": round(gain.low, 4),
        "high": round(gain.high, 4),
        "p": gain.p,
        "n": gain.n,
        "sure": gain.is_sure,
        "at": _when(gain.at),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _when(seconds: float | None) -> str | None:
    """Return a time as ISO 8601, with the offset of this machine."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
