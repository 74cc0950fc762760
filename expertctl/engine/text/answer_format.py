"""Answer formats: finding code in an answer, and checking it against the requested format.

Code is found in the fenced code blocks of Markdown and between prose. Each function is linear in
the length of the text, or tries a bounded number of positions.

Only JSON is inferred from an expert or a prompt; that a prompt wants code would be a guess, so such
answers are not checked. A request may ask for Python explicitly; Python is parsed but never run.
The code blocks of an answer are checked, and prose around them is allowed. The answer itself is
never changed.
"""

import ast
import json
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from textwrap import dedent
from typing import Literal, NoReturn

from expertctl.schema.manifest import Manifest

MAX_JSON_PLACES = 32
"""Maximum number of brackets tried as the start of a JSON value."""

_BRACKET = re.compile(r"[\[\]{}]")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(.*)$")
_INFO = re.compile(r"\{?\.?([\w+#-]*)")
_PYTHON_LINE = re.compile(
    r"\s+\S|#|@\w|[)\]}]|(?:async\s+)?def\s|class\s"
    r"|(?:async\s+)?(?:for|with)\s.*[:(,\\]\s*(?:#.*)?$"
    r"|(?:if|elif|while|match)\s.*[:(\\]\s*(?:#.*)?$|(?:else|try|finally)\s*:|except\b.*:"
    r"|(?:import|from)\s+[\w.]+(?:\s+(?:import|as)\s.*|\s*(?:,.*)?)$"
    r"|(?:return|raise|assert|del|global|pass|print)\b\s*(?:[\w(\[{'\"-].*)?$"
    r"|[\w.\[\]'\", ]+\s*(?::\s*[\w.\[\], |]+\s*)?[-+*/%&|^@]?=(?!=)"
    r"|[\w.]+\("
)
_STATEMENT = re.compile(
    r"\s*(?:select|with|insert|update|delete|create|alter|drop|merge|values|explain|grant|begin"
    r"|truncate|replace|pragma)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced code block: its language in lower case, or ``""``, and its content."""

    language: str
    code: str


def iter_code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the fenced code blocks of a Markdown text; the end of the text closes the last one.

    See https://spec.commonmark.org/0.31.2/#fenced-code-blocks. Fences within list items may be
    indented further than the specification allows.
    """
    fence, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not fence:
            if found and not (found[1][0] == "`" and "`" in found[2]):
                info = _INFO.match(found[2])
                fence, language, lines = found[1], info[1].lower() if info else "", []
        elif found and found[1].startswith(fence) and not found[2].strip():
            yield CodeBlock(language, dedent("\n".join(lines)))
            fence = ""
        else:
            lines.append(line)
    if fence:
        yield CodeBlock(language, dedent("\n".join(lines)))


def find_language_blocks(text: str, languages: frozenset[str]) -> list[str]:
    """Return the code blocks with one of these languages."""
    return [block.code for block in iter_code_blocks(text) if block.language in languages]


def find_unnamed_blocks(text: str) -> list[str]:
    """Return the code blocks without a language."""
    return [block.code for block in iter_code_blocks(text) if not block.language]


def find_json(text: str) -> str | None:
    """Return the first JSON object or array in a text, or None; broken JSON is skipped."""
    decoder = json.JSONDecoder(parse_int=len, parse_float=len)
    brackets = _BRACKET.finditer(text)
    for _ in range(MAX_JSON_PLACES):
        begin = next((found.start() for found in brackets if found[0] in "{["), None)
        if begin is None:
            return None
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            if not _skip_nested_brackets(brackets):
                return None
        else:
            return text[begin:end]
    return None


def _skip_nested_brackets(brackets: Iterator[re.Match[str]]) -> bool:
    """Advance past the bracket that closes the open one; return whether there is one."""
    depth = 1
    for found in brackets:
        depth += 1 if found[0] in "{[" else -1
        if not depth:
            return True
    return False


def find_python(text: str) -> str | None:
    """Return the lines from the first to the last that looks like Python; None if none does."""
    lines = text.split("\n")
    found = [number for number, line in enumerate(lines) if _PYTHON_LINE.match(line)]
    begin = next((number for number in found if not lines[number][0].isspace()), None)
    return None if begin is None else "\n".join(lines[begin : found[-1] + 1])


def find_sql(text: str) -> str | None:
    """Return a text from its first SQL statement to its last semicolon, or else to a blank line."""
    lines = text.split("\n")
    begin = next((n for n, line in enumerate(lines) if _STATEMENT.match(line)), None)
    if begin is None:
        return None
    rest = lines[begin:]
    ends = [n for n, line in enumerate(rest) if line.rstrip().endswith(";")]
    blank = next((n for n, line in enumerate(rest) if not line.strip()), len(rest))
    return "\n".join(rest[: ends[-1] + 1] if ends else rest[:blank])


def extract_session_input(code: str) -> str:
    """Return the input of a Python session (``>>>``, ``...``); other code is returned unchanged."""
    if not code.lstrip().startswith(">>>"):
        return code
    typed = [line for line in code.split("\n") if line.startswith((">>>", "..."))]
    return "\n".join(line[4:] for line in typed)


AnswerFormat = Literal["json", "jsonl", "python"]

MAX_CHARACTERS = 200_000
"""Longer answers are not checked."""
_HEAD, _TAIL = 4_000, 1_000
"""Inspected parts of a long prompt: the task is before or after a pasted text."""

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
"""Code may read or write JSON, so a prompt that asks for code does not ask for a JSON answer."""
_PARSING = threading.Lock()
"""Warning filters are global to the process, so only one thread at a time changes them."""
_TAGS: Mapping[AnswerFormat, frozenset[str]] = {
    "json": frozenset({"json", "json5", "jsonc"}),
    "jsonl": frozenset({"json", "jsonl", "ndjson"}),
    "python": frozenset({"python", "py", "python3", "pycon"}),
}
_FORMAT_NAMES = {"json": "JSON", "jsonl": "JSON Lines", "python": "Python"}


@dataclass(frozen=True, slots=True)
class FormatCheck:
    """The result of checking an answer; ``passed`` is None if nothing was checked."""

    passed: bool | None
    problem: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The problem as a warning for the user."""
        return (self.problem,) if self.problem else ()


UNCHECKED = FormatCheck(None)


def worst_check(found: Iterable[FormatCheck]) -> FormatCheck:
    """Return the first failed check, or else the first undecided one, or else the first."""
    return min(found, key=lambda one: {False: 0, None: 1, True: 2}[one.passed])


def expected_format(prompt: str, experts: Sequence[Manifest]) -> AnswerFormat | None:
    """Return the format requested by the last expert, or else by the prompt.

    Later experts of a chain may change the format of earlier ones, so only the last one counts.
    """
    declared = _declared_format(experts[-1]) if experts else None
    return declared if declared or len(experts) > 1 else _requested_format(prompt)


def check_answer_format(text: str, answer_format: AnswerFormat | None) -> FormatCheck:
    """Check that an answer is not empty and has the requested format, if any."""
    if not text.strip():
        return FormatCheck(False, "the answer is empty")
    if answer_format is None or len(text) > MAX_CHARACTERS:
        return UNCHECKED
    fault = _find_first_problem(text, answer_format)
    return (
        FormatCheck(False, f"the answer is not {_FORMAT_NAMES[answer_format]}: {fault}")
        if fault
        else FormatCheck(True)
    )


def ignore_truncation(found: FormatCheck, *, finish_reason: str) -> FormatCheck:
    """Return a check result, undecided if a failed answer was cut at the token limit."""
    if found.passed is not False or finish_reason != "length":
        return found
    return FormatCheck(None, "the answer was cut at the token limit, so its format is not checked")


def _declared_format(manifest: Manifest) -> AnswerFormat | None:
    """Return the answer format of an expert, from its task or its evaluation."""
    measured = any(entry.metric == "json" for entry in manifest.evaluation)
    return "json" if measured or manifest.routing.task == "json_parsing" else None


def _requested_format(prompt: str) -> AnswerFormat | None:
    """Return the format that a prompt requests; questions and prompts about code request none."""
    text = prompt if len(prompt) <= _HEAD + _TAIL else f"{prompt[:_HEAD]}\n{prompt[-_TAIL:]}"
    if _QUESTION.match(text):
        return None
    found = _JSON.search(text)
    if found is None or _CODE.search(text):
        return None
    return "jsonl" if (found[1] or found[2]).lower() == "jsonl" else "json"


def _find_first_problem(text: str, form: AnswerFormat) -> str:
    """Return the problem of an answer: every code block with a matching language must be valid.

    Without such a block, one valid block, answer or part of the answer is enough.
    """
    named = find_language_blocks(text, _TAGS[form])
    if named:
        return next(filter(None, (_find_problem(block, form) for block in named)), "")
    within = _IN_PROSE[form](text)
    places = [text, *find_unnamed_blocks(text), *([within] if within else [])]
    faults = list(takewhile(bool, (_find_problem(place, form) for place in places)))
    return faults[0] if len(faults) == len(places) else ""


def _find_problem(text: str, form: AnswerFormat) -> str:
    try:
        _READERS[form](text)
    except SyntaxError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or "nested too deeply"
    return ""


def _read_json(text: str) -> None:
    """Read one JSON value; its numbers may have any size."""
    json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _read_json_lines(text: str) -> None:
    for line in filter(str.strip, text.splitlines()):
        _read_json(line)


def _read_python(text: str) -> None:
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in string literals
        ast.parse(extract_session_input(text))


def _find_json_lines(text: str) -> str | None:
    """Return the lines that look like JSON objects or arrays; None if there are none."""
    lines = [line for line in text.splitlines() if line.lstrip().startswith(("{", "["))]
    return "\n".join(lines) or None


_READERS: Mapping[AnswerFormat, Callable[[str], None]] = {
    "json": _read_json,
    "jsonl": _read_json_lines,
    "python": _read_python,
}
_IN_PROSE: Mapping[AnswerFormat, Callable[[str], str | None]] = {
    "json": find_json,
    "jsonl": _find_json_lines,
    "python": find_python,
}
"""Finds code of each format between prose."""
