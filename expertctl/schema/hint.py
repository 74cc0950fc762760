"""The expression language of ``routing.hint``: when an expert wants to be considered.

::

    expression = term { "OR" term }
    term       = factor { "AND" factor }
    factor     = "NOT" factor | "(" expression ")" | keyword | comparison
    keyword    = "keyword" "(" word { "," word } ")"       any of the words is in the prompt
    comparison = feature operator value
    feature    = "format" | "language" | "task" | "has_json" | "has_code" | "length"
    operator   = "=" | "!=" , and for length also "<" | "<=" | ">" | ">="
    value      = word | "quoted text" | true | false | number of characters

``AND``, ``OR`` and ``NOT`` may be written in small letters. Hints come from packages, so the parser
is bounded in length and depth and looks at every character once; nothing is ever executed.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from expertctl.errors import InvalidPackageError

MAX_LENGTH = 500
MAX_DEPTH = 20
TEXT_FEATURES = frozenset({"format", "language", "task"})
FLAG_FEATURES = frozenset({"has_json", "has_code"})
NUMBER_FEATURES = frozenset({"length"})
FEATURES = TEXT_FEATURES | FLAG_FEATURES | NUMBER_FEATURES
OPERATORS = frozenset({"=", "!=", "<", "<=", ">", ">="})

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>[^\W_][\w+#.-]*)|"(?P<quoted>[^"]*)"|(?P<sign>!=|<=|>=|[=<>(),]))"""
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """``feature operator value``; the value is of the feature's kind."""

    feature: str
    operator: str
    value: str | bool | int


@dataclass(frozen=True, slots=True)
class Keyword:
    """Any of these words, lower-case, is in the prompt."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The negation of an expression: ``NOT``."""

    hint: "Hint"


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of several expressions: ``AND``."""

    hints: tuple["Hint", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of several expressions: ``OR``."""

    hints: tuple["Hint", ...]


Hint = Comparison | Keyword | Not | AllOf | AnyOf


def parse_hint(text: str) -> Hint:
    """Read a hint.

    Raises:
        InvalidPackageError: for anything outside the grammar, saying where.
    """
    if len(text) > MAX_LENGTH:
        raise InvalidPackageError("hint", [f"{len(text)} characters, at most {MAX_LENGTH}"])
    parser = _Parser(text)
    hint = parser.expression(MAX_DEPTH)
    if parser.here.text:
        parser.refuse("an operator AND or OR was expected")
    return hint


@dataclass(frozen=True, slots=True)
class _Token:
    """A piece of the text; ``text`` is empty at the end, ``quoted`` marks quoted text."""

    text: str
    position: int
    quoted: bool = False


class _Parser:
    """Recursive descent over the tokens of one hint."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.next = 0

    @property
    def here(self) -> _Token:
        return self.tokens[self.next]

    def expression(self, depth: int) -> Hint:
        if depth == 0:
            self.refuse(f"nested deeper than {MAX_DEPTH}")
        terms = [self.term(depth)]
        while self.accept("OR"):
            terms.append(self.term(depth))
        return terms[0] if len(terms) == 1 else AnyOf(tuple(terms))

    def term(self, depth: int) -> Hint:
        factors = [self.factor(depth)]
        while self.accept("AND"):
            factors.append(self.factor(depth))
        return factors[0] if len(factors) == 1 else AllOf(tuple(factors))

    def factor(self, depth: int) -> Hint:
        if depth == 0:
            self.refuse(f"nested deeper than {MAX_DEPTH}")
        if self.accept("NOT"):
            return Not(self.factor(depth - 1))
        if self.accept("("):
            inner = self.expression(depth - 1)
            self.expect(")")
            return inner
        if self.accept("keyword"):
            return self.keyword()
        return self.comparison()

    def keyword(self) -> Keyword:
        self.expect("(")
        words = [self.word("a word")]
        while self.accept(","):
            words.append(self.word("a word"))
        self.expect(")")
        return Keyword(tuple(word.lower() for word in words))

    def comparison(self) -> Comparison:
        if self.here.quoted or self.here.text.lower() not in FEATURES:
            self.refuse(f"keyword(…) or one of {', '.join(sorted(FEATURES))} was expected")
        feature = self.take().text.lower()
        if self.here.quoted or self.here.text not in OPERATORS:
            self.refuse(f"an operator such as = was expected after {feature}")
        sign = self.here
        if sign.text not in {"=", "!="} and feature not in NUMBER_FEATURES:
            self.refuse(f"{feature} can only be compared with = and !=")
        self.take()
        return Comparison(feature, sign.text, self.value(feature))

    def value(self, feature: str) -> str | bool | int:
        word = self.here
        value: str | bool | int = self.word(f"a value for {feature}").lower()
        if feature in TEXT_FEATURES:
            return value
        if feature in FLAG_FEATURES and value in {"true", "false"}:
            return value == "true"
        if feature in NUMBER_FEATURES and re.fullmatch(r"[0-9]{1,9}", str(value)):
            return int(value)
        kind = "true or false" if feature in FLAG_FEATURES else "a whole number"
        return _refuse(f"{feature} is compared with {kind}, not {value!r}", word.position)

    def word(self, what: str) -> str:
        if not self.here.text.strip() or (not self.here.quoted and self.here.text in _SIGNS):
            self.refuse(f"{what} was expected")
        return self.take().text.strip()

    def accept(self, text: str) -> bool:
        found = not self.here.quoted and self.here.text.lower() == text.lower()
        if found:
            self.take()
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.refuse(f"{text!r} was expected")

    def take(self) -> _Token:
        token = self.here
        self.next += 1
        return token

    def refuse(self, why: str) -> NoReturn:
        found = f"not {self.here.text[:40]!r}" if self.here.text else "not the end"
        _refuse(f"{why}, {found}", self.here.position)


_SIGNS = {*OPERATORS, "(", ")", ","}


def _tokens(text: str) -> list[_Token]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            _refuse(f"cannot read {text[position : position + 20].strip()!r}", position)
        quoted = match["quoted"] is not None
        piece = match["quoted"] if quoted else match["word"] or match["sign"]
        if not piece.strip():
            _refuse("the quotes hold no text", match.start())
        tokens.append(_Token(piece, match.end() - len(piece) - quoted, quoted))
        position = match.end()
    return [*tokens, _Token("", end)]


def _refuse(why: str, position: int) -> NoReturn:
    raise InvalidPackageError(
        "hint",
        [f"{why} (at character {position + 1})"],
        hint="a hint looks like: format=sql OR keyword(sql, query)",
    )
