"""The manifest ``expert.json``, which defines what a package is, and its hint language.

`parse_manifest` checks strict JSON, then the JSON Schema (all problems at once), then what a schema
cannot express. Unknown keys are errors unless they begin with ``x-``. The types mirror the
document.

``routing.hint`` says when an expert wants to be considered::

    expression = term { "OR" term }
    term       = factor { "AND" factor }
    factor     = "NOT" factor | "(" expression ")" | keyword | comparison
    keyword    = "keyword" "(" word { "," word } ")"       any of the words is in the prompt
    comparison = feature operator value
    feature    = "format" | "language" | "task" | "has_json" | "has_code" | "length"
    operator   = "=" | "!=" , and for length also "<" | "<=" | ">" | ">="
    value      = word | "quoted text" | true | false | number of characters

``AND``, ``OR`` and ``NOT`` may be lower case. Hints come from packages, so the parser is bounded in
length and depth and reads every character once; nothing is ever executed.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn

import msgspec

from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from expertctl.reference import PackageName, Reference, Version
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.schema.validation import convert_document, find_problems

MAX_HINT_LENGTH = 500
MAX_HINT_DEPTH = 20
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
    """``feature operator value``; the value has the type of the feature."""

    feature: str
    operator: str
    value: str | bool | int


@dataclass(frozen=True, slots=True)
class Keyword:
    """Any of these lower-case words is in the prompt."""

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
    """Parse a hint.

    Raises:
        InvalidPackageError: for anything outside the grammar, with the position.
    """
    if len(text) > MAX_HINT_LENGTH:
        raise InvalidPackageError("hint", [f"{len(text)} characters, at most {MAX_HINT_LENGTH}"])
    parser = _HintParser(text)
    hint = parser.parse_expression(MAX_HINT_DEPTH)
    if parser.current.text:
        parser.fail("an operator AND or OR was expected")
    return hint


@dataclass(frozen=True, slots=True)
class _HintToken:
    """A token of the text; ``text`` is empty at the end, ``quoted`` marks quoted text."""

    text: str
    position: int
    quoted: bool = False


class _HintParser:
    """Recursive descent over the tokens of one hint."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokenise(text)
        self.index = 0

    @property
    def current(self) -> _HintToken:
        return self.tokens[self.index]

    def parse_expression(self, depth: int) -> Hint:
        if depth == 0:
            self.fail(f"nested deeper than {MAX_HINT_DEPTH}")
        terms = [self.parse_term(depth)]
        while self.accept("OR"):
            terms.append(self.parse_term(depth))
        return terms[0] if len(terms) == 1 else AnyOf(tuple(terms))

    def parse_term(self, depth: int) -> Hint:
        factors = [self.parse_factor(depth)]
        while self.accept("AND"):
            factors.append(self.parse_factor(depth))
        return factors[0] if len(factors) == 1 else AllOf(tuple(factors))

    def parse_factor(self, depth: int) -> Hint:
        if depth == 0:
            self.fail(f"nested deeper than {MAX_HINT_DEPTH}")
        if self.accept("NOT"):
            return Not(self.parse_factor(depth - 1))
        if self.accept("("):
            inner = self.parse_expression(depth - 1)
            self.expect(")")
            return inner
        if self.accept("keyword"):
            return self.parse_keyword()
        return self.parse_comparison()

    def parse_keyword(self) -> Keyword:
        self.expect("(")
        words = [self.parse_word("a word")]
        while self.accept(","):
            words.append(self.parse_word("a word"))
        self.expect(")")
        return Keyword(tuple(word.lower() for word in words))

    def parse_comparison(self) -> Comparison:
        if self.current.quoted or self.current.text.lower() not in FEATURES:
            self.fail(f"keyword(…) or one of {', '.join(sorted(FEATURES))} was expected")
        feature = self.advance().text.lower()
        if self.current.quoted or self.current.text not in OPERATORS:
            self.fail(f"an operator such as = was expected after {feature}")
        sign = self.current
        if sign.text not in {"=", "!="} and feature not in NUMBER_FEATURES:
            self.fail(f"{feature} can only be compared with = and !=")
        self.advance()
        return Comparison(feature, sign.text, self.parse_value(feature))

    def parse_value(self, feature: str) -> str | bool | int:
        word = self.current
        value: str | bool | int = self.parse_word(f"a value for {feature}").lower()
        if feature in TEXT_FEATURES:
            return value
        if feature in FLAG_FEATURES and value in {"true", "false"}:
            return value == "true"
        if feature in NUMBER_FEATURES and re.fullmatch(r"[0-9]{1,9}", str(value)):
            return int(value)
        kind = "true or false" if feature in FLAG_FEATURES else "a whole number"
        return _raise_syntax_error(
            f"{feature} is compared with {kind}, not {value!r}", word.position
        )

    def parse_word(self, what: str) -> str:
        if not self.current.text.strip() or (
            not self.current.quoted and self.current.text in _PUNCTUATION
        ):
            self.fail(f"{what} was expected")
        return self.advance().text.strip()

    def accept(self, text: str) -> bool:
        found = not self.current.quoted and self.current.text.lower() == text.lower()
        if found:
            self.advance()
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"{text!r} was expected")

    def advance(self) -> _HintToken:
        token = self.current
        self.index += 1
        return token

    def fail(self, why: str) -> NoReturn:
        found = f"not {self.current.text[:40]!r}" if self.current.text else "not the end"
        _raise_syntax_error(f"{why}, {found}", self.current.position)


_PUNCTUATION = {*OPERATORS, "(", ")", ","}


def _tokenise(text: str) -> list[_HintToken]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            _raise_syntax_error(f"cannot read {text[position : position + 20].strip()!r}", position)
        quoted = match["quoted"] is not None
        piece = match["quoted"] if quoted else match["word"] or match["sign"]
        if not piece.strip():
            _raise_syntax_error("the quotes hold no text", match.start())
        tokens.append(_HintToken(piece, match.end() - len(piece) - quoted, quoted))
        position = match.end()
    return [*tokens, _HintToken("", end)]


def _raise_syntax_error(why: str, position: int) -> NoReturn:
    raise InvalidPackageError(
        "hint",
        [f"{why} (at character {position + 1})"],
        hint="a hint looks like: format=sql OR keyword(sql, query)",
    )


MAX_MANIFEST_BYTES = 1 << 20
MANIFEST_PATH = "expert.json"
SIGNATURE_PATH = "model.sig"

AdapterKind = Literal["lora", "dora", "ia3", "soft_prompt"]
Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class BaseRequirement:
    """The base model that an expert was made for; digests are ``sha256:<hex>``."""

    name: str
    arch: str
    tokenizer: str
    revision: str | None = None
    weights: str | None = None
    accepts: tuple[str, ...] = ()
    tokenizer_version: Literal[1, 2] = 1
    """What ``tokenizer`` is the digest of: 1 the file, 2 its canonical form."""


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter in the package: its kind, its files and their expected contents."""

    kind: AdapterKind
    path: str
    config: str
    dtype: Dtype
    tensors: int
    rank: int | None = None
    """For `lora` and `dora`."""
    tokens: int | None = None
    """For `soft_prompt`: the number of virtual tokens."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Data for the router."""

    task: str = "default"
    languages: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    exclude_keywords: tuple[str, ...] = ()
    hint: str | None = None
    priority: float = 0.5


@dataclass(frozen=True, slots=True)
class CompositionRules:
    """With which other experts an expert may, must and must not be used."""

    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    composes_with: tuple[str, ...] = ()
    role: str | None = None
    max_chain: int = 10
    load_order: int = 5


@dataclass(frozen=True, slots=True)
class Decoding:
    """Generation settings that the publisher recommends; ``None`` leaves the preset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measured result, of the base and of the expert."""

    task: str
    dataset_sha256: str
    n: int
    metric: str
    base: float
    expert: float
    date: str


@dataclass(frozen=True, slots=True)
class Limitation:
    """A known weakness of the expert."""

    pattern: str
    description: str
    example: str | None = None
    workaround: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """``expert.json`` as typed values, without the free-form ``training``."""

    schema: Literal[1]
    name: str
    version: str
    description: str
    license: str
    base: BaseRequirement
    adapters: tuple[AdapterEntry, ...]
    authors: tuple[str, ...] = ()
    homepage: str | None = None
    tags: tuple[str, ...] = ()
    routing: Routing = Routing()
    composition: CompositionRules = CompositionRules()
    decoding: Decoding = Decoding()
    evaluation: tuple[Evaluation, ...] = ()
    limitations: tuple[Limitation, ...] = ()

    @property
    def package(self) -> PackageName:
        """The parsed name."""
        return PackageName.parse(self.name)

    @property
    def semver(self) -> Version:
        """The parsed version."""
        return Version.parse(self.version)

    @property
    def ref(self) -> str:
        """``namespace/name@version``, as plans and messages show it."""
        return f"{self.name}@{self.version}"

    @property
    def kind(self) -> str:
        """The kinds of its adapters in order, each once: ``lora``, ``lora+soft_prompt``."""
        return "+".join(dict.fromkeys(entry.kind for entry in self.adapters))

    @property
    def virtual_tokens(self) -> int:
        """The number of positions that its soft prompts take."""
        return sum(entry.tokens or 0 for entry in self.adapters)


def parse_manifest(data: bytes, *, what: str = MANIFEST_PATH) -> Manifest:
    """Parse a manifest.

    Raises:
        InvalidPackageError: with every problem of the document.
    """
    document = load_object(data, what=what, max_bytes=MAX_MANIFEST_BYTES)
    return build_manifest(document, what=what)


def build_manifest(document: JsonObject, *, what: str = MANIFEST_PATH) -> Manifest:
    """Build a manifest from a JSON object; raises as `parse_manifest`."""
    problems = _explain_problems(document, find_problems(document, "manifest"))
    if problems:
        raise InvalidPackageError(what, problems)
    try:
        manifest = convert_document(document, Manifest)
    except msgspec.ValidationError as error:  # 16.0 is an integer for JSON Schema, not for us
        raise InvalidPackageError(what, [str(error)]) from error
    problems = _check_beyond_schema(manifest)
    if problems:
        raise InvalidPackageError(what, problems)
    return manifest


def _explain_problems(document: JsonObject, problems: Iterable[str]) -> list[str]:
    """Explain an invalid name or version in words; the schema would show a pattern."""
    readers = {"name": PackageName.parse, "version": Version.parse}
    explained: list[str] = []
    for problem in problems:
        field = problem.partition(":")[0]
        value = document.get(field)
        known = isinstance(value, str) and field in readers
        explained += (_collect_errors(readers[field], field, [str(value)]) if known else []) or [
            problem
        ]
    return list(dict.fromkeys(explained))


def _check_beyond_schema(manifest: Manifest) -> list[str]:
    problems = _collect_errors(PackageName.parse, "name", [manifest.name])
    problems += _collect_errors(Version.parse, "version", [manifest.version])
    problems += _collect_errors(
        _parse_requirement, "composition/requires", manifest.composition.requires
    )
    problems += _collect_errors(
        _parse_requirement, "composition/conflicts", manifest.composition.conflicts
    )
    hint = manifest.routing.hint
    problems += _collect_errors(parse_hint, "routing", [hint] if hint is not None else [])
    paths = [p for a in manifest.adapters for p in (a.path, a.config)]
    return problems + [f"two adapters use {p!r}" for p in sorted(set(paths)) if paths.count(p) > 1]


def _parse_requirement(text: str) -> Reference:
    """Parse a reference to another package, without a digest, which would outlive every fix."""
    reference = Reference.parse(text)
    if reference.digest is not None:
        raise UsageError(f"{text[:80]!r} names a digest, not versions")
    return reference


def _collect_errors(read: Callable[[str], object], where: str, texts: Iterable[str]) -> list[str]:
    problems = []
    for text in texts:
        try:
            read(text)
        except ExpertError as error:
            problems.append(f"{where}: {error.message}")
    return problems
