"""The documents of messages: a whole one, and the events of a stream."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from expertctl.engine.generate import FinishReason
from expertctl.server.documents import PlanDocument

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(Struct, frozen=True, kw_only=True):
    """Tokens that were thought, among those that were written."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Tokens that were read, taken from what was kept, and written."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageExtension(Struct, frozen=True, kw_only=True):
    """What the published API has no place for: who answered and why, and what was checked."""

    job_id: str
    plan: PlanDocument
    notes: list[str]
    finish_reason: FinishReason
    validation_passed: bool | None
    warnings: list[str]
    timings_ms: dict[str, float]


class _Typed(Struct, frozen=True, kw_only=True, tag_field="type"):
    """A document that says what it is."""


class Said(_Typed, frozen=True, kw_only=True, tag="text"):
    """A block of text."""

    text: str


class Thinking(_Typed, frozen=True, kw_only=True, tag="thinking"):
    """A block of what was thought."""

    thinking: str
    signature: str


class Used(_Typed, frozen=True, kw_only=True, tag="tool_use"):
    """A block that calls a tool."""

    id: str
    name: str
    input: dict[str, Any]


Block = Said | Thinking | Used


class Message(_Typed, frozen=True, kw_only=True, tag="message"):
    """The answer; where a stream begins, what is known of it before it is written."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    expertctl: MessageExtension | UnsetType = UNSET


class MessageStart(_Typed, frozen=True, kw_only=True, tag="message_start"):
    """The first event."""

    message: Message


class Ping(_Typed, frozen=True, kw_only=True, tag="ping"):
    """An event that says nothing."""


class BlockStart(_Typed, frozen=True, kw_only=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class TextDelta(_Typed, frozen=True, kw_only=True, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(_Typed, frozen=True, kw_only=True, tag="thinking_delta"):
    """More of what was thought."""

    thinking: str


class SignatureDelta(_Typed, frozen=True, kw_only=True, tag="signature_delta"):
    """Where a thought is from."""

    signature: str


class InputDelta(_Typed, frozen=True, kw_only=True, tag="input_json_delta"):
    """More of what a tool is called with, as JSON text."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(_Typed, frozen=True, kw_only=True, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: Delta


class BlockStop(_Typed, frozen=True, kw_only=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class Stop(Struct, frozen=True, kw_only=True):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_Typed, frozen=True, kw_only=True, tag="message_delta"):
    """The message ended; what it took in all."""

    delta: Stop
    usage: MessageUsage
    expertctl: MessageExtension


class MessageStop(_Typed, frozen=True, kw_only=True, tag="message_stop"):
    """The last event."""


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Struct, frozen=True, kw_only=True):
    """How many tokens a conversation is to the base."""

    input_tokens: int
