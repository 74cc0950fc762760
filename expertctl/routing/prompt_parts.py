"""The parts of a prompt: what is asked, and what it is asked about.

What follows a line that sets something apart (a rule, a fence, quotation marks, a tag) is the body.
Of several paragraphs the first that asks is the request. A pile of keywords asks nothing.
"""

import re
from collections import Counter
from collections.abc import Sequence

from expertctl.routing.words import STOP_WORDS

LONG = 48
"""Words from which on sentences that ask nothing are left out."""
_ENOUGH = 2
"""A request of so many words that say something stands without its body."""
_POINTING = frozenset(
    {"answer", "below", "following", "here", "input", "message", "prompt", "question", "read"}
    | {"request", "task", "text", "user"}
)
"""Words of a request that only points at its body."""
_PILE = 6
_JOINED = 0.2
"""The share of stop words that any sentence has."""
_REPEATS = 4

_APART = re.compile(
    r"\n[ \t]*(?:-{3,}|={3,}|\*{3,}|_{3,}|\"\"\"|'''|```\w*|~~~\w*|<[a-zA-Z][\w-]{0,30}>)[ \t]*\n"
    r"|\n[ \t]*(?:>|\|)[ \t]"
    r"|\n[ \t]*[A-Z][\w -]{0,24}:[ \t]*(?=\n)"
    r"|\n[ \t]*(?:From|To|Subject|Date|Cc):[ \t]"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?\u3002])\s+|(?<=\u3002)|\s*\n\s*")
_ASKS = re.compile(
    r"\?\s*$|^\W*(?:(?:hi|hey|hello|ok|okay|so|and|then|now|please|kindly|also)\b\W*)*"
    r"(?:what|how|why|when|where|who|whom|whose|which|can|could|would|will|should|shall|is|are|am|"
    r"was|were|do|does|did|has|have|may|tell|give|show|write|make|put|turn|convert|express|sort|"
    r"order|arrange|list|find|look|search|get|set|add|remove|delete|change|update|create|build|"
    r"explain|describe|summari[sz]e|translate|rewrite|format|fix|correct|check|compare|calculate|"
    r"compute|count|solve|classify|extract|generate|draft|compose|play|call|text|send|book|cancel|"
    r"schedule|remind|start|stop|turn|open|close|order|buy|pay|transfer|let|help|need|want|"
    r"(?:i|we) (?:need|want|would|wish|have to|am|must|'d)|i'd|i'm|let's)\b",
    re.IGNORECASE,
)
_PERSON = re.compile(r"\b(?:i|me|my|mine|we|us|our|you|your)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def request_of(text: str) -> str:
    """Return what is asked, without the body where the request says enough."""
    apart = _APART.search(text, 1) if "\n" in text else None
    head = text[: apart.start()] if apart else text
    return head if apart and _says_enough(head) else text


def _says_enough(head: str) -> bool:
    words = {word.casefold() for word in _WORD.findall(head)}
    return len(words - STOP_WORDS - _POINTING) >= _ENOUGH


def asking_paragraph(text: str) -> str:
    """Return the paragraph that asks most clearly, the first of equals."""
    paragraphs = [part for part in _PARAGRAPH.split(text) if part.strip()]
    return max(paragraphs, key=_clarity, default=text)


def sentences(text: str) -> list[str]:
    """Return the sentences and lines of a text."""
    return [part for part in _SENTENCE.split(text) if part.strip()]


def asks(sentence: str) -> bool:
    """Tell whether a sentence asks a question or for something."""
    return _ASKS.search(sentence) is not None


def is_pile(sentence: str) -> bool:
    """Tell whether a sentence is words with next to none that join them."""
    said = [word.casefold().partition("'")[0] for word in _WORD.findall(sentence)]
    words = [word for word in said if not word[0].isdigit()]
    joining = sum(word in STOP_WORDS for word in words)
    return len(words) >= _PILE and joining < _JOINED * len(words)


def shortened(parts: Sequence[str]) -> list[str]:
    """Return the sentences that ask, of a text that is long; all of one that is not."""
    if sum(part.count(" ") + 1 for part in parts) <= LONG:
        return list(parts)
    best = max(map(_clarity, parts))
    return [part for part in parts if _clarity(part) == best] if best else list(parts[:1])


def without_repeats(text: str) -> str:
    """Leave out words that are said again and again, numbers excepted."""
    words = [word.casefold() for word in _WORD.findall(text)]
    usual = max(_REPEATS, len(words) // 12), max(2 * _REPEATS, len(words) // 4)
    piled = {
        word
        for word, count in Counter(words).items()
        if count >= usual[word in STOP_WORDS] and not word[0].isdigit()
    }
    return _WORD.sub(lambda m: "" if m[0].casefold() in piled else m[0], text) if piled else text


def _clarity(text: str) -> int:
    """Return how clearly a text asks: by its form, else by whom it speaks of, else not."""
    if any(map(asks, sentences(text))):
        return 2
    return int(_PERSON.search(text) is not None)
