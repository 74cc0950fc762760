"""Text of errors as clients may show it: bounded, and without control characters."""

MAX_TEXT = 1000


def printable(text: str) -> str:
    """Return a text that can be shown: bounded, without control characters."""
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text[: MAX_TEXT + 1])
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"
