"""What the history of the home remembers of a run: which experts, how long, in what form.

Neither prompt nor answer is given to it. A failure to write is reported and never fatal.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from expertctl.engine.answer_form import Checked, checked, excuse_cut_answer, wanted_form
from expertctl.engine.generate import Generated
from expertctl.engine.run_result import BytesRead
from expertctl.errors import (
    DigestError,
    ExpertError,
    IncompatibleError,
    InvalidPackageError,
    UsageError,
)
from expertctl.routing.planner import Planned
from expertctl.store.catalogue import Catalogue
from expertctl.store.job import FAILED, Job, JobFigures, JobTimes, UsedExpert, Validation

_OF_EXPERTS = (DigestError, IncompatibleError, InvalidPackageError)
"""Errors that may be the fault of an expert: of the one that the message names."""


@contextmanager
def failures_of(planned: Planned, catalogue: Catalogue) -> Iterator[None]:
    """Remember that a run ended with an error; a call that was wrong never became one."""
    try:
        yield
    except ExpertError as error:
        record_failure(planned, catalogue, error)
        raise


def record_failure(planned: Planned, catalogue: Catalogue, error: ExpertError) -> None:
    """Remember that a run ended with an error, unless the call was wrong."""
    if not isinstance(error, UsageError):
        catalogue.history.record(_failed(planned, error))


def check_answer(generated: Generated, planned: Planned, prompt: str) -> Checked:
    """Check the form of an answer that was not stopped; its end may be missing."""
    if generated.finish_reason in {"cancelled", "timeout"}:
        return Checked(None)
    experts = [expert.manifest for expert in planned.experts]
    found = checked(generated.text, wanted_form(prompt, experts))
    return excuse_cut_answer(found, finish_reason=generated.finish_reason)


def record(
    catalogue: Catalogue,
    planned: Planned,
    generated: Generated,
    *,
    job_id: str,
    form: Checked,
    prompt_tokens: int,
    timings_ms: Mapping[str, float],
    figures: JobFigures | None = None,
) -> tuple[str, ...]:
    """Remember a run; return what could not be written, as notes."""
    known = len(catalogue.notes)
    catalogue.history.record(
        Job(
            job_id=job_id,
            at=time.time(),
            task=planned.result.features.task,
            base=planned.base.name,
            experts=_used(planned),
            finish_reason=generated.finish_reason,
            validation=_validation(form),
            prompt_tokens=prompt_tokens,
            generated_tokens=len(generated.tokens),
            times=_times(timings_ms),
            figures=figures,
        )
    )
    return tuple(catalogue.notes[known:])


def figures_of(
    generated: Generated, *, kv_reused_tokens: int, threads: int, bytes_read: BytesRead
) -> JobFigures:
    """Return what is remembered of how a run went."""
    return JobFigures(
        prefill_ms=generated.prefill_ms,
        prefill_tokens=generated.prefill_tokens,
        kv_reused_tokens=kv_reused_tokens,
        decode_steps=generated.decode_steps,
        threads=threads,
        ssd_bytes=bytes_read.ssd,
        ram_bytes=bytes_read.ram,
    )


def _failed(planned: Planned, error: ExpertError) -> Job:
    """Return a run that failed: with the experts that the error names, if any is to blame."""
    may_be_theirs = isinstance(error, _OF_EXPERTS)
    named = tuple(e for e in _used(planned) if may_be_theirs and e.ref in error.message)
    return Job(
        job_id=uuid.uuid4().hex,
        at=time.time(),
        task=planned.result.features.task,
        base=planned.base.name,
        experts=named or _used(planned),
        finish_reason=FAILED,
        blamed=bool(named),
    )


def _used(planned: Planned) -> tuple[UsedExpert, ...]:
    return tuple(UsedExpert(expert.ref, expert.digest) for expert in planned.experts)


def _validation(form: Checked) -> Validation | None:
    if form.passed is None:
        return None
    return "passed" if form.passed else "failed"


def _times(timings_ms: Mapping[str, float]) -> JobTimes:
    return JobTimes(**{name: timings_ms.get(name) for name in JobTimes.__dataclass_fields__})
