"""The outcome of an answer: why it ended, its usage, and what the published API lacks."""

from collections.abc import Sequence

from msgspec import UNSET

from expertctl.engine.run_result import RunResult
from expertctl.server.anthropic.message_call import MessageCall
from expertctl.server.anthropic.message_document import (
    MessageExtension,
    MessageUsage,
    Stop,
    ThinkingTokens,
)


def stop_of(call: MessageCall, result: RunResult, *, calls: int) -> Stop:
    """Return why an answer ended; one that was cut off, for any reason, is ``max_tokens``.

    A stop string that comes from an expert, not from the request, is not reported.
    """
    generated = result.generated
    by = generated.stopped_by if generated.stopped_by in call.stop_sequences else None
    if generated.finish_reason != "stop":
        return Stop(stop_reason="max_tokens", stop_sequence=None)
    if by is not None:
        return Stop(stop_reason="stop_sequence", stop_sequence=by)
    return Stop(stop_reason="tool_use" if calls else "end_turn", stop_sequence=None)


def usage_of(*, prompt: int, reused: int, written: int, thought: int = 0) -> MessageUsage:
    """Return the ``usage``; ``input_tokens`` leaves out tokens kept from earlier requests.

    Keeping them takes no tokens of its own. ``thought`` counts the written tokens that are
    thought, which are reported separately if there are any.
    """
    return MessageUsage(
        input_tokens=prompt - reused,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=reused,
        output_tokens=written,
        output_tokens_details=ThinkingTokens(thinking_tokens=thought) if thought else UNSET,
    )


def usage_of_result(result: RunResult, *, thought: int) -> MessageUsage:
    """Return the ``usage`` of a whole answer."""
    return usage_of(
        prompt=result.prompt_tokens,
        reused=result.kv_reused_tokens,
        written=len(result.generated.tokens),
        thought=thought,
    )


def extension_of(call: MessageCall, result: RunResult, warnings: Sequence[str]) -> MessageExtension:
    """Return what the published API has no place for."""
    return MessageExtension(
        job_id=result.job_id,
        plan=result.planned.result.plan.to_json(),
        notes=list(result.planned.result.notes),
        finish_reason=result.generated.finish_reason,
        validation_passed=result.validation_passed,
        warnings=list(dict.fromkeys((*call.warnings, *result.warnings, *warnings))),
        timings_ms={name: round(ms, 3) for name, ms in result.timings_ms.items()},
    )
