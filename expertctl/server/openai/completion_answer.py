"""The answers to a completion call, told in one document."""

from collections.abc import Sequence

from expertctl.engine.run_result import RunResult
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.openai.completion_call import CompletionCall
from expertctl.server.openai.logprobs import completion_logprobs
from expertctl.server.openai.outcome import (
    Answered,
    extension_of,
    fingerprint_of,
    finish_reason_of,
    usage_of,
)
from expertctl.server.openai.several_jobs import Collected


def completion(call: CompletionCall, came: Sequence[Collected]) -> JsonObject:
    """Return the answer to a completion call: for each prompt in order, all its answers."""
    choices = [choice for number, one in enumerate(came) for choice in _choices(call, number, one)]
    first = came[0].results[0].planned.result.plan
    return {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "usage": usage_of([one.results for one in came]),
        "system_fingerprint": fingerprint_of(first),
        "expertctl": told(call, [one.results for one in came]),
    }


def told(call: CompletionCall, results: Sequence[Sequence[RunResult]]) -> JsonObject:
    """Return what is told besides, prompt by prompt where there are several."""
    each = [
        extension_of([Answered(call.index(number, i), r) for i, r in enumerate(one)])
        for number, one in enumerate(results)
    ]
    return each[0] if len(each) == 1 else {"prompts": list[JsonValue](each)}


def _choices(call: CompletionCall, number: int, came: Collected) -> list[JsonValue]:
    head = call.head(number)
    scored = call.jobs[number].logprobs is not None
    return [
        {
            "index": call.index(number, i),
            "text": head + result.generated.text,
            "logprobs": completion_logprobs(tokens, start=0) if scored else None,
            "finish_reason": finish_reason_of(result.generated.finish_reason),
        }
        for i, (result, tokens) in enumerate(zip(came.results, came.drawn, strict=False))
    ]
