"""The blocks that the content of a message is made of.

Only text is read. Blocks of any other kind are known by name and refused, as are fields that the
published API does not have. Cache marks change nothing: every prompt is kept as long as there is
room.

The messages of a request, as they are sent, and as the chat template reads them.

Adjacent messages of one role become one. A tool's answer becomes a message of its own, after the
call, and each call must be answered in the next turn. A last message of the assistant is the
beginning of the answer, which holds only what follows it.

The tools of a request, which the chat template describes to the model.

Generation cannot be constrained yet, so a request that demands a call is refused. The input of a
``strict`` tool is checked afterwards, against its schema. Tools that the server would run are not
known here.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.chat_prompt import check_conversation_length
from expertctl.server.output_parser import StrictTool
from expertctl.server.request_body import FieldError

_MAX_ID = 256
_MAX_BLOCKS = 10_000

Id = Annotated[str, Meta(min_length=1, max_length=_MAX_ID)]


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a prefix ends that should be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _ContentBlock(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """One block."""


class TextBlock(_ContentBlock, frozen=True, tag="text"):
    """Text; what it cites is no part of it."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(_ContentBlock, frozen=True, tag="thinking"):
    """What a model thought before it answered."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_ContentBlock, frozen=True, tag="redacted_thinking"):
    """What a model thought, in a form that only another server reads."""

    data: str


class ToolUseBlock(_ContentBlock, frozen=True, tag="tool_use"):
    """A call of a tool, by the model."""

    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    def to_json(self) -> JsonObject:
        """Return the call as templates read it."""
        arguments = cast("JsonObject", self.input)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


class _UnsupportedBlock(_ContentBlock, frozen=True, forbid_unknown_fields=False):
    """A block that is not read."""


class ImageBlock(_UnsupportedBlock, frozen=True, tag="image"):
    """An image."""


class DocumentBlock(_UnsupportedBlock, frozen=True, tag="document"):
    """A document."""


class SearchResultBlock(_UnsupportedBlock, frozen=True, tag="search_result"):
    """A place that was found."""


UnsupportedBlock = ImageBlock | DocumentBlock | SearchResultBlock
ToolResultContent = TextBlock | UnsupportedBlock
"""What a tool answers with."""


class ToolResultBlock(_ContentBlock, frozen=True, tag="tool_result"):
    """What a tool answered."""

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
    """Return a text, or the text of blocks, joined by line ends."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def unsupported_block_error(block: UnsupportedBlock, field: str) -> FieldError:
    """Return the error for a block that is not read."""
    what = block.__struct_config__.tag
    return FieldError(f"{field}: a block of type {what} is not read, only text is", field=field)


def format_tool_result(result: ToolResultBlock, field: str) -> str:
    """Return what a tool answered; an error is marked in the text, since no template marks it.

    Raises:
        FieldError: when it contains a block that is not read.
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
    """One message."""


class HumanTurn(_AnthropicTurn, frozen=True, tag="user"):
    """What a person says, and what tools answered."""

    content: UserContent


class ModelTurn(_AnthropicTurn, frozen=True, tag="assistant"):
    """What a model said."""

    content: AssistantContent


class InstructionTurn(_AnthropicTurn, frozen=True, tag="system"):
    """Instructions in the middle of a conversation."""

    content: TextContent


Turn = HumanTurn | ModelTurn | InstructionTurn


def read_messages(
    system: TextContent | None, turns: Sequence[Turn]
) -> tuple[ConversationMessage, ...]:
    """Return the conversation as the chat template reads it.

    Raises:
        FieldError: for blocks that are not read, calls without an answer, and too much text.
    """
    said = join_text(system or "")
    first = [ConversationMessage("system", said)] if said else []
    messages = tuple(_join_adjacent([*first, *_ConversationReader().read(turns)]))
    if messages[-1].role == "assistant" and not messages[-1].content.strip():
        raise FieldError(
            "messages: the last one is of the assistant and has no text to go on from",
            field="messages",
        )
    check_conversation_length(messages)
    return messages


class _ConversationReader:
    """Reads the turns one after the other, and checks that each call is answered."""

    def __init__(self) -> None:
        self._open_calls: dict[str, str] = {}
        """Id of an unanswered call of the last turn → name of its tool."""

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
            raise FieldError(f"{field}.content: there is nothing in it", field=f"{field}.content")
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
            raise FieldError(
                f"{field}.tool_use_id: the turn before has no open call {block.tool_use_id!r}",
                field=f"{field}.tool_use_id",
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
            raise FieldError(
                f"{field}.id: there is a call {call.id!r} already", field=f"{field}.id"
            )
        self._open_calls[call.id] = call.name

    def _check_answered(self, calls: Collection[str], field: str) -> None:
        for call in calls:
            raise FieldError(
                f"{field}: call {call!r} of the turn before has no tool_result", field=field
            )


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
    """Join adjacent messages of one role; answers of tools stay apart."""
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
    """A tool, what it is for, and the JSON schema of its input."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    strict: bool | None = None

    def to_json(self) -> JsonObject:
        """Return the tool as templates read it."""
        said = {} if self.description is None else {"description": self.description}
        parameters = cast("JsonObject", self.input_schema)
        function: JsonObject = {"name": self.name, **said, "parameters": parameters}
        return {"type": "function", "function": function}


class _ToolChoiceOption(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Whether tools are used."""


class AutoChoice(_ToolChoiceOption, frozen=True, tag="auto"):
    """As the model likes."""

    disable_parallel_tool_use: bool = False


class NoneChoice(_ToolChoiceOption, frozen=True, tag="none"):
    """Not at all: the model is told of none."""


class AnyChoice(_ToolChoiceOption, frozen=True, tag="any"):
    """One of them must be."""

    disable_parallel_tool_use: bool = False


class ToolChoice(_ToolChoiceOption, frozen=True, tag="tool"):
    """This one must be."""

    name: str
    disable_parallel_tool_use: bool = False


ToolChoiceOption = AutoChoice | NoneChoice | AnyChoice | ToolChoice


def select_tools(
    tools: Sequence[OfferedTool], choice: ToolChoiceOption | None
) -> tuple[OfferedTool, ...]:
    """Return the tools that the model is told of.

    Raises:
        FieldError: when a call is demanded, or two tools have one name.
    """
    _check_unique_names(tools)
    match choice:
        case None | AutoChoice():
            return tuple(tools)
        case NoneChoice():
            return ()
        case AnyChoice() | ToolChoice():
            raise FieldError(
                "tool_choice: no call can be forced, since no text can be; give the type auto or "
                "none, and say in the messages which tool is wanted",
                field="tool_choice",
            )


def is_single_call(choice: ToolChoiceOption | None) -> bool:
    """Whether only the first call of an answer counts."""
    return isinstance(choice, AutoChoice) and choice.disable_parallel_tool_use


def list_strict_tools(tools: Sequence[OfferedTool]) -> tuple[StrictTool, ...]:
    """Return the tools whose input is to be checked."""
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
            raise FieldError(f"{field}: there is a tool {tool.name} already", field=field)
        seen.add(tool.name)
