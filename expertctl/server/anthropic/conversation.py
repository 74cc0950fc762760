"""The messages of a request, as they are sent, and as the chat template reads them.

Adjacent messages of one role become one. A tool's answer becomes a message of its own, after the
call, and each call must be answered in the next turn. A last message of the assistant is the
beginning of the answer, which holds only what follows it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from msgspec import Struct

from expertctl.engine.message import Message
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.anthropic.content_block import (
    AssistantBlock,
    AssistantContent,
    RedactedThinkingBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserContent,
    not_read,
    texts_of,
    told,
)
from expertctl.server.asked_text import check_length
from expertctl.server.field_error import FieldError


class _Turn(Struct, frozen=True, tag_field="role", forbid_unknown_fields=True):
    """One message."""


class HumanTurn(_Turn, frozen=True, tag="user"):
    """What a person says, and what tools answered."""

    content: UserContent


class ModelTurn(_Turn, frozen=True, tag="assistant"):
    """What a model said."""

    content: AssistantContent


class InstructionTurn(_Turn, frozen=True, tag="system"):
    """Instructions in the middle of a conversation."""

    content: Texts


Turn = HumanTurn | ModelTurn | InstructionTurn


def messages_of(system: Texts | None, turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return the conversation as the chat template reads it.

    Raises:
        FieldError: for blocks that are not read, calls without an answer, and too much text.
    """
    said = texts_of(system or "")
    first = [Message("system", said)] if said else []
    messages = tuple(_joined([*first, *_Reader().messages(turns)]))
    if messages[-1].role == "assistant" and not messages[-1].content.strip():
        raise FieldError(
            "messages: the last one is of the assistant and has no text to go on from",
            field="messages",
        )
    check_length(messages)
    return messages


class _Reader:
    """Reads the turns one after the other, and checks that each call is answered."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        """Id of an unanswered call of the last turn → name of its tool."""

    def messages(self, turns: Sequence[Turn]) -> Iterator[Message]:
        for number, turn in enumerate(turns):
            field = f"messages[{number}]"
            match turn:
                case InstructionTurn():
                    yield Message("system", texts_of(turn.content))
                case HumanTurn():
                    yield from self._user(turn.content, field)
                case ModelTurn():
                    yield self._assistant(turn.content, field)
        self._check_answered(self._open, "messages")

    def _user(self, content: UserContent, field: str) -> Iterator[Message]:
        if not content:
            raise FieldError(f"{field}.content: there is nothing in it", field=f"{field}.content")
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        texts = list[str]()
        for number, block in enumerate(blocks):
            place = f"{field}.content[{number}]"
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolResultBlock():
                    yield self._result(block, place)
                case _:
                    raise not_read(block, place)
        self._check_answered(self._open, field)
        if texts:
            yield Message("user", "\n".join(texts))

    def _result(self, block: ToolResultBlock, field: str) -> Message:
        name = self._open.pop(block.tool_use_id, None)
        if name is None:
            raise FieldError(
                f"{field}.tool_use_id: the turn before has no open call {block.tool_use_id!r}",
                field=f"{field}.tool_use_id",
            )
        fields: JsonObject = {"tool_call_id": block.tool_use_id, "name": name}
        return Message("tool", told(block, field), fields)

    def _assistant(self, content: AssistantContent, field: str) -> Message:
        self._check_answered(self._open, field)
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        for number, block in enumerate(blocks):
            place = f"{field}.content[{number}]"
            if isinstance(block, ToolUseBlock):
                self._begin(block, place)
            elif not isinstance(block, TextBlock | ThinkingBlock | RedactedThinkingBlock):
                raise not_read(block, place)
        texts = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
        return Message("assistant", texts, _fields(blocks))

    def _begin(self, call: ToolUseBlock, field: str) -> None:
        if call.id in self._open:
            raise FieldError(
                f"{field}.id: there is a call {call.id!r} already", field=f"{field}.id"
            )
        self._open[call.id] = call.name

    def _check_answered(self, calls: Collection[str], field: str) -> None:
        for call in calls:
            raise FieldError(
                f"{field}: call {call!r} of the turn before has no tool_result", field=field
            )


def _fields(blocks: Sequence[AssistantBlock]) -> JsonObject:
    fields: JsonObject = {}
    calls = list[JsonValue](b.to_json() for b in blocks if isinstance(b, ToolUseBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if calls:
        fields["tool_calls"] = calls
    if any(thoughts):
        fields["reasoning_content"] = "\n".join(thoughts)
    return fields


def _joined(messages: Sequence[Message]) -> Iterator[Message]:
    """Join adjacent messages of one role; answers of tools stay apart."""
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == message.role != "tool":
            last = _one(last, message)
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _one(first: Message, second: Message) -> Message:
    content = "\n".join(text for text in (first.content, second.content) if text)
    return replace(first, content=content, fields={**first.fields, **second.fields})
