"""``expertctl feedback``: a person says whether an answer was good."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, cast

import typer

from expertctl.cli.output import JsonFlag, emit, warn
from expertctl.cli.piped import is_piped, read_text
from expertctl.cli.prompt_input import STDIN
from expertctl.errors import UsageError
from expertctl.settings import load_settings
from expertctl.store.catalogue import Catalogue
from expertctl.store.job import Job, UsedExpert, Verdict
from expertctl.store.success import SuccessRates

_HINT = "`expertctl feedback last good`; `expertctl stats` shows the runs"


def feedback(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB good|bad",
            help="The id of a run, its beginning, or last; - or none: it is piped, as an id or as "
            "what `run --json` prints. Then what the answer was.",
            show_default=False,
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Rate an answer as good or bad. The router learns from it; nothing leaves this machine.

    Example: expertctl feedback last good
    """
    job, verdict = _job_and_verdict(words)
    catalogue = Catalogue(load_settings().home.index)
    said = _judge(catalogue, job, verdict)
    warn(catalogue.notes)
    emit(_document(said), _text(said), as_json=as_json)


def _job_and_verdict(words: Sequence[str]) -> tuple[str, Verdict]:
    *jobs, verdict = words
    if len(jobs) > 1:
        message = f"{len(words)} words are given; feedback takes a run and good or bad"
        raise UsageError(message, hint=_HINT)
    if verdict not in ("good", "bad"):
        raise UsageError(f"{verdict[:40]!r} is neither good nor bad", hint=_HINT)
    job = jobs[0] if jobs and jobs[0] != STDIN else _piped_job()
    return job, cast(Verdict, verdict)


def _piped_job() -> str:
    """Return the id of a run that was piped: alone, or in what ``run --json`` prints.

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
        raise UsageError("it is not said which run is meant", hint=_HINT)
    return text


def parse_verdict(words: Sequence[str]) -> Verdict:
    """Read what a person says in a chat.

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


def verdict_text(catalogue: Catalogue, job: str, verdict: Verdict) -> str:
    """Record that an answer was good or bad; return the new rates of its experts.

    Raises:
        NotFoundError: when the run is not remembered.
        StoreError: when the file cannot be written.
        DiskFullError: when there is no space left.
    """
    return _text(_judge(catalogue, job, verdict))


@dataclass(frozen=True, slots=True)
class _Said:
    """A run that was judged, and the rates before and after."""

    job: Job
    before: SuccessRates
    after: SuccessRates

    def rates(self, used: UsedExpert) -> tuple[float | None, float | None]:
        """Return the rate of an expert at the task, before and after."""
        digest, task = used.content_digest, self.job.task
        return self.before.of(digest, task=task), self.after.of(digest, task=task)


def _judge(catalogue: Catalogue, job: str, verdict: Verdict) -> _Said:
    before = catalogue.success_rates()
    return _Said(catalogue.history.judge(job, verdict), before, catalogue.success_rates())


def _document(said: _Said) -> dict[str, object]:
    return {
        "job_id": said.job.job_id,
        "verdict": said.job.verdict,
        "task": said.job.task,
        "experts": [_expert_document(used, said) for used in said.job.experts],
    }


def _expert_document(used: UsedExpert, said: _Said) -> dict[str, object]:
    before, after = said.rates(used)
    return {
        "ref": used.ref,
        "content_digest": str(used.content_digest),
        "success_before": _rounded(before),
        "success": _rounded(after),
    }


def _text(said: _Said) -> str:
    head = f"job {said.job.job_id[:8]} was {said.job.verdict}"
    if not said.job.experts:
        return f"{head}; the base answered alone"
    return "\n".join([head, *(_expert_text(used, said) for used in said.job.experts)])


def _expert_text(used: UsedExpert, said: _Said) -> str:
    before, after = said.rates(used)
    told = f"success at {said.job.task} {_shown(after)}, before {_shown(before)}"
    return f"  {used.ref}: {told}"


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 4)


def _shown(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.2f}"
