"""The messages of a chat call, as they are sent, and as the chat template reads them.

Only text is read: parts that hold images, audio or files are known by name and refused. Several
texts of one message are joined by line ends. ``developer`` is the newer name of ``system``.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.engine.message import Message
from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.server.asked_text import check_length
from expertctl.server.field_error import FieldError

_MAX_PARTS = 1_000
_MAX_CALLS = 128
_MAX_NAME = 256
_MAX_ARGUMENTS = 1 << 20

Name = Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]


class CacheBreakpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a prefix ends that should be kept; all of a prompt is, so it changes nothing."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class _Part(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """One part of a message."""


class TextPart(_Part, frozen=True, tag="text"):
    """Text."""

    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(_Part, frozen=True, tag="refusal"):
    """What an assistant said instead of an answer."""

    refusal: str


class ImagePart(_Part, frozen=True, tag="image_url", forbid_unknown_fields=False):
    """An image, which is not read."""


class AudioPart(_Part, frozen=True, tag="input_audio", forbid_unknown_fields=False):
    """A recording, which is not read."""


class FilePart(_Part, frozen=True, tag="file", forbid_unknown_fields=False):
    """A file, which is not read."""


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content = str | Annotated[list[Part], Meta(max_length=_MAX_PARTS)]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that an assistant called; the arguments are what it wrote, JSON as a rule."""

    name: Name
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """One call that an assistant made."""

    id: Name
    function: CalledFunction
    type: Literal["function"] = "function"

    def to_json(self) -> JsonObject:
        """Return the call as templates read it, with arguments as an object if they are one."""
        arguments = _arguments(self.function.arguments)
        function: JsonObject = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class _Turn(Struct, frozen=True, tag_field="role", forbid_unknown_fields=True):
    """One message."""


class SystemTurn(_Turn, frozen=True, tag="system"):
    """Instructions."""

    content: Content
    name: Name | None = None


class DeveloperTurn(_Turn, frozen=True, tag="developer"):
    """Instructions, too."""

    content: Content
    name: Name | None = None


class UserTurn(_Turn, frozen=True, tag="user"):
    """What a person says."""

    content: Content
    name: Name | None = None


class AssistantTurn(_Turn, frozen=True, tag="assistant"):
    """What a model said, in the form that it was answered in."""

    content: Content | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=_MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolTurn(_Turn, frozen=True, tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: Name
    name: Name | None = None


Turn = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


def messages_of(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return the conversation as the chat template reads it.

    Raises:
        FieldError: for parts that are not read, and for too much text.
    """
    messages = tuple(_message(turn, f"messages[{i}]") for i, turn in enumerate(turns))
    check_length(messages)
    return messages


def _message(turn: Turn, where: str) -> Message:
    match turn:
        case SystemTurn() | DeveloperTurn():
            return Message("system", _text(turn.content, where), _named(turn.name))
        case UserTurn():
            return Message("user", _text(turn.content, where), _named(turn.name))
        case ToolTurn():
            fields: JsonObject = {"tool_call_id": turn.tool_call_id, **_named(turn.name)}
            return Message("tool", _text(turn.content, where), fields)
        case AssistantTurn():
            return Message("assistant", _said(turn, where), _fields(turn))


def _said(turn: AssistantTurn, where: str) -> str:
    if turn.content is not None:
        return _text(turn.content, where)
    if turn.refusal is None and not turn.tool_calls:
        raise FieldError(
            f"{where}.content: it is missing, and no tool is called", field=f"{where}.content"
        )
    return turn.refusal or ""


def _fields(turn: AssistantTurn) -> JsonObject:
    fields = _named(turn.name)
    if turn.tool_calls:
        fields["tool_calls"] = [call.to_json() for call in turn.tool_calls]
    if turn.reasoning_content is not None:
        fields["reasoning_content"] = turn.reasoning_content
    return fields


def _named(name: str | None) -> JsonObject:
    return {} if name is None else {"name": name}


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case ImagePart() | AudioPart() | FilePart():
            what = part.__struct_config__.tag
            raise FieldError(f"{where}: {what} is not read, only text is", field=where)


def _arguments(text: str) -> JsonValue:
    """Return the arguments as an object; malformed ones stay as the model wrote them."""
    try:
        return load_object(text.encode(), what="arguments", max_bytes=_MAX_ARGUMENTS)
    except InvalidPackageError:
        return text
