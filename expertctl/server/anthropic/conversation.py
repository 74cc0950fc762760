"""The conversation and tools of a request to the Anthropic API.

Only text blocks are read. Other kinds of blocks are known by name and refused, as are fields that
the published API does not have. Cache marks change nothing: every prefix is kept if there is room.

Adjacent messages of one role are joined. A tool result becomes a message of its own after the call;
each call must be answered in the next turn. A last message of the assistant is the beginning of the
answer, which then contains only what follows it.

Generation cannot be constrained, so a request that requires a tool call is refused. The input of a
``strict`` tool is checked afterwards against its schema. Tools run by the server are not supported.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.http.operation import FieldError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.chat_prompt import check_conversation_length
from expertctl.server.output_parser import StrictTool

_MAX_ID = 256
_MAX_BLOCKS = 10_000

Id = Annotated[str, Meta(min_length=1, max_length=_MAX_ID)]


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a prefix that should be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _ContentBlock(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """A content block."""


class TextBlock(_ContentBlock, frozen=True, tag="text"):
    """Text; citations are ignored."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(_ContentBlock, frozen=True, tag="thinking"):
    """Reasoning of the model before its answer."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_ContentBlock, frozen=True, tag="redacted_thinking"):
    """Reasoning in a form that only another server can read."""

    data: str


class ToolUseBlock(_ContentBlock, frozen=True, tag="tool_use"):
    """A tool call by the model."""

    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    def to_json(self) -> JsonObject:
        """Return the call in the form that templates read."""
        arguments = cast("JsonObject", self.input)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


class _UnsupportedBlock(_ContentBlock, frozen=True, forbid_unknown_fields=False):
    """A block that is refused."""


class ImageBlock(_UnsupportedBlock, frozen=True, tag="image"):
    """An image."""


class DocumentBlock(_UnsupportedBlock, frozen=True, tag="document"):
    """A document."""


class SearchResultBlock(_UnsupportedBlock, frozen=True, tag="search_result"):
    """A search result."""


UnsupportedBlock = ImageBlock | DocumentBlock | SearchResultBlock
ToolResultContent = TextBlock | UnsupportedBlock
"""A block of a tool's result."""


class ToolResultBlock(_ContentBlock, frozen=True, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: Id
    content: str | Annotated[list[ToolResultContent], Meta(max_length=_MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlock = TextBlock | ToolResultBlock | UnsupportedBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | UnsupportedBlock
UserContent = str | Annotated[list[UserBlock], Meta(max_length=_MAX_BLOCKS)]
AssistantContent = str | Annotated[list[AssistantBlock], Meta(max_length=_MAX_BLOCKS)]
TextContent = str | Annotated[list[TextBlock], Meta(max_length=_MAX_BLOCKS)]


def join_text(content: str | list[TextBlock]) -> str:
    """Return the content as text; the texts of blocks are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def unsupported_block_error(block: UnsupportedBlock, field: str) -> FieldError:
    """Return the error for an unsupported block."""
    what = block.__struct_config__.tag
    return FieldError.at(field, f"a block of type {what} is not supported, only text is")


def format_tool_result(result: ToolResultBlock, field: str) -> str:
    """Return the text of a tool result; errors are prefixed, since no template marks them.

    Raises:
        FieldError: when it contains an unsupported block.
    """
    parts = [result.content] if isinstance(result.content, str) else list[str]()
    blocks = result.content if isinstance(result.content, list) else []
    for number, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise unsupported_block_error(block, f"{field}.content[{number}]")
        parts.append(block.text)
    text = "\n".join(parts)
    return f"Error: {text}" if result.is_error else text


class _AnthropicTurn(Struct, frozen=True, tag_field="role", forbid_unknown_fields=True):
    """A message."""


class HumanTurn(_AnthropicTurn, frozen=True, tag="user"):
    """A message of the user, with tool results."""

    content: UserContent


class ModelTurn(_AnthropicTurn, frozen=True, tag="assistant"):
    """A message of the model."""

    content: AssistantContent


class InstructionTurn(_AnthropicTurn, frozen=True, tag="system"):
    """Instructions within the conversation."""

    content: TextContent


Turn = HumanTurn | ModelTurn | InstructionTurn


def read_messages(
    system: TextContent | None, turns: Sequence[Turn]
) -> tuple[ConversationMessage, ...]:
    """Return the conversation in the form that chat templates read.

    Raises:
        FieldError: for unsupported blocks, unanswered calls, and too much text.
    """
    system_text = join_text(system or "")
    first = [ConversationMessage("system", system_text)] if system_text else []
    messages = tuple(_join_adjacent([*first, *_ConversationReader().read(turns)]))
    if messages[-1].role == "assistant" and not messages[-1].content.strip():
        raise FieldError.at(
            "messages", "the last message is from the assistant and has no text to continue"
        )
    check_conversation_length(messages)
    return messages


class _ConversationReader:
    """Reads turns in order and checks that each call is answered."""

    def __init__(self) -> None:
        self._open_calls: dict[str, str] = {}
        """Id of an unanswered call of the last turn → the tool's name."""

    def read(self, turns: Sequence[Turn]) -> Iterator[ConversationMessage]:
        for number, turn in enumerate(turns):
            field = f"messages[{number}]"
            match turn:
                case InstructionTurn():
                    yield ConversationMessage("system", join_text(turn.content))
                case HumanTurn():
                    yield from self._read_user(turn.content, field)
                case ModelTurn():
                    yield self._read_assistant(turn.content, field)
        self._check_answered(self._open_calls, "messages")

    def _read_user(self, content: UserContent, field: str) -> Iterator[ConversationMessage]:
        if not content:
            raise FieldError.at(f"{field}.content", "empty")
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        texts = list[str]()
        for number, block in enumerate(blocks):
            place = f"{field}.content[{number}]"
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolResultBlock():
                    yield self._read_tool_result(block, place)
                case _:
                    raise unsupported_block_error(block, place)
        self._check_answered(self._open_calls, field)
        if texts:
            yield ConversationMessage("user", "\n".join(texts))

    def _read_tool_result(self, block: ToolResultBlock, field: str) -> ConversationMessage:
        name = self._open_calls.pop(block.tool_use_id, None)
        if name is None:
            raise FieldError.at(
                f"{field}.tool_use_id", f"the previous turn has no open call {block.tool_use_id!r}"
            )
        fields: JsonObject = {"tool_call_id": block.tool_use_id, "name": name}
        return ConversationMessage("tool", format_tool_result(block, field), fields)

    def _read_assistant(self, content: AssistantContent, field: str) -> ConversationMessage:
        self._check_answered(self._open_calls, field)
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        for number, block in enumerate(blocks):
            place = f"{field}.content[{number}]"
            if isinstance(block, ToolUseBlock):
                self._open_call(block, place)
            elif not isinstance(block, TextBlock | ThinkingBlock | RedactedThinkingBlock):
                raise unsupported_block_error(block, place)
        texts = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
        return ConversationMessage("assistant", texts, _template_fields(blocks))

    def _open_call(self, call: ToolUseBlock, field: str) -> None:
        if call.id in self._open_calls:
            raise FieldError.at(f"{field}.id", f"duplicate call id {call.id!r}")
        self._open_calls[call.id] = call.name

    def _check_answered(self, calls: Collection[str], field: str) -> None:
        for call in calls:
            raise FieldError.at(field, f"call {call!r} of the previous turn has no tool_result")


def _template_fields(blocks: Sequence[AssistantBlock]) -> JsonObject:
    fields: JsonObject = {}
    calls = list[JsonValue](b.to_json() for b in blocks if isinstance(b, ToolUseBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if calls:
        fields["tool_calls"] = calls
    if any(thoughts):
        fields["reasoning_content"] = "\n".join(thoughts)
    return fields


def _join_adjacent(messages: Sequence[ConversationMessage]) -> Iterator[ConversationMessage]:
    """Join adjacent messages of one role; tool results stay separate."""
    last: ConversationMessage | None = None
    for message in messages:
        if last is not None and last.role == message.role != "tool":
            last = _join_pair(last, message)
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _join_pair(first: ConversationMessage, second: ConversationMessage) -> ConversationMessage:
    content = "\n".join(text for text in (first.content, second.content) if text)
    return replace(first, content=content, fields={**first.fields, **second.fields})


MAX_TOOLS = 128
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class OfferedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool with its description and the JSON schema of its input."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    strict: bool | None = None

    def to_json(self) -> JsonObject:
        """Return the tool in the form that templates read."""
        described = {} if self.description is None else {"description": self.description}
        parameters = cast("JsonObject", self.input_schema)
        function: JsonObject = {"name": self.name, **described, "parameters": parameters}
        return {"type": "function", "function": function}


class _ToolChoiceOption(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Whether the model uses tools."""


class AutoChoice(_ToolChoiceOption, frozen=True, tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool = False


class NoneChoice(_ToolChoiceOption, frozen=True, tag="none"):
    """No tools: the prompt describes none."""


class AnyChoice(_ToolChoiceOption, frozen=True, tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool = False


class ToolChoice(_ToolChoiceOption, frozen=True, tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool = False


ToolChoiceOption = AutoChoice | NoneChoice | AnyChoice | ToolChoice


def select_tools(
    tools: Sequence[OfferedTool], choice: ToolChoiceOption | None
) -> tuple[OfferedTool, ...]:
    """Return the tools that the prompt describes.

    Raises:
        FieldError: when a call is required, or two tools have the same name.
    """
    _check_unique_names(tools)
    match choice:
        case None | AutoChoice():
            return tuple(tools)
        case NoneChoice():
            return ()
        case AnyChoice() | ToolChoice():
            raise FieldError.at(
                "tool_choice",
                "a tool call cannot be required, since generation is not constrained; "
                "use the type auto or none, and name the tool in the messages",
            )


def is_single_call(choice: ToolChoiceOption | None) -> bool:
    """Tell whether only the first call of an answer counts."""
    return isinstance(choice, AutoChoice) and choice.disable_parallel_tool_use


def list_strict_tools(tools: Sequence[OfferedTool]) -> tuple[StrictTool, ...]:
    """Return the tools whose input is checked."""
    return tuple(
        StrictTool(tool.name, tool.input_schema, f"tools[{number}].input_schema")
        for number, tool in enumerate(tools)
        if tool.strict
    )


def _check_unique_names(tools: Sequence[OfferedTool]) -> None:
    seen = set[str]()
    for number, tool in enumerate(tools):
        if tool.name in seen:
            field = f"tools[{number}].name"
            raise FieldError.at(field, f"duplicate tool name {tool.name}")
        seen.add(tool.name)
