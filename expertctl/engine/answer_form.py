"""The form that an answer must have, where an expert or the prompt asks for one, and the check.

Only JSON is asked for that way: that a prompt wants code is a guess, so the answer is not checked.
A request may ask for Python explicitly; Python is parsed and never run. The code blocks of an
answer are checked, and prose around them is no fault. The answer itself is never changed.
"""

import ast
import json
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NoReturn

from expertctl.engine.embedded_code import (
    json_in_prose,
    named_blocks,
    python_in_prose,
    session_input,
    unnamed_blocks,
)
from expertctl.schema.manifest import Manifest

Form = Literal["json", "jsonl", "python"]

MAX_CHARACTERS = 200_000
"""A longer answer is not checked."""
_HEAD, _TAIL = 4_000, 1_000
"""How much of a long prompt is looked at: the task stands before a text or behind it."""

_QUESTION = re.compile(r"\s*(?:how|what|why|when|where|who|which|explain|describe)\b", re.I)
_JSON = re.compile(
    r"\b(?:as|in|into|to)\s(?:a\s|an\s|valid\s|strict\s|one\s){0,3}(json|jsonl)\b"
    r"|\b(?:return|respond|reply|answer|output|produce|generate|print|give)\b[^.?!\n]{0,30}"
    r"\b(json|jsonl)\b(?!\sschema)",
    re.I,
)
_LANGUAGE = (
    r"python|javascript|typescript|java|rust|golang|kotlin|swift|ruby|php|bash|powershell|perl"
    r"|haskell|scala|c\+\+|c#|sql"
)
_PIECE = r"function|class|script|program|code|method|snippet|module|query|endpoint|unit\stests?"
_CODE = re.compile(
    r"\b(?:write|implement|create|build|develop|code|fix|refactor|debug|complete|generate|make)\b"
    rf"[^.?!\n]{{0,60}}\b(?:{_PIECE}|{_LANGUAGE})(?!\w)"
    rf"|\b(?:{_LANGUAGE})\s(?:{_PIECE})\b",
    re.I,
)
"""Code may read or write JSON, so a prompt that asks for code asks for no JSON in its answer."""
_PARSING = threading.Lock()
"""Warning filters belong to the whole process, so one thread at a time changes them."""
_TAGS: Mapping[Form, frozenset[str]] = {
    "json": frozenset({"json", "json5", "jsonc"}),
    "jsonl": frozenset({"json", "jsonl", "ndjson"}),
    "python": frozenset({"python", "py", "python3", "pycon"}),
}
_SHOWN = {"json": "JSON", "jsonl": "JSON Lines", "python": "Python"}


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check of an answer came to; ``passed`` is None where nothing was to be checked."""

    passed: bool | None
    problem: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know."""
        return (self.problem,) if self.problem else ()


UNCHECKED = Checked(None)


def worst(found: Iterable[Checked]) -> Checked:
    """Return the first check that failed, else the first that is open, else the first."""
    return min(found, key=lambda one: {False: 0, None: 1, True: 2}[one.passed])


def wanted_form(prompt: str, experts: Sequence[Manifest]) -> Form | None:
    """Return the form that is called for: by the last expert, else by the prompt.

    Later experts of a chain may change what earlier ones make, so only the last one counts.
    """
    declared = _declared(experts[-1]) if experts else None
    return declared if declared or len(experts) > 1 else _asked(prompt)


def checked(text: str, form: Form | None) -> Checked:
    """Check an answer: it is not empty, and of the form that is asked for, if any."""
    if not text.strip():
        return Checked(False, "the answer is empty")
    if form is None or len(text) > MAX_CHARACTERS:
        return UNCHECKED
    fault = _first_fault(text, form)
    return Checked(False, f"the answer is not {_SHOWN[form]}: {fault}") if fault else Checked(True)


def excuse_cut_answer(found: Checked, *, finish_reason: str) -> Checked:
    """Return a check; an answer that was cut at the limit of tokens is not blamed for its end."""
    if found.passed is not False or finish_reason != "length":
        return found
    return Checked(None, "the answer was cut at the limit of tokens, so its form is not checked")


def _declared(manifest: Manifest) -> Form | None:
    """Return the form of an expert's answers: its task says it, or how it was evaluated."""
    measured = any(entry.metric == "json" for entry in manifest.evaluation)
    return "json" if measured or manifest.routing.task == "json_parsing" else None


def _asked(prompt: str) -> Form | None:
    """Return the form that a prompt asks for; a question, or one about code, asks for none."""
    text = prompt if len(prompt) <= _HEAD + _TAIL else f"{prompt[:_HEAD]}\n{prompt[-_TAIL:]}"
    if _QUESTION.match(text):
        return None
    found = _JSON.search(text)
    if found is None or _CODE.search(text):
        return None
    return "jsonl" if (found[1] or found[2]).lower() == "jsonl" else "json"


def _first_fault(text: str, form: Form) -> str:
    """Return what is wrong with an answer: every code block that names the language counts.

    Without such a block it is enough if another block, the answer, or a part of it is right.
    """
    named = named_blocks(text, _TAGS[form])
    if named:
        return next(filter(None, (_fault(block, form) for block in named)), "")
    within = _IN_PROSE[form](text)
    places = [text, *unnamed_blocks(text), *([within] if within else [])]
    faults = list(takewhile(bool, (_fault(place, form) for place in places)))
    return faults[0] if len(faults) == len(places) else ""


def _fault(text: str, form: Form) -> str:
    try:
        _READERS[form](text)
    except SyntaxError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or "nested too deep"
    return ""


def _read_json(text: str) -> None:
    """Read one JSON value; its numbers may have any size."""
    json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _read_lines(text: str) -> None:
    for line in filter(str.strip, text.splitlines()):
        _read_json(line)


def _read_python(text: str) -> None:
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in its strings
        ast.parse(session_input(text))


def _lines_in_prose(text: str) -> str | None:
    """Return the lines that look like JSON objects or arrays; None if there is none."""
    lines = [line for line in text.splitlines() if line.lstrip().startswith(("{", "["))]
    return "\n".join(lines) or None


_READERS: Mapping[Form, Callable[[str], None]] = {
    "json": _read_json,
    "jsonl": _read_lines,
    "python": _read_python,
}
_IN_PROSE: Mapping[Form, Callable[[str], str | None]] = {
    "json": json_in_prose,
    "jsonl": _lines_in_prose,
    "python": python_in_prose,
}
"""Form → what finds code of it between prose."""
