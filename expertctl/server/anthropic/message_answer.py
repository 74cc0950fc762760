"""The answer to a request for a message, told in one document."""

from collections.abc import Iterable, Iterator

from expertctl.engine.run_result import RunResult
from expertctl.server.answer_reader import Read
from expertctl.server.anthropic.message_call import MessageCall
from expertctl.server.anthropic.message_document import Block, Message, Said, Thinking, Used
from expertctl.server.anthropic.outcome import extension_of, stop_of, usage_of_result
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call, call_id
from expertctl.server.tool_calls.scanner import Text


def message_of(call: MessageCall, result: RunResult, *, thought: int = 0) -> Message:
    """Return the message that answers a request; ``thought`` is its number of thought tokens."""
    read = call.reading.whole(result.generated.text)
    stop = stop_of(call, result, calls=len(read.calls))
    return Message(
        id=call.id,
        role="assistant",
        model=call.model,
        content=list(_blocks(call, read.parts)),
        stop_reason=stop.stop_reason,
        stop_sequence=stop.stop_sequence,
        usage=usage_of_result(result, thought=thought),
        expertctl=extension_of(call, result, read.warnings),
    )


def tool_use(call: MessageCall, found: Call, *, number: int) -> Used:
    """Return a call as a block with a unique id."""
    name = call_id("toolu_", job_id=call.job.id, number=number)
    return Used(id=name, name=found.name, input=found.arguments)


def signature_of(call: MessageCall) -> str:
    """Return the signature of a thought: it names the origin, and proves nothing."""
    return call.id


def _blocks(call: MessageCall, read: Iterable[Read]) -> Iterator[Block]:
    """Yield the blocks of an answer; adjacent parts of one kind are one block, except calls."""
    shown = (part for part in read if call.shows_thinking or not isinstance(part, Thought))
    calls = 0
    for part in _merged(shown):
        match part:
            case Text(text):
                yield Said(text=text)
            case Thought(thought):
                yield Thinking(thinking=thought, signature=signature_of(call))
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
