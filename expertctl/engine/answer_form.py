"""The form that an answer must have, where an expert or the prompt calls for one, and the check.

Only what can be checked without doubt is: JSON is read, Python is parsed and never run. In doubt,
no form is called for. The answer itself is never changed.
"""

import ast
import json
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

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
_PYTHON = re.compile(
    r"\b(?:write|implement|create|fix|refactor|debug|code)\b[^.?!\n]{0,60}\bpython\b"
    r"|\bpython\s(?:function|class|script|program|code|method)\b",
    re.I,
)
_PARSING = threading.Lock()
"""Warning filters belong to the whole process, so one thread at a time changes them."""
_FENCE = "```"
_TAGS: Mapping[Form, frozenset[str]] = {
    "json": frozenset({"", "json"}),
    "jsonl": frozenset({"", "json", "jsonl"}),
    "python": frozenset({"", "python", "py", "python3"}),
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
    """Check an answer: it is not empty, and of the form that is called for, if any."""
    if not text.strip():
        return Checked(False, "the answer is empty")
    if form is None or len(text) > MAX_CHARACTERS:
        return UNCHECKED
    faults = [_fault(part, form) for part in _parts(text, form)]
    fault = next(filter(None, faults), "")
    return Checked(False, f"the answer is not {_SHOWN[form]}: {fault}") if fault else Checked(True)


def _declared(manifest: Manifest) -> Form | None:
    """Return the form of an expert's answers: its task says it, or how it was evaluated."""
    measured = any(entry.metric == "json" for entry in manifest.evaluation)
    return "json" if measured or manifest.routing.task == "json_parsing" else None


def _asked(prompt: str) -> Form | None:
    """Return the form that a prompt asks for; a question about JSON or Python asks for none."""
    text = prompt if len(prompt) <= _HEAD + _TAIL else f"{prompt[:_HEAD]}\n{prompt[-_TAIL:]}"
    if _QUESTION.match(text):
        return None
    if _PYTHON.search(text):
        return "python"
    found = _JSON.search(text)
    if found is None:
        return None
    return "jsonl" if (found[1] or found[2]).lower() == "jsonl" else "json"


def _parts(text: str, form: Form) -> Iterable[str]:
    """Return what must be of the form: the code blocks of that language, else the whole answer."""
    blocks = [code for tag, code in code_blocks(text) if tag in _TAGS[form]]
    return blocks or [text]


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the code blocks that are closed, each with its language."""
    tag, lines = None, list[str]()
    for line in text.split("\n"):
        if not line.startswith(_FENCE):
            lines.append(line)
        elif tag is None:
            tag, lines = line.removeprefix(_FENCE).strip().split(" ")[0].lower(), []
        elif line.strip() == _FENCE:
            yield tag, "\n".join(lines)
            tag = None


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
        ast.parse(text)


_READERS: Mapping[Form, Callable[[str], None]] = {
    "json": _read_json,
    "jsonl": _read_lines,
    "python": _read_python,
}
