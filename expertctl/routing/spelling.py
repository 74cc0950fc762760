"""One spelling of a text: nothing invisible, and no letter that only looks like another one.

A word that mixes alphabets is read in Latin letters, as people see it; words of one alphabet stay,
so Russian and Greek are what they are.
"""

import re
import unicodedata

_LOOK_ALIKES = """
a 0430 03b1 0251; b 0184; c 0441 03f2 1d04; d 0501; e 0435 0451 0454 212e; g 0581; h 04bb; i 0456
0457 03b9 0131; j 0458; k 03ba 043a 049b; l 04cf; n 0578 03b7 043f; o 043e 03bf 0585 03c3; p 0440
03c1; q 051b; r 0433; s 0455; t 0442 03c4; u 03c5 057d 0446; v 03bd 0475; w 051d 0461 03c9; x 0445
03c7; y 0443 04af 03b3; A 0410 0391; B 0412 0392; C 0421; E 0415 0395; F 03dc; H 041d 0397; I 0406
0399; J 0408; K 041a 039a; M 041c 039c; N 039d; O 041e 039f; P 0420 03a1; Q 051a; S 0405; T 0422
03a4; W 051c; X 0425 03a7; Y 0423 03a5 04ae; Z 0396
"""
"""Latin letter → code points of Cyrillic, Greek and others that look like it."""

_LATIN_OF = {
    int(code, 16): entry.split()[0]
    for entry in _LOOK_ALIKES.replace("\n", " ").split(";")
    for code in entry.split()[1:]
}
_LATIN = re.compile(r"[A-Za-z]")
_OTHER = re.compile(r"[\u0370-\u052f]")
_MIXED = re.compile(r"[A-Za-z][\u0370-\u052f]|[\u0370-\u052f][A-Za-z]")
_WORD = re.compile(r"[^\W\d_]+")
_UNSEEN = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160"
    "\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ud800-\udfff\ue000-\uf8ff"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U0010ffff]"
)
_BREAK = re.compile("\r\n?|[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")
_OVERLAID = re.compile(r"[\u0300-\u036f\u20d0-\u20ff]")
"""Marks that stay apart from a letter in NFKC: strokes through it, or heaps of accents."""


def plain(text: str) -> str:
    """Return a text as people see it: in one spelling, without what cannot be seen."""
    if text.isascii():
        return text if text.isprintable() else _seen(text)
    shown = _OVERLAID.sub("", _seen(unicodedata.normalize("NFKC", text)))
    if shown.isascii():
        return shown
    disguised = _MIXED.search(shown) is not None
    return _WORD.sub(_as_seen if disguised or _is_latin(shown) else _in_latin, shown)


def hidden(text: str) -> str | None:
    """Return a word that reads differently from how it looks; None where there is none."""
    if text.isascii():
        return None
    for word in unicodedata.normalize("NFKC", text).split():
        shown = _seen(word)
        if (shown != word and _LATIN.search(word)) or _WORD.sub(_in_latin, shown) != shown:
            return _WORD.sub(_in_latin, shown)
    return None


def _seen(text: str) -> str:
    return _UNSEEN.sub("", _BREAK.sub("\n", text))


def _is_latin(text: str) -> bool:
    return len(_LATIN.findall(text)) > len(_OTHER.findall(text))


def _in_latin(match: re.Match[str]) -> str:
    """Read a word that has letters of two alphabets in one of them."""
    word = match.group()
    return word.translate(_LATIN_OF) if _LATIN.search(word) else word


def _as_seen(match: re.Match[str]) -> str:
    """Read a word in Latin letters if all of it looks so."""
    seen = match.group().translate(_LATIN_OF)
    return seen if seen.isascii() else _in_latin(match)
