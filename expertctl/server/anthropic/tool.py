"""The tools of a request, which the chat template describes to the model.

Generation cannot be constrained yet, so a request that demands a call is refused. The input of a
``strict`` tool is checked afterwards, against its schema. Tools that the server would run are not
known here.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from expertctl.schema.strict_json import JsonObject
from expertctl.server.answer_check import StrictTool
from expertctl.server.anthropic.content_block import CacheControl
from expertctl.server.field_error import FieldError

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


class _Choice(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Whether tools are used."""


class AutoChoice(_Choice, frozen=True, tag="auto"):
    """As the model likes."""

    disable_parallel_tool_use: bool = False


class NoneChoice(_Choice, frozen=True, tag="none"):
    """Not at all: the model is told of none."""


class AnyChoice(_Choice, frozen=True, tag="any"):
    """One of them must be."""

    disable_parallel_tool_use: bool = False


class ToolChoice(_Choice, frozen=True, tag="tool"):
    """This one must be."""

    name: str
    disable_parallel_tool_use: bool = False


Choice = AutoChoice | NoneChoice | AnyChoice | ToolChoice


def offered(tools: Sequence[OfferedTool], choice: Choice | None) -> tuple[OfferedTool, ...]:
    """Return the tools that the model is told of.

    Raises:
        FieldError: when a call is demanded, or two tools have one name.
    """
    _check(tools)
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


def one_call(choice: Choice | None) -> bool:
    """Whether only the first call of an answer counts."""
    return isinstance(choice, AutoChoice) and choice.disable_parallel_tool_use


def strict_tools(tools: Sequence[OfferedTool]) -> tuple[StrictTool, ...]:
    """Return the tools whose input is to be checked."""
    return tuple(
        StrictTool(tool.name, tool.input_schema, f"tools[{number}].input_schema")
        for number, tool in enumerate(tools)
        if tool.strict
    )


def _check(tools: Sequence[OfferedTool]) -> None:
    seen = set[str]()
    for number, tool in enumerate(tools):
        if tool.name in seen:
            field = f"tools[{number}].name"
            raise FieldError(f"{field}: there is a tool {tool.name} already", field=field)
        seen.add(tool.name)
