"""What an answer holds besides its text: why it ended, its usage, and an extension of our own.

The extension is the object ``expertctl``: which experts answered and why, how long it took, what
was checked. The published API has no place for it; its clients keep unknown fields.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from expertctl.engine.generate import FinishReason
from expertctl.engine.run_result import RunResult
from expertctl.routing.plan import Plan
from expertctl.server.documents import PlanDocument
from expertctl.server.unknown_fields import ignored_warning

EndReason = Literal["stop", "length", "tool_calls"]


class PromptTokens(Struct, frozen=True, kw_only=True):
    """Tokens of a prompt that were taken from what was kept."""

    cached_tokens: int


class CompletionTokens(Struct, frozen=True, kw_only=True):
    """Tokens of answers that were thought."""

    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens that were read and written; a prompt with several answers was read once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class AnswerFacts(Struct, frozen=True, kw_only=True):
    """What is told of one of several answers."""

    index: int
    finish_reason: FinishReason
    stopped_by: str | None
    validation_passed: bool | None


class Extension(Struct, frozen=True, kw_only=True):
    """What is told of the answers to a prompt; plan and times are those of the first one.

    ``validation_passed`` is false when one failed, null when nothing was to be checked.
    """

    job_id: str
    plan: PlanDocument
    notes: list[str]
    validation_passed: bool | None
    warnings: list[str]
    timings_ms: dict[str, float]
    answers: list[AnswerFacts]


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, its index among the choices, and warnings from reading it."""

    index: int
    result: RunResult
    warnings: tuple[str, ...] = ()


def finish_reason_of(reason: FinishReason, *, calls: int = 0) -> EndReason:
    """Return why an answer ended; one that was cut off, for any reason, is ``length``."""
    if reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def usage_of(jobs: Sequence[Sequence[RunResult]], *, thought: int = 0) -> Usage:
    """Return the ``usage`` of jobs; ``thought`` tokens are reported separately, if any."""
    prompt = sum(results[0].prompt_tokens for results in jobs)
    cached = sum(results[0].kv_reused_tokens for results in jobs)
    written = sum(len(one.generated.tokens) for results in jobs for one in results)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokens(cached_tokens=cached),
        completion_tokens_details=CompletionTokens(reasoning_tokens=thought) if thought else UNSET,
    )


@dataclass(slots=True)
class RunningUsage:
    """The usage of answers that are being written."""

    prompt: int = 0
    cached: int = 0
    written: dict[int, int] = field(default_factory=dict)
    """Index of an answer → how many tokens it has so far."""

    def read(self, *, prompt: int, cached: int) -> None:
        """Count a prompt, and how much of it was read before."""
        self.prompt += prompt
        self.cached += cached

    def usage(self) -> Usage:
        """Return what was read and written until now."""
        written = sum(self.written.values())
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=written,
            total_tokens=self.prompt + written,
            prompt_tokens_details=PromptTokens(cached_tokens=self.cached),
        )


def extension_of(
    answers: Sequence[Answered], *, ignored: Sequence[str] = (), warnings: Sequence[str] = ()
) -> Extension:
    """Return the ``expertctl`` object for the answers to one prompt."""
    first = answers[0].result
    of_answers = (text for one in answers for text in (*one.result.warnings, *one.warnings))
    return Extension(
        job_id=first.job_id,
        plan=first.planned.result.plan.to_json(),
        notes=list(first.planned.result.notes),
        validation_passed=_passed(one.result.validation_passed for one in answers),
        warnings=list(dict.fromkeys((*ignored_warning(ignored), *warnings, *of_answers))),
        timings_ms={name: round(ms, 3) for name, ms in first.timings_ms.items()},
        answers=[_answer(one) for one in answers],
    )


def fingerprint_of(plan: Plan) -> str:
    """Return a fingerprint: if it differs, the same request and seed may give another answer."""
    return f"fp_{plan.identity.hex[:12]}"


def _answer(answered: Answered) -> AnswerFacts:
    result = answered.result
    return AnswerFacts(
        index=answered.index,
        finish_reason=result.generated.finish_reason,
        stopped_by=result.generated.stopped_by,
        validation_passed=result.validation_passed,
    )


def _passed(outcomes: Iterable[bool | None]) -> bool | None:
    """Return False if a check failed, None if nothing was checked."""
    known = [outcome for outcome in outcomes if outcome is not None]
    return all(known) if known else None
