"""Text of errors as clients may show it: bounded, and without control characters."""

from expertctl.plain_text import replace_unsafe

MAX_TEXT = 1000


def printable(text: str) -> str:
    """Return a text that can be shown: bounded, without control characters."""
    shown = replace_unsafe(text[: MAX_TEXT + 1], "?").replace("\t", " ")
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"
