"""The answers to a chat call, told in one document."""

from collections.abc import Sequence

from msgspec import UNSET

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Drawn
from expertctl.server.answer_reader import WholeAnswer
from expertctl.server.openai.chat_call import MAX_CALLS, ChatCall
from expertctl.server.openai.chat_document import ChatChoice, ChatCompletion, ChatMessage
from expertctl.server.openai.conversation import CalledFunction, ToolCall
from expertctl.server.openai.logprobs import chat_logprobs
from expertctl.server.openai.outcome import (
    Answered,
    extension_of,
    fingerprint_of,
    finish_reason_of,
    usage_of,
)
from expertctl.server.openai.several_jobs import Collected
from expertctl.server.tool_calls.call import Call, call_id


def chat_completion(call: ChatCall, came: Collected, *, thought: int = 0) -> ChatCompletion:
    """Return the answer to a chat call, without choices that did not begin before a deadline.

    ``thought`` is how many of the tokens are thought.
    """
    read = [call.reading.whole(result.generated.text) for result in came.results]
    parts = zip(came.results, read, came.drawn, strict=False)
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[_choice(call, index, *one) for index, one in enumerate(parts)],
        usage=usage_of([came.results], thought=thought),
        system_fingerprint=fingerprint_of(came.results[0].planned.result.plan),
        expertctl=extension_of(
            [
                Answered(index, result, one.warnings)
                for index, (result, one) in enumerate(zip(came.results, read, strict=True))
            ],
            ignored=call.ignored,
            warnings=call.warnings,
        ),
    )


def tool_call_of(call: ChatCall, found: Call, *, index: int, number: int) -> ToolCall:
    """Return a call as an answer holds it; its id is unique within the job."""
    number += index * MAX_CALLS
    return ToolCall(
        id=call_id("call_", job_id=call.job.id, number=number),
        function=CalledFunction(name=found.name, arguments=found.arguments_json),
    )


def _choice(
    call: ChatCall, index: int, result: RunResult, read: WholeAnswer, drawn: Sequence[Drawn]
) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_message(call, index, read),
        logprobs=None if call.job.logprobs is None else chat_logprobs(drawn, call.bytes_of),
        finish_reason=finish_reason_of(result.generated.finish_reason, calls=len(read.calls)),
    )


def _message(call: ChatCall, index: int, read: WholeAnswer) -> ChatMessage:
    calls = [
        tool_call_of(call, found, index=index, number=number)
        for number, found in enumerate(read.calls)
    ]
    return ChatMessage(
        role="assistant",
        content=read.said or (None if calls else ""),
        refusal=None,
        reasoning_content=read.thought or UNSET,
        tool_calls=calls or UNSET,
    )
