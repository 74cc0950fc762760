"""Build the result of an answer: its context, stage timings, warnings and usage record.

The usage history records the experts of a run, its timings and the format check, never the prompt
or the answer. A failure to write it is reported as a warning and is never fatal.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from expertctl.engine.generation import GenerationOutput
from expertctl.engine.loaded_model import LoadedModel
from expertctl.engine.moe.counters import RoutedExpertStats
from expertctl.engine.preparation import PreparedRequest
from expertctl.engine.request import RunRequest
from expertctl.engine.result import BytesRead, GenerationTrace, MemoryUsage, RunResult, StageSpan
from expertctl.engine.text.answer_format import (
    FormatCheck,
    check_answer_format,
    expected_format,
    ignore_truncation,
)
from expertctl.errors import (
    DigestError,
    ExpertError,
    IncompatibleError,
    InvalidPackageError,
    UsageError,
)
from expertctl.routing.planner import PlannedPrompt
from expertctl.store.catalogue import Catalogue
from expertctl.store.run_record import (
    FINISH_ERROR,
    RunFigures,
    RunRecord,
    RunTimes,
    UsedExpert,
    ValidationResult,
)

if TYPE_CHECKING:
    from expertctl.engine.torch.compat_engine import CompatLoadedModel

POST_STAGE = "post"
"""The stage after the generation."""


class StageTimer:
    """Times the stages of a request in milliseconds."""

    def __init__(self) -> None:
        """Start the clock."""
        self._begun = self._last = time.perf_counter()
        self._laps: list[StageSpan] = []

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        """Intervals of the stages, in order; adjacent ones of the same stage are merged."""
        return tuple(self._laps)

    def end_stage(self, name: str) -> None:
        """End a stage, which started when the previous one ended."""
        began, now = self._last, time.perf_counter()
        if self._laps and (self._laps[-1].step, self._laps[-1].ended) == (name, began):
            began = self._laps.pop().began
        self._laps.append(StageSpan(name, began, now))
        self._last = now

    def restart_stage(self) -> None:
        """Start the next stage now; the time before it is reported separately."""
        self._last = time.perf_counter()

    def compute_timings(self, generated: GenerationOutput) -> dict[str, float]:
        """Return ``timings_ms``; ``ttft`` is the time from the request to the first token."""
        took: dict[str, float] = {}
        for lap in self._laps:
            took[lap.step] = took.get(lap.step, 0.0) + lap.ms
        before = (ms for name, ms in took.items() if name != POST_STAGE)
        return {
            **took,
            "prefill": generated.prefill_ms,
            "ttft": sum(before) + generated.first_token_ms,
            "decode": generated.decode_ms,
            "total": (time.perf_counter() - self._begun) * 1e3,
        }


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """All that one answer is generated with, while its resources are borrowed."""

    prepared: PreparedRequest
    loaded: "LoadedModel | CompatLoadedModel"
    loads: int
    """Number of experts that were read for it."""
    bytes_moved: BytesRead
    threads: int
    clock: StageTimer
    routed_before: RoutedExpertStats | None = None
    """Routed-expert statistics before this request."""
    routed_after: RoutedExpertStats | None = None
    """Routed-expert statistics at the end of this request; later requests may already have changed
    the live counters."""

    @property
    def moe(self) -> RoutedExpertStats | None:
        """Routed-expert statistics of this request; None where the base has no such experts."""
        now = self.loaded.routed if self.routed_after is None else self.routed_after
        return now if now is None or self.routed_before is None else now.since(self.routed_before)

    @property
    def bytes_read(self) -> BytesRead:
        """Bytes moved for this request, including routed experts read during the generation."""
        moe = self.moe
        return self.bytes_moved.add_file_bytes(0 if moe is None else moe.activity.read_bytes)


def _warn_threads_differ(request: RunRequest, context: GenerationContext) -> tuple[str, ...]:
    """Warn where results of numpy may depend on the thread count; those of kernels do not."""
    saved = request.saved.threads if request.saved else None
    if saved in {None, context.threads} or context.prepared.numerics.backend in {"packed", "cuda"}:
        return ()
    difference = f"the plan was saved by a run with {saved} threads, this one has {context.threads}"
    return (f"{difference}: the last bits of the numbers may differ",)


def _warn_context(prepared: PreparedRequest, generated: GenerationOutput) -> tuple[str, ...]:
    """Return the prompt's warnings, and one if the full context ended the answer."""
    prompt, wanted = prepared.prompt, prepared.planned.result.plan.params.max_tokens
    is_full = 0 < prompt.max_tokens < wanted
    if generated.finish_reason != "length" or not is_full:
        return prompt.warnings
    full = f"the answer ended because the context of {prompt.capacity} tokens is full"
    return (*prompt.warnings, full)


def _explain_base_only(planned: PlannedPrompt, request: RunRequest) -> tuple[str, ...]:
    """Explain why the base answers alone although that was not requested."""
    requested = request.route.base_alone or request.saved is not None
    return () if requested or planned.result.plan.experts else planned.result.notes


_EXPERT_ERRORS = (DigestError, IncompatibleError, InvalidPackageError)
"""Errors that an expert may have caused: the one that the message names."""


@contextmanager
def record_failures(planned: PlannedPrompt, catalogue: Catalogue) -> Iterator[None]:
    """Record a run that ends with an error, except for usage errors."""
    try:
        yield
    except ExpertError as error:
        record_failure(planned, catalogue, error)
        raise


def record_failure(planned: PlannedPrompt, catalogue: Catalogue, error: ExpertError) -> None:
    """Record that a run ended with an error, except for usage errors."""
    if not isinstance(error, UsageError):
        catalogue.history.record_run(_build_failed_job(planned, error))


def check_answer(generated: GenerationOutput, planned: PlannedPrompt, prompt: str) -> FormatCheck:
    """Check the format of an answer that was not cancelled; its end may be missing."""
    if generated.finish_reason in {"cancelled", "timeout"}:
        return FormatCheck(None)
    experts = [expert.manifest for expert in planned.experts]
    found = check_answer_format(generated.text, expected_format(prompt, experts))
    return ignore_truncation(found, finish_reason=generated.finish_reason)


def _build_failed_job(planned: PlannedPrompt, error: ExpertError) -> RunRecord:
    """Return the record of a failed run, with the experts that the error names, if any."""
    may_be_theirs = isinstance(error, _EXPERT_ERRORS)
    named = tuple(
        e for e in _list_used_experts(planned) if may_be_theirs and e.ref in error.message
    )
    return RunRecord(
        job_id=uuid.uuid4().hex,
        at=time.time(),
        task=planned.result.features.task,
        base=planned.base.name,
        experts=named or _list_used_experts(planned),
        finish_reason=FINISH_ERROR,
        blamed=bool(named),
    )


def _list_used_experts(planned: PlannedPrompt) -> tuple[UsedExpert, ...]:
    return tuple(UsedExpert(expert.ref, expert.digest) for expert in planned.experts)


def _name_validation(passed: bool | None) -> ValidationResult | None:
    if passed is None:
        return None
    return "passed" if passed else "failed"


def build_result(
    request: RunRequest,
    context: GenerationContext,
    generated: GenerationOutput,
    form: FormatCheck,
    memory: MemoryUsage,
    *,
    job_id: str | None = None,
    trace: GenerationTrace | None = None,
) -> RunResult:
    """Return the result of an answer; its total time ends here. Without ``job_id`` it gets one."""
    prepared = context.prepared
    return RunResult(
        job_id=job_id or uuid.uuid4().hex,
        planned=prepared.planned,
        dropped=prepared.dropped,
        generated=generated,
        validation_passed=form.passed,
        prompt_tokens=len(prepared.prompt.ids),
        timings_ms=context.clock.compute_timings(generated),
        memory=memory,
        experts_loaded=context.loads,
        kv_reused_tokens=context.loaded.reused,
        numerics=replace(prepared.numerics, kl_divergence=context.loaded.kl_divergence),
        threads=context.threads,
        warnings=(
            *prepared.planned.warnings,
            *(one.warning for one in prepared.dropped),
            *_explain_base_only(prepared.planned, request),
            *_warn_threads_differ(request, context),
            *request.message.warnings,
            *prepared.template.warnings,
            *form.warnings,
            *context.loaded.warnings,
            *_warn_context(prepared, generated),
        ),
        bytes_read=context.bytes_read,
        stage_spans=context.clock.spans,
        trace=trace,
        moe=context.moe,
    )


def record_result(
    result: RunResult, catalogue: Catalogue, *, notes: Callable[[], tuple[str, ...]] = tuple
) -> RunResult:
    """Record a run; return its result with warnings about data that could not be saved.

    ``notes`` returns further ones.
    """
    generated, planned, known = result.generated, result.planned, len(catalogue.notes)
    catalogue.history.record_run(
        RunRecord(
            job_id=result.job_id,
            at=time.time(),
            task=planned.result.features.task,
            base=planned.base.name,
            experts=_list_used_experts(planned),
            finish_reason=generated.finish_reason,
            validation=_name_validation(result.validation_passed),
            prompt_tokens=result.prompt_tokens,
            generated_tokens=len(generated.tokens),
            times=RunTimes(**{n: result.timings_ms.get(n) for n in RunTimes.__dataclass_fields__}),
            figures=RunFigures(
                prefill_ms=generated.prefill_ms,
                prefill_tokens=generated.prefill_tokens,
                kv_reused_tokens=result.kv_reused_tokens,
                decode_steps=generated.decode_steps,
                threads=result.threads,
                ssd_bytes=result.bytes_read.ssd,
                ram_bytes=result.bytes_read.ram,
            ),
        )
    )
    return replace(result, warnings=(*result.warnings, *catalogue.notes[known:], *notes()))
