"""Find code in an answer: the fenced code blocks of its Markdown, and code between prose.

Each function is linear in the length of the text, or tries a bounded number of places.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

MAX_JSON_PLACES = 32
"""How many brackets of an answer are tried as the beginning of a JSON value."""

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


def code_blocks(text: str) -> Iterator[CodeBlock]:
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


def named_blocks(text: str, languages: frozenset[str]) -> list[str]:
    """Return the code blocks that name one of these languages."""
    return [block.code for block in code_blocks(text) if block.language in languages]


def unnamed_blocks(text: str) -> list[str]:
    """Return the code blocks that name no language."""
    return [block.code for block in code_blocks(text) if not block.language]


def json_in_prose(text: str) -> str | None:
    """Return the first JSON object or array in a text, not one within broken JSON; else None."""
    decoder = json.JSONDecoder(parse_int=len, parse_float=len)
    brackets = _BRACKET.finditer(text)
    for _ in range(MAX_JSON_PLACES):
        begin = next((found.start() for found in brackets if found[0] in "{["), None)
        if begin is None:
            return None
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            if not _skip_nested(brackets):
                return None
        else:
            return text[begin:end]
    return None


def _skip_nested(brackets: Iterator[re.Match[str]]) -> bool:
    """Go on behind the bracket that closes an open one; return whether there is one."""
    depth = 1
    for found in brackets:
        depth += 1 if found[0] in "{[" else -1
        if not depth:
            return True
    return False


def python_in_prose(text: str) -> str | None:
    """Return the lines from the first to the last that looks like Python; None if none does."""
    lines = text.split("\n")
    found = [number for number, line in enumerate(lines) if _PYTHON_LINE.match(line)]
    begin = next((number for number in found if not lines[number][0].isspace()), None)
    return None if begin is None else "\n".join(lines[begin : found[-1] + 1])


def sql_in_prose(text: str) -> str | None:
    """Return a text from its first SQL statement to its last semicolon, else to a blank line."""
    lines = text.split("\n")
    begin = next((n for n, line in enumerate(lines) if _STATEMENT.match(line)), None)
    if begin is None:
        return None
    rest = lines[begin:]
    ends = [n for n, line in enumerate(rest) if line.rstrip().endswith(";")]
    blank = next((n for n, line in enumerate(rest) if not line.strip()), len(rest))
    return "\n".join(rest[: ends[-1] + 1] if ends else rest[:blank])


def session_input(code: str) -> str:
    """Return what was typed in a Python session (``>>>``, ``...``); other code as it is."""
    if not code.lstrip().startswith(">>>"):
        return code
    typed = [line for line in code.split("\n") if line.startswith((">>>", "..."))]
    return "\n".join(line[4:] for line in typed)
