"""``expertctl feedback``: a person says whether an answer was good."""

from typing import Annotated, Literal

import typer

from expertctl.cli.output import JsonFlag, emit, warn
from expertctl.settings import load_settings
from expertctl.store.catalogue import Catalogue
from expertctl.store.job import Job, UsedExpert
from expertctl.store.success import SuccessRates


def feedback(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The id of a run, its beginning, or last.")
    ],
    verdict: Annotated[Literal["good", "bad"], typer.Argument(help="What the answer was.")],
    as_json: JsonFlag = False,
) -> None:
    """Say that an answer was good or bad. The router learns from it; nothing leaves this machine.

    Example: expertctl feedback last good
    """
    catalogue = Catalogue(load_settings().home.index)
    before = catalogue.success_rates()
    judged = catalogue.history.judge(job, verdict)
    after = catalogue.success_rates()
    warn(catalogue.notes)
    emit(_document(judged, before, after), _text(judged, before, after), as_json=as_json)


def _document(job: Job, before: SuccessRates, after: SuccessRates) -> dict[str, object]:
    return {
        "job_id": job.job_id,
        "verdict": job.verdict,
        "task": job.task,
        "experts": [
            {
                "ref": used.ref,
                "content_digest": str(used.content_digest),
                "success_before": _rounded(before.of(used.content_digest, task=job.task)),
                "success": _rounded(after.of(used.content_digest, task=job.task)),
            }
            for used in job.experts
        ],
    }


def _text(job: Job, before: SuccessRates, after: SuccessRates) -> str:
    head = f"job {job.job_id[:8]} was {job.verdict}"
    if not job.experts:
        return f"{head}; the base answered alone"
    return "\n".join([head, *(_expert(used, job.task, before, after) for used in job.experts)])


def _expert(used: UsedExpert, task: str, before: SuccessRates, after: SuccessRates) -> str:
    was, now = (rates.of(used.content_digest, task=task) for rates in (before, after))
    return f"  {used.ref}: success at {task} {_shown(now)}, before {_shown(was)}"


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 4)


def _shown(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.2f}"
