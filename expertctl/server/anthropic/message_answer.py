"""The answer to a request for a message, told in one document."""

from collections.abc import Iterable, Iterator

from expertctl.engine.run_result import RunResult
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.answer_reader import Read
from expertctl.server.anthropic.message_call import MessageCall
from expertctl.server.anthropic.outcome import extension_of, stop_of, usage_of_result
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call, call_id
from expertctl.server.tool_calls.scanner import Text


def message_of(call: MessageCall, result: RunResult, *, thought: int = 0) -> JsonObject:
    """Return the message that answers a request; ``thought`` is how many tokens are thought."""
    read = call.reading.whole(result.generated.text)
    return {
        **head_of(call),
        "content": list[JsonValue](_blocks(call, read.parts)),
        **stop_of(call, result, calls=len(read.calls)),
        "usage": usage_of_result(result, thought=thought),
        "expertctl": extension_of(call, result, read.warnings),
    }


def head_of(call: MessageCall) -> JsonObject:
    """Return what is known of a message before it is written."""
    return {"id": call.id, "type": "message", "role": "assistant", "model": call.model}


def tool_use(call: MessageCall, found: Call, *, number: int) -> JsonObject:
    """Return a call as a block; its id is that of no other."""
    name = call_id("toolu_", job_id=call.job.id, number=number)
    return {"type": "tool_use", "id": name, "name": found.name, "input": found.arguments}


def signature_of(call: MessageCall) -> str:
    """Return the signature of a thought: it says where it is from, and proves nothing."""
    return call.id


def _blocks(call: MessageCall, read: Iterable[Read]) -> Iterator[JsonObject]:
    """Yield the blocks of an answer; neighbours that are no calls are one."""
    shown = (part for part in read if call.shows_thinking or not isinstance(part, Thought))
    calls = 0
    for part in _merged(shown):
        match part:
            case Text(text):
                yield {"type": "text", "text": text}
            case Thought(thought):
                yield {"type": "thinking", "thinking": thought, "signature": signature_of(call)}
            case Call():
                yield tool_use(call, part, number=calls)
                calls += 1


def _merged(read: Iterable[Read]) -> Iterator[Read]:
    last: Read | None = None
    for part in read:
        match last, part:
            case Text(before), Text(text):
                last = Text(before + text)
            case Thought(before), Thought(text):
                last = Thought(before + text)
            case None, _:
                last = part
            case other, _:
                yield other
                last = part
    if last is not None:
        yield last
