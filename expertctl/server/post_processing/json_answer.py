"""Answers that must be JSON and nothing else, so that a program can read them as they are.

Anything around the JSON is a fault: a client that asks for a form parses the whole answer. One
Markdown fence and text after the JSON are removed before that (`json_filter`).
"""

import json
from dataclasses import dataclass
from typing import NoReturn

from expertctl.engine.answer_form import MAX_CHARACTERS, Checked
from expertctl.schema.strict_json import JsonValue

_LONGEST_INTEGER = 4000
"""Digits of an integer that are read exactly; a longer one is read as the nearest float."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The JSON value that an answer is."""

    value: JsonValue


def check_value(text: str) -> Checked:
    """Check that an answer is one JSON value."""
    found = read_answer(text)
    return found if isinstance(found, Checked) else Checked(True)


def check_object(text: str) -> Checked:
    """Check that an answer is one JSON object."""
    found = read_answer(text)
    if isinstance(found, Checked):
        return found
    if isinstance(found.value, dict):
        return Checked(True)
    return Checked(False, "the answer is JSON, but no object")


def read_answer(text: str) -> Answer | Checked:
    """Return the JSON value of an answer, or why it has none."""
    if len(text) > MAX_CHARACTERS:
        return Checked(None, f"the answer is not checked: over {MAX_CHARACTERS} characters")
    if not text.strip():
        return Checked(False, "the answer is empty")
    try:
        return Answer(json.loads(text, parse_int=_integer, parse_constant=_refuse))
    except ValueError as error:
        return Checked(False, f"the answer is not JSON: {error}")
    except RecursionError:
        return Checked(False, "the answer is not JSON that can be read: it is nested too deep")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
