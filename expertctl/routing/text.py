"""Tokenisation and normalisation of texts: prompts, keywords and examples are read the same way.

Only the beginning of a very long text is read, as a prompt states its request early.

`fold_confusables` removes invisible characters and replaces letters that look like Latin ones. A
word that mixes alphabets is read in Latin letters, as people see it; words of one alphabet, such as
Russian and Greek ones, stay.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHARACTERS = 8192
"""How many characters of a text the router reads."""
_MAX_SHOWN_CHARACTERS = 60

_WORD = re.compile(r"[^\W_]+(?:[.'+#-]+[^\W_]+)*[+#]*")
_STOP_WORDS = """
a about all am an and any are as at be been but by can could did do does for from get give had has
have he her his how i if in into is it its just let like make may me my no not of on or our out
please shall she should show so some tell than that the their them then there these they this those
to up us was we were what when where which who why will with would you your
"""
_LIST_SEPARATOR = re.compile("[,;=]")
_SENTENCE_END = re.compile(r"[.?!]|\n\n")
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that carry no information about a task."""


def normalise(text: str) -> str:
    """Return the beginning of a text in NFKC and lower case."""
    return unicodedata.normalize("NFKC", text[:MAX_CHARACTERS]).casefold()


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text; ``is_data`` if it looks like the data of a request, not the request.

    Items of a list, ``key = value`` pairs and what follows a colon look like data.
    """

    text: str
    is_data: bool


def read_words(text: str) -> list[Word]:
    """Return the words of a text in order, normalised, with whether they look like data."""
    spelled = normalise(text)
    matches = list(_WORD.finditer(spelled))
    ends = [match.start() for match in matches[1:]] + [len(spelled)]
    words, before, after_colon = [], "", False
    for match, end in zip(matches, ends, strict=False):
        after = spelled[match.end() : end]
        after_colon = ":" in before or (after_colon and not _SENTENCE_END.search(before))
        words.append(
            Word(match.group(), after_colon or bool(_LIST_SEPARATOR.search(before + after)))
        )
        before = after
    return words


def is_number(word: str) -> bool:
    """Tell whether a word is a number, possibly with a unit."""
    return word[0].isdigit()


def split_words(text: str) -> list[str]:
    """Return the words of a text in order, normalised."""
    return _WORD.findall(normalise(text))


def contains_phrase(words: Sequence[str], phrase: str) -> bool:
    """Tell whether a list of words contains a phrase as whole words."""
    wanted = split_words(phrase)
    if not wanted:
        return False
    starts = (i for i, word in enumerate(words) if word == wanted[0])
    return any(list(words[i : i + len(wanted)]) == wanted for i in starts)


def truncate(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def has_content_word(phrase: str) -> bool:
    """Tell whether a phrase has a word that is not a stop word."""
    return any(word not in STOP_WORDS for word in split_words(phrase))


_CONFUSABLES = """
a 0430 03b1 0251; b 0184; c 0441 03f2 1d04; d 0501; e 0435 0451 0454 212e; g 0581; h 04bb; i 0456
0457 03b9 0131; j 0458; k 03ba 043a 049b; l 04cf; n 0578 03b7 043f; o 043e 03bf 0585 03c3; p 0440
03c1; q 051b; r 0433; s 0455; t 0442 03c4; u 03c5 057d 0446; v 03bd 0475; w 051d 0461 03c9; x 0445
03c7; y 0443 04af 03b3; A 0410 0391; B 0412 0392; C 0421; E 0415 0395; F 03dc; H 041d 0397; I 0406
0399; J 0408; K 041a 039a; M 041c 039c; N 039d; O 041e 039f; P 0420 03a1; Q 051a; S 0405; T 0422
03a4; W 051c; X 0425 03a7; Y 0423 03a5 04ae; Z 0396
"""
"""Latin letter → code points of similar letters in Cyrillic, Greek and other scripts."""

_TO_LATIN = {
    int(code, 16): entry.split()[0]
    for entry in _CONFUSABLES.replace("\n", " ").split(";")
    for code in entry.split()[1:]
}
_LATIN = re.compile(r"[A-Za-z]")
_OTHER = re.compile(r"[\u0370-\u052f]")
_MIXED = re.compile(r"[A-Za-z][\u0370-\u052f]|[\u0370-\u052f][A-Za-z]")
_LETTERS = re.compile(r"[^\W\d_]+")
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160"
    "\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ud800-\udfff\ue000-\uf8ff"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U0010ffff]"
)
_LINE_BREAK = re.compile("\r\n?|[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")
_OVERLAID = re.compile(r"[\u0300-\u036f\u20d0-\u20ff]")
"""Marks that NFKC does not combine with a letter: overlaid strokes, or stacked accents."""


def fold_confusables(text: str) -> str:
    """Return a text as people see it: in NFKC, without confusable and invisible characters."""
    if text.isascii():
        return text if text.isprintable() else _strip_invisible(text)
    shown = _OVERLAID.sub("", _strip_invisible(unicodedata.normalize("NFKC", text)))
    if shown.isascii():
        return shown
    disguised = _MIXED.search(shown) is not None
    return _LETTERS.sub(
        _fold_if_latin if disguised or _is_latin(shown) else _fold_mixed_word, shown
    )


def find_confusable(text: str) -> str | None:
    """Return a word that reads differently from how it looks; None when there is none."""
    if text.isascii():
        return None
    for word in unicodedata.normalize("NFKC", text).split():
        shown = _strip_invisible(word)
        if (shown != word and _LATIN.search(word)) or _LETTERS.sub(
            _fold_mixed_word, shown
        ) != shown:
            return _LETTERS.sub(_fold_mixed_word, shown)
    return None


def _strip_invisible(text: str) -> str:
    return _INVISIBLE.sub("", _LINE_BREAK.sub("\n", text))


def _is_latin(text: str) -> bool:
    return len(_LATIN.findall(text)) > len(_OTHER.findall(text))


def _fold_mixed_word(match: re.Match[str]) -> str:
    """Transliterate a word with letters of two alphabets to Latin."""
    word = match.group()
    return word.translate(_TO_LATIN) if _LATIN.search(word) else word


def _fold_if_latin(match: re.Match[str]) -> str:
    """Transliterate a word to Latin if all of it looks Latin."""
    latin = match.group().translate(_TO_LATIN)
    return latin if latin.isascii() else _fold_mixed_word(match)
