"""The answers to a chat call, told in one document."""

from collections.abc import Iterable

from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.answer_reader import Read
from expertctl.server.openai.chat_call import MAX_CALLS, ChatCall
from expertctl.server.openai.logprobs import chat_logprobs
from expertctl.server.openai.outcome import (
    Answered,
    extension_of,
    fingerprint_of,
    finish_reason_of,
    usage_of,
)
from expertctl.server.openai.several_jobs import Collected
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call, call_id
from expertctl.server.tool_calls.scanner import Text


def chat_completion(call: ChatCall, came: Collected, *, thought: int = 0) -> JsonObject:
    """Return the answer to a chat call; choices that a deadline let not begin are not there.

    ``thought`` is how many of the tokens are thought.
    """
    choices, answers = list[JsonValue](), list[Answered]()
    for index, (result, tokens) in enumerate(zip(came.results, came.drawn, strict=False)):
        read = call.reading.whole(result.generated.text)
        reason = finish_reason_of(result.generated.finish_reason, calls=len(read.calls))
        choices.append(
            {
                "index": index,
                "message": _message(call, index, read.parts),
                "logprobs": None if call.job.logprobs is None else chat_logprobs(tokens),
                "finish_reason": reason,
            }
        )
        answers.append(Answered(index, result, read.warnings))
    return {
        "id": call.id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "usage": usage_of([came.results], thought=thought),
        "system_fingerprint": fingerprint_of(came.results[0].planned.result.plan),
        "expertctl": extension_of(answers),
    }


def tool_call_of(call: ChatCall, found: Call, *, index: int, number: int) -> JsonObject:
    """Return a call as an answer holds it; its id is that of no other call of the job."""
    number += index * MAX_CALLS
    return {
        "id": call_id("call_", job_id=call.job.id, number=number),
        "type": "function",
        "function": {"name": found.name, "arguments": found.arguments_json},
    }


def _message(call: ChatCall, index: int, read: Iterable[Read]) -> JsonObject:
    said, thought, calls = list[str](), list[str](), list[JsonValue]()
    for part in read:
        match part:
            case Text(text):
                said.append(text)
            case Thought(text):
                thought.append(text)
            case Call():
                calls.append(tool_call_of(call, part, index=index, number=len(calls)))
    content = "".join(said) or (None if calls else "")
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if thought:
        message["reasoning_content"] = "".join(thought)
    return {**message, "tool_calls": calls} if calls else message
