"""The tools of a chat call: functions that the chat template describes to the model.

Generation cannot be constrained yet, so a request that demands a call is refused. The arguments of
a ``strict`` tool are checked afterwards, against its schema.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.schema.strict_json import JsonObject
from expertctl.server.answer_check import StrictTool
from expertctl.server.field_error import FieldError

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"

_NO_ARGUMENTS: JsonObject = {"type": "object", "additionalProperties": False}

FunctionName = Annotated[str, Meta(pattern=_NAME)]


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """What a function is called, what it is for, and the JSON schema of its arguments.

    Without a schema there are no arguments. ``strict``: whether they fit is looked at afterwards.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_json(self) -> JsonObject:
        """Return the definition as templates read it."""
        given: JsonObject = {"description": self.description, "parameters": self.parameters}
        said = {name: value for name, value in given.items() if value is not None}
        return {"name": self.name, **said}


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    function: Function
    type: Literal["function"] = "function"

    def to_json(self) -> JsonObject:
        """Return the tool as templates read it."""
        return {"type": self.type, "function": self.function.to_json()}


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A function by its name."""

    name: FunctionName


class FunctionChoice(Struct, frozen=True, tag_field="type", tag="function"):
    """The demand that this function be called."""

    function: NamedFunction


class CustomChoice(Struct, frozen=True, tag_field="type", tag="custom"):
    """The demand that a custom tool be called."""


class AllowedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the tools that may be called now."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True):
    """Which of the tools may be called now."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(max_length=128)]


class AllowedChoice(
    Struct, frozen=True, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True
):
    """Fewer tools than were given."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice


def offered(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Tool, ...]:
    """Return the tools that the model is told of.

    Raises:
        FieldError: when a call is demanded, an allowed tool is missing, or two have one name.
    """
    _check_names([tool.function.name for tool in tools])
    match choice:
        case None | "auto":
            return tuple(tools)
        case "none":
            return ()
        case AllowedChoice(allowed_tools=allowed) if allowed.mode == "auto":
            return _allowed(tools, allowed)
        case "required" | FunctionChoice() | CustomChoice() | AllowedChoice():
            raise FieldError(
                "tool_choice: no call can be forced, since no text can be",
                field="tool_choice",
                hint='give "auto" or "none", and say in the messages which tool is wanted',
            )


def _check_names(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            field = f"tools[{number}].function.name"
            raise FieldError(f"{field}: another tool is called {name!r}", field=field)


def strict_tools(tools: Sequence[Tool]) -> tuple[StrictTool, ...]:
    """Return the tools whose arguments are to be checked."""
    return tuple(
        StrictTool(
            tool.function.name,
            _NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters,
            f"tools[{number}].function.parameters",
        )
        for number, tool in enumerate(tools)
        if tool.function.strict
    )


def _allowed(tools: Sequence[Tool], allowed: AllowedTools) -> tuple[Tool, ...]:
    names = {one.function.name for one in allowed.tools}
    unknown = sorted(names - {tool.function.name for tool in tools})
    if unknown:
        raise FieldError(
            f"tool_choice.allowed_tools.tools: {unknown[0]} is not one of the tools",
            field="tool_choice.allowed_tools.tools",
            hint="name functions that are given in tools",
        )
    return tuple(tool for tool in tools if tool.function.name in names)
