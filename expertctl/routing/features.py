"""`PromptFeatures`: what can be detected in a prompt without a model.

Detection of language, format, task and code is linear in the length of the text that is read. The
hints of packages are evaluated on these features.
"""

import operator as operators
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from expertctl.routing.text import MAX_CHARACTERS, contains_phrase, split_words
from expertctl.schema.manifest import AllOf, AnyOf, Comparison, Hint, Keyword, Not
from expertctl.schema.strict_json import JsonObject

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
