"""`AnswerCheck`: checks the form of a whole answer of a conversation.

Generation cannot be forced into a form, so the form is checked afterwards: the spoken text against
the schema or format of the request, or where it names none, against the form that experts or the
prompt call for; a call against the schema of its tool, if the tool is ``strict``. Thoughts are not
checked, nor is the spoken text of an answer with calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertctl.engine.answer_form import UNCHECKED, Checked, worst
from expertctl.engine.serving.job import Check
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.answer_reader import Reading
from expertctl.server.field_error import FieldError
from expertctl.server.json_filter import json_of
from expertctl.server.post_processing.json_schema import AnswerSchema, check_bounds, read_schema
from expertctl.server.tool_calls.call import Call

Schemas = Mapping[str, AnswerSchema]
"""Strict tool → the schema that its arguments must fit."""


@dataclass(frozen=True, slots=True)
class StrictTool:
    """A tool whose arguments must fit its schema, and the field that holds the schema."""

    name: str
    schema: JsonObject
    field: str


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Checks the answers to one request."""

    reading: Reading
    form: Check | None
    """The check of the spoken text; None: the form that experts or the prompt call for."""
    tools: Schemas

    def __call__(self, text: str) -> Checked | str:
        """Check a whole answer, as the model wrote it; or return the part that is to be checked."""
        answer = self.reading.whole(text)
        if answer.calls:
            found = [self._fits(call) for call in answer.calls if call.name in self.tools]
            return worst(found) if found else UNCHECKED
        if self.form is None:
            return answer.said
        said = self.reading.before + answer.said
        return self.form(json_of(said) if self.reading.json_asked else said)

    def _fits(self, call: Call) -> Checked:
        what = f"what {call.name} is called with"
        return self.tools[call.name].check_value(call.arguments, what=what)


def answer_check(
    reading: Reading, *, form: Check | None, tools: Sequence[StrictTool]
) -> AnswerCheck | None:
    """Return the check; None if there are neither a form nor tools, and the base never thinks.

    Raises:
        FieldError: when the schema of a tool cannot be used.
    """
    schemas = _schemas(tools)
    needed = form is not None or reading.tools or reading.thinks
    return AnswerCheck(reading, form, schemas) if needed else None


def _schemas(tools: Sequence[StrictTool]) -> Schemas:
    """Read the schemas; the bounds of one schema hold for all of them together, too."""
    try:
        check_bounds(list[JsonValue](tool.schema for tool in tools), where="what tools take")
    except UsageError as error:
        raise FieldError(error.message, field="tools", hint=error.hint) from error
    return {tool.name: _schema(tool) for tool in tools}


def _schema(tool: StrictTool) -> AnswerSchema:
    try:
        return read_schema(tool.schema, where=tool.field)
    except UsageError as error:
        raise FieldError(error.message, field=tool.field, hint=error.hint) from error
