"""``expertctl feedback``: a person says whether an answer was good."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, emit, warn
from expertctl.errors import UsageError
from expertctl.settings import load_settings
from expertctl.store.catalogue import Catalogue
from expertctl.store.job import Job, UsedExpert, Verdict
from expertctl.store.success import SuccessRates


def feedback(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The id of a run, its beginning, or last.")
    ],
    verdict: Annotated[Verdict, typer.Argument(help="What the answer was.")],
    as_json: JsonFlag = False,
) -> None:
    """Say that an answer was good or bad. The router learns from it; nothing leaves this machine.

    Example: expertctl feedback last good
    """
    catalogue = Catalogue(load_settings().home.index)
    said = _judge(catalogue, job, verdict)
    warn(catalogue.notes)
    emit(_document(said), _text(said), as_json=as_json)


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
