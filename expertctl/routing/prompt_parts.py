"""The parts of a prompt: what is asked, and what it is asked about.

What follows a line that sets something apart (a rule, a fence, quotation marks, a tag) is the body.
Of several paragraphs the first that asks is the request. A pile of keywords asks nothing.
"""

import re
from collections import Counter
from collections.abc import Sequence

from expertctl.routing.words import STOP_WORDS

LONG = 48
"""In a text of more words than this, sentences that ask nothing are left out."""
_ENOUGH = 2
"""A request with this many meaningful words stands without its body."""
_POINTING = frozenset(
    {"answer", "below", "following", "here", "input", "message", "prompt", "question", "read"}
    | {"request", "task", "text", "user"}
)
"""Words of a request that only points at its body."""
_PILE = 6
_JOINED = 0.2
"""The least share of stop words in a real sentence."""
_REPEATS = 4
_LAST_WORDS = 2
"""How many words the last keyword of a list has at most."""

_APART = re.compile(
    r"\n[ \t]*(?:-{3,}|={3,}|\*{3,}|_{3,}|\"\"\"|'''|```\w*|~~~\w*|<[a-zA-Z][\w-]{0,30}>)[ \t]*\n"
    r"|\n[ \t]*(?:>|\|)[ \t]"
    r"|\n[ \t]*[A-Z][\w -]{0,24}:[ \t]*(?=\n)"
    r"|\n[ \t]*(?:From|To|Subject|Date|Cc):[ \t]"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?\u3002])\s+|(?<=\u3002)|\s*\n\s*")
_OPENERS = frozenset(
    """
    what how why when where who whom whose which can could would will should shall is are am was
    were do does did has have may
    add advise answer apply arrange ask book brainstorm build buy calculate call cancel
    capitalize change check choose classify clean clear close combine compare complete compose
    compute confirm conjugate connect continue convert copy correct count create debug decide
    decline decode decrease define delete derive describe design detect determine disable
    discuss display divide draft draw edit enable encode end enter estimate evaluate expand
    explain express extend extract fill filter find finish fix flip follow forget format
    generate get give go grade group guess guide help highlight identify improve include
    increase insert install inspect join keep label let leave list locate look lower make mark
    measure merge mix move multiply mute name need open optimize order organize outline parse
    pass pay paraphrase pick plan play plot pluralize polish predict prepare print pronounce
    proofread prove provide pull push put query quote raise rank rate read recommend record
    reduce refactor register remind remove rename render reorder rephrase replace reply report
    reschedule reserve reset resolve restore return reverse review revise rewrite roll round run
    save say schedule score search see select send separate set share shorten show simplify sing
    skip solve sort speak spell split start state stop submit subtract suggest sum summarise
    summarize switch talk teach tell test text track transcribe transfer translate turn type
    undo unmute update use verify walk want whats write
    """.split()  # noqa: SIM905  # reads better as text
)
"""Words that a question or a request begins with.

The list is kept by hand: 144 of its 245 words open utterances of CLINC150's training split, the
rest are what language models are asked for (sort, rephrase, pluralize).
"""
_OPENING = re.compile(
    r"\W*(?:\w{1,12}:\s+)?"
    r"(?:(?:hi|hey|hello|ok|okay|so|and|then|now|please|kindly|also|just)\b\W*)*(\w+)",
    re.IGNORECASE,
)
_ASKED = re.compile(rf"\W*(?:{'|'.join(sorted(_OPENERS))})\s", re.IGNORECASE)
"""A request rather than a keyword: no comma follows its first word."""
_WISHES = re.compile(
    r"\?\s*$|^\W*(?:please\b|(?:i|we) (?:need|want|would|wish|have to|am|must|'d)|i'd|i'm|let's)",
    re.IGNORECASE,
)
_PERSON = re.compile(r"\b(?:i|me|my|mine|we|us|our|you|your)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_KEYWORDS = r"(?:[^\W\d_][\w'-]*(?: [\w'-]+)?,\s+){2}(?:[\w'-]+(?: [\w'-]+)?,\s+)+"
_LIST = re.compile(rf"\W*{_KEYWORDS}")
_LIST_ASIDE = re.compile(rf"\({_KEYWORDS}[^()]*\)")
"""Keywords; a list that begins with a number is what many requests are about."""


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
    opening = _OPENING.match(sentence)
    opens = opening is not None and opening[1].casefold() in _OPENERS
    return opens or _WISHES.search(sentence) is not None


def is_pile(sentence: str) -> bool:
    """Tell whether a sentence is a pile of words with hardly any stop words to join them."""
    said = [word.casefold().partition("'")[0] for word in _WORD.findall(sentence)]
    words = [word for word in said if not word[0].isdigit()]
    joining = sum(word in STOP_WORDS for word in words)
    return len(words) >= _PILE and joining < _JOINED * len(words)


def without_lists(sentence: str) -> str:
    """Leave out keywords that stand before a request, or behind it in brackets."""
    rest = _LIST_ASIDE.sub(" ", sentence)
    before = _LIST.match(rest)
    if before and not _ASKED.match(rest) and not _joins(before[0]):
        rest = rest[_request_in(rest, before.end()) :]
    return rest if _says_enough(rest) or not _WORD.search(rest) else sentence


def _joins(listed: str) -> bool:
    """Tell whether what looks like a list is a sentence with commas: "in Paris, my wife"."""
    items = [_WORD.findall(item) for item in listed.split(",")]
    return any(len(item) > 1 and item[0].casefold() in STOP_WORDS for item in items)


def _request_in(text: str, end: int) -> int:
    """Return where a request begins behind a list whose last words may follow ``end``; or 0."""
    words = list(_WORD.finditer(text, end))[: _LAST_WORDS + 1]
    return next((word.start() for word in words if asks(text[word.start() :])), 0)


def shortened(parts: Sequence[str]) -> list[str]:
    """Return the sentences of a long text that ask; all sentences of a short one."""
    if sum(part.count(" ") + 1 for part in parts) <= LONG:
        return list(parts)
    best = max(map(_clarity, parts))
    return [part for part in parts if _clarity(part) == best] if best else list(parts[:1])


def without_repeats(text: str) -> str:
    """Leave out words that are repeated often, numbers excepted."""
    words = [word.casefold() for word in _WORD.findall(text)]
    usual = max(_REPEATS, len(words) // 12), max(2 * _REPEATS, len(words) // 4)
    piled = {
        word
        for word, count in Counter(words).items()
        if count >= usual[word in STOP_WORDS] and not word[0].isdigit()
    }
    return _WORD.sub(lambda m: "" if m[0].casefold() in piled else m[0], text) if piled else text


def _clarity(text: str) -> int:
    """Return how clearly a text asks: 2 by its form, 1 by a word such as "me" or "you", else 0."""
    if any(map(asks, sentences(text))):
        return 2
    return int(_PERSON.search(text) is not None)
