"""Texts for the user: foreign text made safe to print, and callbacks for notices.

Unsafe characters are controls, lone surrogates, and those that reorder the text around them: bidi
embeddings, overrides and isolates (Unicode Technical Report 36, section 2.5; CVE-2021-42574).
Every other format character stays: words in Persian and emoji of several parts use joiners, and
right-to-left text uses marks.
"""

import re
from collections.abc import Callable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE_PATTERN = re.compile(f"[{_UNSAFE}]")
_LINE_END = re.compile("[\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029]")


def replace_unsafe(text: str, replacement: str = REPLACEMENT) -> str:
    """Return a text of the same length without unsafe characters; line feeds and tabs stay."""
    return _UNSAFE_PATTERN.sub(replacement, text)


def to_single_line(text: str, replacement: str = REPLACEMENT) -> str:
    """Return a text of the same length on one line: tabs and line ends become spaces.

    A second line of foreign text could be mistaken for one of ours.
    """
    return replace_unsafe(_LINE_END.sub(" ", text), replacement)


_SECRET = re.compile(r"(xp[tsk]_|Bearer\s+|Basic\s+)[\w.~+/=-]{4,}", re.IGNORECASE)


def hide_secrets(text: str) -> str:
    """Return a text with ``***`` in place of tokens, API keys and HTTP credentials."""
    return _SECRET.sub(r"\1***", text)


MAX_ERROR_TEXT = 1000


def sanitise_error_text(text: str) -> str:
    """Return an error text that clients may show: bounded, without control characters."""
    shown = replace_unsafe(text[: MAX_ERROR_TEXT + 1], "?").replace("\t", " ")
    return shown if len(shown) <= MAX_ERROR_TEXT else f"{shown[:MAX_ERROR_TEXT]}…"


Notify = Callable[[str], None]
"""Called with a sentence for the user, who waits for something."""
WARNING_PREFIX = "warning: "
"""Begins a sentence that is a warning."""


CountProgress = Callable[[int, int], None]
"""Called with the number of items done, and of all."""


def ignore_count(done: int, total: int) -> None:
    """Ignore the numbers."""


def ignore_notification(_: str) -> None:
    """Ignore the sentence."""
