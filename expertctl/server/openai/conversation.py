"""The messages and tools of a chat request.

Only text is read: parts with images, audio or files are known by name and refused. Several texts of
one message are joined by newlines. ``developer`` is the newer name of ``system``.

Generation cannot be constrained, so a request that requires a tool call is refused. The arguments
of a ``strict`` tool are checked afterwards against its schema.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import InvalidPackageError
from expertctl.http.operation import FieldError
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.server.chat_prompt import check_conversation_length
from expertctl.server.output_parser import StrictTool

_MAX_PARTS = 1_000
_MAX_CALLS = 128
_MAX_NAME = 256
_MAX_ARGUMENTS = 1 << 20

Name = Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]


class CacheBreakpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a prefix that should be cached; the whole prompt is, so it changes nothing."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class _ContentPart(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """A part of a message."""


class TextPart(_ContentPart, frozen=True, tag="text"):
    """Text."""

    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(_ContentPart, frozen=True, tag="refusal"):
    """The refusal of an assistant."""

    refusal: str


class ImagePart(_ContentPart, frozen=True, tag="image_url", forbid_unknown_fields=False):
    """An image; refused."""


class AudioPart(_ContentPart, frozen=True, tag="input_audio", forbid_unknown_fields=False):
    """A recording; refused."""


class FilePart(_ContentPart, frozen=True, tag="file", forbid_unknown_fields=False):
    """A file; refused."""


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content = str | Annotated[list[ContentPart], Meta(max_length=_MAX_PARTS)]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that an assistant called; the arguments are as written, usually JSON."""

    name: Name
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an assistant."""

    id: Name
    function: CalledFunction
    type: Literal["function"] = "function"

    def to_json(self) -> JsonObject:
        """Return the call in the form that templates read; JSON arguments become an object."""
        arguments = _parse_arguments(self.function.arguments)
        function: JsonObject = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class _OpenAITurn(Struct, frozen=True, tag_field="role", forbid_unknown_fields=True):
    """A message."""


class SystemTurn(_OpenAITurn, frozen=True, tag="system"):
    """Instructions."""

    content: Content
    name: Name | None = None


class DeveloperTurn(_OpenAITurn, frozen=True, tag="developer"):
    """Instructions, under the newer name of the role."""

    content: Content
    name: Name | None = None


class UserTurn(_OpenAITurn, frozen=True, tag="user"):
    """A message of the user."""

    content: Content
    name: Name | None = None


class AssistantTurn(_OpenAITurn, frozen=True, tag="assistant"):
    """A message of the model, in the form of an answer."""

    content: Content | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=_MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolTurn(_OpenAITurn, frozen=True, tag="tool"):
    """The result of a tool call."""

    content: Content
    tool_call_id: Name
    name: Name | None = None


Turn = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


def read_messages(turns: Sequence[Turn]) -> tuple[ConversationMessage, ...]:
    """Return the conversation in the form that chat templates read.

    Raises:
        FieldError: for unsupported parts and too much text.
    """
    messages = tuple(_read_message(turn, f"messages[{i}]") for i, turn in enumerate(turns))
    check_conversation_length(messages)
    return messages


def _read_message(turn: Turn, where: str) -> ConversationMessage:
    match turn:
        case SystemTurn() | DeveloperTurn():
            return ConversationMessage(
                "system", _join_texts(turn.content, where), _name_field(turn.name)
            )
        case UserTurn():
            return ConversationMessage(
                "user", _join_texts(turn.content, where), _name_field(turn.name)
            )
        case ToolTurn():
            fields: JsonObject = {"tool_call_id": turn.tool_call_id, **_name_field(turn.name)}
            return ConversationMessage("tool", _join_texts(turn.content, where), fields)
        case AssistantTurn():
            return ConversationMessage(
                "assistant", _read_assistant_text(turn, where), _template_fields(turn)
            )


def _read_assistant_text(turn: AssistantTurn, where: str) -> str:
    if turn.content is not None:
        return _join_texts(turn.content, where)
    if turn.refusal is None and not turn.tool_calls:
        raise FieldError.at(f"{where}.content", "missing, and there are no tool calls")
    return turn.refusal or ""


def _template_fields(turn: AssistantTurn) -> JsonObject:
    fields = _name_field(turn.name)
    if turn.tool_calls:
        fields["tool_calls"] = [call.to_json() for call in turn.tool_calls]
    if turn.reasoning_content is not None:
        fields["reasoning_content"] = turn.reasoning_content
    return fields


def _name_field(name: str | None) -> JsonObject:
    return {} if name is None else {"name": name}


def _join_texts(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_read_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _read_part(part: ContentPart, where: str) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case ImagePart() | AudioPart() | FilePart():
            what = part.__struct_config__.tag
            raise FieldError.at(where, f"{what} is not supported, only text is")


def _parse_arguments(text: str) -> JsonValue:
    """Return the arguments as an object; malformed ones stay as the model wrote them."""
    try:
        return load_object(text.encode(), what="arguments", max_bytes=_MAX_ARGUMENTS)
    except InvalidPackageError:
        return text


_NAME = r"^[a-zA-Z0-9_-]{1,64}$"

_NO_ARGUMENTS: JsonObject = {"type": "object", "additionalProperties": False}

FunctionName = Annotated[str, Meta(pattern=_NAME)]


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """A function with its description and the JSON schema of its arguments.

    Without a schema it takes no arguments. ``strict``: arguments are checked after generation.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_json(self) -> JsonObject:
        """Return the definition in the form that templates read."""
        given: JsonObject = {"description": self.description, "parameters": self.parameters}
        stated = {name: value for name, value in given.items() if value is not None}
        return {"name": self.name, **stated}


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    function: Function
    type: Literal["function"] = "function"

    def to_json(self) -> JsonObject:
        """Return the tool in the form that templates read."""
        return {"type": self.type, "function": self.function.to_json()}


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A function by its name."""

    name: FunctionName


class FunctionChoice(Struct, frozen=True, tag_field="type", tag="function"):
    """Requires a call of this function."""

    function: NamedFunction


class CustomChoice(Struct, frozen=True, tag_field="type", tag="custom"):
    """Requires a call of a custom tool."""


class AllowedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that may be called now."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True):
    """The tools that may be called now."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(max_length=128)]


class AllowedChoice(
    Struct, frozen=True, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True
):
    """Restricts the tools to a subset."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice


def select_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Tool, ...]:
    """Return the tools that the prompt describes.

    Raises:
        FieldError: when a call is required, an allowed tool is missing, or two have the same name.
    """
    _check_unique_names([tool.function.name for tool in tools])
    match choice:
        case None | "auto":
            return tuple(tools)
        case "none":
            return ()
        case AllowedChoice(allowed_tools=allowed) if allowed.mode == "auto":
            return _select_allowed(tools, allowed)
        case "required" | FunctionChoice() | CustomChoice() | AllowedChoice():
            raise FieldError.at(
                "tool_choice",
                "a tool call cannot be required, since generation is not constrained",
                hint='use "auto" or "none", and name the tool in the messages',
            )


def _check_unique_names(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            field = f"tools[{number}].function.name"
            raise FieldError.at(field, f"duplicate tool name {name!r}")


def list_strict_tools(tools: Sequence[Tool]) -> tuple[StrictTool, ...]:
    """Return the tools whose arguments are checked."""
    return tuple(
        StrictTool(
            tool.function.name,
            _NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters,
            f"tools[{number}].function.parameters",
        )
        for number, tool in enumerate(tools)
        if tool.function.strict
    )


def _select_allowed(tools: Sequence[Tool], allowed: AllowedTools) -> tuple[Tool, ...]:
    names = {one.function.name for one in allowed.tools}
    unknown = sorted(names - {tool.function.name for tool in tools})
    if unknown:
        raise FieldError.at(
            "tool_choice.allowed_tools.tools",
            f"{unknown[0]} is not one of the tools",
            hint="name functions that are given in tools",
        )
    return tuple(tool for tool in tools if tool.function.name in names)
