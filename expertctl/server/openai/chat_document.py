"""The documents of chat answers: a whole one, and the chunks of a stream."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from expertctl.server.openai.conversation import ToolCall
from expertctl.server.openai.outcome import EndReason, Extension, Usage


class TokenScore(Struct, frozen=True, kw_only=True):
    """A token, how likely it was, and its bytes, where they are known."""

    token: str
    logprob: float
    bytes: list[int] | None


class DrawnScore(TokenScore, frozen=True, kw_only=True):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """How likely the tokens of an answer were."""

    content: list[DrawnScore]
    refusal: None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """What a model said, thought and called."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason


class ChatCompletion(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    """The answers to a chat call."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    expertctl: Extension


class ChunkCall(ToolCall, frozen=True, kw_only=True):
    """A call, whole, and its place among those of an answer."""

    index: int


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What an answer grows by."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChunkCall] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """What one of the answers grows by; its reason to end comes last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None


class ChatChunk(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream; only the last one has ``expertctl``, and a usage that is not null."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    expertctl: Extension | UnsetType = UNSET
