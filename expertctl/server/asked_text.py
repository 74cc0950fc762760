"""The text of a conversation: its length, what experts are chosen by, and how it ends."""

from collections.abc import Mapping, Sequence

from expertctl.engine.message import ChatEnd, Message
from expertctl.errors import ContextLengthError
from expertctl.routing.presets import MAX_PROMPT_CHARACTERS
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.base_text import BaseText
from expertctl.server.field_error import FieldError
from expertctl.server.thinking import ends_thinking, thoughts_of, unfinished_tag


def check_length(messages: Sequence[Message]) -> None:
    """Bound a conversation.

    Raises:
        ContextLengthError: when it is too long.
    """
    fields = sum(_characters(message.fields) for message in messages if message.fields)
    size = sum(len(message.content) for message in messages) + fields
    if size > MAX_PROMPT_CHARACTERS:
        raise ContextLengthError(
            f"messages: they have {size} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            size=size,
            most=MAX_PROMPT_CHARACTERS,
            unit="characters",
            hint="leave out the oldest ones",
        )


def check_tools(tools: Sequence[JsonObject]) -> None:
    """Bound the description of tools that a base gets.

    Raises:
        FieldError: when it is too long.
    """
    size = _characters(tools)
    if size > MAX_PROMPT_CHARACTERS:
        raise FieldError(
            f"tools: they have {size} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            field="tools",
        )


def _characters(value: JsonValue | Mapping[str, JsonValue] | Sequence[JsonObject]) -> int:
    """Count the characters of strings and names in a value, whose depth is bounded.

    Every other value adds one: it takes memory, and templates write it out.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 1 + sum(len(name) + _characters(one) for name, one in value.items())
    return 1 + (sum(map(_characters, value)) if isinstance(value, Sequence) else 0)


def routed_by(messages: Sequence[Message]) -> str:
    """Return the text that experts are chosen by: the user's last, else the last of all.

    Raises:
        FieldError: when there is no text.
    """
    texts = [message for message in messages if message.content.strip()]
    if not texts:
        raise FieldError("messages: none of them has any text", field="messages")
    said = [message for message in texts if message.role == "user"]
    return (said or texts)[-1].content


def can_continue(last: Message) -> bool:
    """Whether the last message of a conversation is the beginning of an answer."""
    is_call = bool(last.fields.get("tool_calls"))
    return last.role == "assistant" and bool(last.content.strip()) and not is_call


def opens_thinking(
    text: BaseText, variables: Mapping[str, JsonValue], last: Message, *, end: ChatEnd
) -> bool:
    """Whether an answer begins inside a thought, which the template or its beginning opened."""
    if end == "new_turn":
        return text.opens_thinking(variables)
    return end == "continue" and ends_thinking(last.content)


def answer_begin(last: Message, *, end: ChatEnd) -> str:
    """Return the beginning of the answer, without thoughts, where the last message is continued."""
    return thoughts_of(last.content)[0] if end == "continue" else ""


def tag_begin(last: Message, *, end: ChatEnd) -> str:
    """Return the first part of a tag of thoughts with which a continued message ends."""
    return unfinished_tag(last.content) if end == "continue" else ""
