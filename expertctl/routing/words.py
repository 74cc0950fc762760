"""Words of a text: how the router reads prompts, keywords and examples, always the same way.

Only the beginning of a very long text is read; a prompt says what it wants early.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHARACTERS = 8192
"""How much of a text the router looks at."""

_WORD = re.compile(r"[^\W_]+(?:[.'+#-]+[^\W_]+)*[+#]*")
_STOP_WORDS = """
a about all am an and any are as at be been but by can could did do does for from get give had has
have he her his how i if in into is it its just let like make may me my no not of on or our out
please shall she should show so some tell than that the their them then there these they this those
to up us was we were what when where which who why will with would you your
"""
_LIST_MARK = re.compile("[,;=]")
_SENTENCE_END = re.compile(r"[.?!]|\n\n")
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that say nothing about a task."""


def normalise(text: str) -> str:
    """Return the beginning of a text in one spelling: NFKC, lower case."""
    return unicodedata.normalize("NFKC", text[:MAX_CHARACTERS]).casefold()


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text; ``data`` when it looks like what a request is about, not the request.

    Items of a list, ``key = value`` pairs and what follows a colon look like data.
    """

    text: str
    data: bool


def read_words(text: str) -> list[Word]:
    """Return the words of a text, in order, in one spelling."""
    spelled = normalise(text)
    matches = list(_WORD.finditer(spelled))
    ends = [match.start() for match in matches[1:]] + [len(spelled)]
    words, before, after_colon = [], "", False
    for match, end in zip(matches, ends, strict=False):
        after = spelled[match.end() : end]
        after_colon = ":" in before or (after_colon and not _SENTENCE_END.search(before))
        words.append(Word(match.group(), after_colon or bool(_LIST_MARK.search(before + after))))
        before = after
    return words


def is_number(word: str) -> bool:
    """Tell whether a word is a number, perhaps with a unit."""
    return word[0].isdigit()


def words_of(text: str) -> list[str]:
    """Return the words of a text, in order, in one spelling."""
    return _WORD.findall(normalise(text))


def contains(words: Sequence[str], phrase: str) -> bool:
    """Tell whether a phrase stands in a list of words, as whole words."""
    wanted = words_of(phrase)
    if not wanted:
        return False
    starts = (i for i, word in enumerate(words) if word == wanted[0])
    return any(list(words[i : i + len(wanted)]) == wanted for i in starts)


def says_something(phrase: str) -> bool:
    """Tell whether a phrase has a word beyond the stop words."""
    return any(word not in STOP_WORDS for word in words_of(phrase))
