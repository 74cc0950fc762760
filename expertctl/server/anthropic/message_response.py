"""The documents that answer a message request: a whole message, or the events of a stream."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from expertctl.engine.generation import FinishReason
from expertctl.engine.result import RunResult
from expertctl.server.anthropic.message_request import MessageCall
from expertctl.server.output_parser import OutputPart
from expertctl.server.reasoning_parser import ReasoningText
from expertctl.server.request_body import PlanDocument
from expertctl.server.tool_parser import ParsedToolCall, PlainText, make_call_id

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(Struct, frozen=True, kw_only=True):
    """Reasoning tokens, included in the output tokens."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Tokens read, reused from the cache, and generated."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageExtension(Struct, frozen=True, kw_only=True):
    """Facts beyond the published API: the plan, checks, warnings and times."""

    job_id: str
    plan: PlanDocument
    notes: list[str]
    finish_reason: FinishReason
    validation_passed: bool | None
    warnings: list[str]
    timings_ms: dict[str, float]


class _TaggedStruct(Struct, frozen=True, kw_only=True, tag_field="type"):
    """A document with a ``type``."""


class Said(_TaggedStruct, frozen=True, kw_only=True, tag="text"):
    """A block of text."""

    text: str


class Thinking(_TaggedStruct, frozen=True, kw_only=True, tag="thinking"):
    """A block of reasoning."""

    thinking: str
    signature: str


class Used(_TaggedStruct, frozen=True, kw_only=True, tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any]


Block = Said | Thinking | Used


class Message(_TaggedStruct, frozen=True, kw_only=True, tag="message"):
    """The answer; at the start of a stream, without content."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    expertctl: MessageExtension | UnsetType = UNSET


class MessageStart(_TaggedStruct, frozen=True, kw_only=True, tag="message_start"):
    """The first event."""

    message: Message


class Ping(_TaggedStruct, frozen=True, kw_only=True, tag="ping"):
    """An event without data."""


class BlockStart(_TaggedStruct, frozen=True, kw_only=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class TextDelta(_TaggedStruct, frozen=True, kw_only=True, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(_TaggedStruct, frozen=True, kw_only=True, tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(_TaggedStruct, frozen=True, kw_only=True, tag="signature_delta"):
    """The signature of a block of reasoning."""

    signature: str


class InputDelta(_TaggedStruct, frozen=True, kw_only=True, tag="input_json_delta"):
    """More of a tool call's input, as JSON text."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(_TaggedStruct, frozen=True, kw_only=True, tag="content_block_delta"):
    """An addition to a block."""

    index: int
    delta: Delta


class BlockStop(_TaggedStruct, frozen=True, kw_only=True, tag="content_block_stop"):
    """A block ends."""

    index: int


class Stop(Struct, frozen=True, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_TaggedStruct, frozen=True, kw_only=True, tag="message_delta"):
    """The end of the message: its stop reason and total usage."""

    delta: Stop
    usage: MessageUsage
    expertctl: MessageExtension


class MessageStop(_TaggedStruct, frozen=True, kw_only=True, tag="message_stop"):
    """The last event."""


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Struct, frozen=True, kw_only=True):
    """The number of tokens of a conversation."""

    input_tokens: int


def find_stop_reason(call: MessageCall, result: RunResult, *, calls: int) -> Stop:
    """Return the stop reason; an answer cut off for any reason has ``max_tokens``.

    A stop string that comes from an expert, not from the request, is not reported.
    """
    generated = result.generated
    by = generated.stopped_by if generated.stopped_by in call.stop_sequences else None
    if generated.finish_reason != "stop":
        return Stop(stop_reason="max_tokens", stop_sequence=None)
    if by is not None:
        return Stop(stop_reason="stop_sequence", stop_sequence=by)
    return Stop(stop_reason="tool_use" if calls else "end_turn", stop_sequence=None)


def build_usage(*, prompt: int, cached: int, generated: int, reasoning: int = 0) -> MessageUsage:
    """Return the ``usage``; ``input_tokens`` excludes ``cached`` tokens of earlier requests.

    Caching costs no tokens of its own. ``reasoning`` counts the generated tokens that are
    reasoning; they are reported separately if there are any.
    """
    return MessageUsage(
        input_tokens=prompt - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=generated,
        output_tokens_details=ThinkingTokens(thinking_tokens=reasoning) if reasoning else UNSET,
    )


def build_result_usage(result: RunResult, *, reasoning: int) -> MessageUsage:
    """Return the ``usage`` of a whole answer."""
    return build_usage(
        prompt=result.prompt_tokens,
        cached=result.kv_reused_tokens,
        generated=len(result.generated.tokens),
        reasoning=reasoning,
    )


def build_extension(
    call: MessageCall, result: RunResult, warnings: Sequence[str]
) -> MessageExtension:
    """Return the ``expertctl`` object of an answer."""
    return MessageExtension(
        job_id=result.job_id,
        plan=result.planned.result.plan.to_json(),
        notes=list(result.planned.result.notes),
        finish_reason=result.generated.finish_reason,
        validation_passed=result.validation_passed,
        warnings=list(dict.fromkeys((*call.warnings, *result.warnings, *warnings))),
        timings_ms={name: round(ms, 3) for name, ms in result.timings_ms.items()},
    )


def build_message(call: MessageCall, result: RunResult, *, reasoning_tokens: int = 0) -> Message:
    """Return the whole message that answers a request."""
    read = call.parser_config.parse(result.generated.text)
    stop = find_stop_reason(call, result, calls=len(read.calls))
    return Message(
        id=call.id,
        role="assistant",
        model=call.model,
        content=list(_build_blocks(call, read.parts)),
        stop_reason=stop.stop_reason,
        stop_sequence=stop.stop_sequence,
        usage=build_result_usage(result, reasoning=reasoning_tokens),
        expertctl=build_extension(call, result, read.warnings),
    )


def build_tool_use(call: MessageCall, found: ParsedToolCall, *, number: int) -> Used:
    """Return the block of a tool call, with a unique id."""
    name = make_call_id("toolu_", job_id=call.job.id, number=number)
    return Used(id=name, name=found.name, input=found.arguments)


def make_signature(call: MessageCall) -> str:
    """Return the signature of reasoning: the message's id, which proves nothing."""
    return call.id


def _build_blocks(call: MessageCall, read: Iterable[OutputPart]) -> Iterator[Block]:
    """Yield the blocks of an answer; adjacent text or reasoning parts form one block."""
    shown = (part for part in read if call.shows_thinking or not isinstance(part, ReasoningText))
    calls = 0
    for part in _merge_parts(shown):
        match part:
            case PlainText(text):
                yield Said(text=text)
            case ReasoningText(thought):
                yield Thinking(thinking=thought, signature=make_signature(call))
            case ParsedToolCall():
                yield build_tool_use(call, part, number=calls)
                calls += 1


def _merge_parts(read: Iterable[OutputPart]) -> Iterator[OutputPart]:
    last: OutputPart | None = None
    for part in read:
        match last, part:
            case PlainText(before), PlainText(text):
                last = PlainText(before + text)
            case ReasoningText(before), ReasoningText(text):
                last = ReasoningText(before + text)
            case None, _:
                last = part
            case other, _:
                yield other
                last = part
    if last is not None:
        yield last
