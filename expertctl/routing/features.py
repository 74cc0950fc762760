"""`PromptFeatures`, what can be detected in a prompt without a model; how texts are tokenised.

Detection of language, format, task and code is linear in the length of the text that is read. The
hints of packages are evaluated on these features.

Prompts, keywords and examples are read the same way. Only the beginning of a very long text is
read, as a prompt states its request early. `fold_confusables` removes invisible characters and
replaces letters that look like Latin ones. A word that mixes alphabets is read in Latin letters, as
people see it; words of one alphabet, such as Russian and Greek ones, stay.
"""

import operator as operators
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertctl.schema.manifest import AllOf, AnyOf, Comparison, Hint, Keyword, Not
from expertctl.schema.strict_json import JsonObject

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


DEFAULT_TASK = "default"


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """The features of a prompt; ``None`` means undetected."""

    words: tuple[str, ...]
    length: int
    language: str | None
    script: str | None  # the language, where the script alone determines it
    format: str | None
    task: str
    has_json: bool
    has_code: bool

    def to_json(self) -> JsonObject:
        """Return the ``prompt`` object of ``route --json``."""
        return {
            "characters": self.length,
            "language": self.language,
            "format": self.format,
            "task": self.task,
            "has_json": self.has_json,
            "has_code": self.has_code,
        }


def extract_features(prompt: str, *, normalised: str | None = None) -> PromptFeatures:
    """Extract the features of a prompt; words come from ``normalised``, if given."""
    text, shown = prompt[:MAX_CHARACTERS], prompt if normalised is None else normalised
    words = split_words(shown)
    known = set(words)
    script = None if shown.isascii() else _detect_script(shown[:MAX_CHARACTERS])
    return PromptFeatures(
        words=tuple(words),
        length=len(prompt),
        language=script or _detect_language(words),
        script=script,
        format=_detect_format(known),
        task=_detect_task(text),
        has_json="json" in known or (_contains_any(text, "{[") and bool(_JSON.search(text))),
        has_code=_contains_any(text, _CODE_MARKS) and bool(_CODE.search(text)),
    )


_FORMATS: Mapping[str, frozenset[str]] = {
    "sql": frozenset({"sql", "select", "sqlite", "postgres", "postgresql", "mysql"}),
    "json": frozenset({"json", "jsonl"}),
    "xml": frozenset({"xml", "xsd", "xslt"}),
    "yaml": frozenset({"yaml", "yml"}),
    "csv": frozenset({"csv", "tsv"}),
    "html": frozenset({"html", "css"}),
    "markdown": frozenset({"markdown"}),
    "regex": frozenset({"regex", "regexp"}),
}
_ANY_FORMAT = frozenset[str]().union(*_FORMATS.values())
_JSON = re.compile(r'[{\[]\s{0,20}["{\[]')
_CODE = re.compile(
    r"```|\b(?:def|class|function|func|fn|import|#include|public|const|var)\s[\w.<{(]|;\s{0,4}$"
    r"|=>|\breturn\s",
    re.MULTILINE,
)

_CODE_MARKS = (
    *("```", "def", "class", "func", "fn", "import", "#include", "public", "const", "var"),
    *(";", "=>", "return"),
)
"""Every match of `_CODE` contains one of these."""

_TASKS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (task, re.compile(pattern, re.IGNORECASE))
    for task, pattern in (
        ("json_parsing", r"\bjsonl?\b|\bparse\b|\bextract\b.{1,60}\b(?:fields?|keys?|values?)\b"),
        (
            "creative_writing",
            r"\b(?:write|compose|invent|tell)\b.{1,40}\b(?:poem|story|song|haiku|limerick|joke|tale"
            r"|lyrics|verse)s?\b|\bbrainstorm\b",
        ),
        (
            "code_generation",
            r"```|\bsql\b|\b(?:write|implement|create|fix|refactor|debug)\b.{1,40}"
            r"\b(?:function|class|script|program|code|method|query|regex|unit test)\b",
        ),
        ("translation", r"\btranslate\b|\btranslation\b"),
        ("summarisation", r"\bsummar(?:y|ise|ize)\b|\btl;?dr\b"),
        ("classification", r"\bclassify\b|\bcategori[sz]e\b|\bsentiment\b"),
    )
)

_TASK_MARKS = (
    *("json", "parse", "extract", "poem", "story", "song", "haiku", "limerick", "joke", "tale"),
    *("lyric", "verse", "brainstorm", "```", "sql", "function", "class", "script", "program"),
    *("code", "method", "query", "regex", "unit test", "translat", "summar", "tl;dr", "tldr"),
    *("categori", "sentiment"),
)
"""Every match of a `_TASKS` pattern contains one of these; most prompts contain none."""

_SCRIPTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (language, re.compile(pattern))
    for language, pattern in (
        ("ja", "[\u3040-\u30ff]"),
        ("ko", "[\uac00-\ud7af]"),
        ("zh", "[\u4e00-\u9fff]"),
        ("ru", "[\u0400-\u04ff]"),
        ("el", "[\u0370-\u03ff]"),
        ("he", "[\u0590-\u05ff]"),
        ("ar", "[\u0600-\u06ff]"),
        ("hi", "[\u0900-\u097f]"),
        ("th", "[\u0e00-\u0e7f]"),
    )
)
_COMMON_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "en": "the of and to in is that it for was on are with as be this what how from these",
        "de": "der die das und ist nicht ein eine ich zu den mit von auf für wie bitte was",
        "fr": "le la les des et est une un dans pour que qui avec sur pas ce écris quel quelle",
        "es": "el la los las y es una un en para que con por no del escribe cuál qué como",
        "pt": "o os as e é uma um em para que com por não do da escreva qual como",
        "it": "il lo gli e è una un in per che con non del della scrivi quale come",
        "nl": "de het een en is niet van dat op te met voor schrijf wat hoe",
    }.items()
}


_WORD_LANGUAGES: Mapping[str, tuple[str, ...]] = {
    word: tuple(language for language, common in _COMMON_WORDS.items() if word in common)
    for word in frozenset[str]().union(*_COMMON_WORDS.values())
}


def _detect_script(text: str) -> str | None:
    """Return the language of a script; ``None`` for one of several languages, such as Latin."""
    letters = sum(character.isalpha() for character in text)
    found = (name for name, pattern in _SCRIPTS if len(pattern.findall(text)) > letters // 4)
    return next(found, None) if letters else None


def _detect_language(words: list[str]) -> str | None:
    """Return the language with the most common words; ``None`` for a tie or no evidence."""
    hits: dict[str, int] = {}
    for word in words:
        for language in _WORD_LANGUAGES.get(word, ()):
            hits[language] = hits.get(language, 0) + 1
    best = max(hits.values(), default=0)
    leaders = [language for language, count in hits.items() if count == best]
    return leaders[0] if len(leaders) == 1 else None


def _detect_task(text: str) -> str:
    if text.isascii() and not _contains_any(text.lower(), _TASK_MARKS):
        return DEFAULT_TASK
    return next((task for task, pattern in _TASKS if pattern.search(text)), DEFAULT_TASK)


def _contains_any(text: str, marks: Iterable[str]) -> bool:
    return any(mark in text for mark in marks)


def _detect_format(words: set[str]) -> str | None:
    if words.isdisjoint(_ANY_FORMAT):
        return None
    return next((name for name, marks in _FORMATS.items() if marks & words), None)


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operators.eq,
    "!=": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}


def evaluate_hint(hint: Hint, features: PromptFeatures) -> bool:
    """Evaluate a hint on the features of a prompt; an undetected feature equals nothing."""
    match hint:
        case Keyword(words):
            return any(contains_phrase(features.words, word) for word in words)
        case Comparison(feature, operator, value):
            return _OPERATORS[operator](getattr(features, feature), value)
        case Not(inner):
            return not evaluate_hint(inner, features)
        case AllOf(hints):
            return all(evaluate_hint(each, features) for each in hints)
        case AnyOf(hints):
            return any(evaluate_hint(each, features) for each in hints)
