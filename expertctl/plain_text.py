"""Which characters of foreign text must not reach a terminal, a message or a stream.

These are the controls, halves of characters, and the characters that reorder the text around them:
bidi embeddings, overrides and isolates (Unicode Technical Report 36, section 2.5; CVE-2021-42574).
Every other format character stays: words in Persian and emoji of several parts are made with
joiners, and right-to-left text with marks.
"""

import re

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_UNSAFE}]")
_LINE_END = re.compile("[\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029]")


def replace_unsafe(text: str, by: str = REPLACEMENT) -> str:
    """Return a text of the same length; line feeds and tabs stay."""
    return _IN_TEXT.sub(by, text)


def one_line(text: str, by: str = REPLACEMENT) -> str:
    """Return a text of the same length on one line: tabs and what ends a line become spaces.

    A second line of foreign text could pose as one of ours.
    """
    return replace_unsafe(_LINE_END.sub(" ", text), by)
