"""Flags for manifests that look made to mislead the router.

Detection is deterministic, from the manifest and from what other packages contained before. Nothing
here rejects a package: a flag is shown to the user, and a flagged package loses ties.

Copied texts are found by fingerprints: one hash of all words of a text, and hashes of some
three-word shingles, so that copies with extra words or other numbers are still found. A lookup
costs the same however many packages there are.

Lint rules for a single manifest: piled-up or unrelated keywords, repeated examples, names of other
packages, instructions to the router, and disguised letters.

The module also has the advice on flags, for publishers and for users who install a package.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from expertctl.routing.features import (
    STOP_WORDS,
    find_confusable,
    fold_confusables,
    has_content_word,
    split_words,
    truncate,
)
from expertctl.schema.manifest import Manifest
from expertctl.store.preference import CATCH_ALL, Flag
from expertctl.store.suspicions import KnownPackages

_SHINGLE_WORDS = 3
_MAX_SHINGLES = 32
"""How many shingles of a text are kept: those with the smallest hashes, which copies share."""
_MIN_SHARED_SHINGLES = 0.6
_MIN_COPIED_SHARE = 0.25
"""The least shares of shingles and of examples at which a text and a package are copies."""
_MIN_COPIED_TEXTS = 2


@dataclass(frozen=True, slots=True)
class TextFingerprint:
    """The hash of all words of a text, and hashes of some of its shingles."""

    whole: int
    shingles: frozenset[int]

    @classmethod
    def from_text(cls, text: str) -> "TextFingerprint":
        """Hash a text; all numbers are equal, so changing them makes no other text."""
        words = ["#" if word[0].isdigit() else word for word in split_words(fold_confusables(text))]
        spans = (words[i : i + _SHINGLE_WORDS] for i in range(len(words) - _SHINGLE_WORDS + 1))
        pieces = sorted({_hash_text(" ".join(span)) for span in spans})
        return cls(_hash_text("\n".join(words)), frozenset(pieces[:_MAX_SHINGLES]))

    @property
    def all_hashes(self) -> frozenset[int]:
        """All hashes."""
        return self.shingles | {self.whole}


def fingerprint_manifest(manifest: Manifest) -> frozenset[int]:
    """Return the hashes of the texts of a manifest."""
    texts = [manifest.description, *manifest.routing.examples]
    return frozenset().union(*(TextFingerprint.from_text(text).all_hashes for text in texts))


def find_copied_texts(manifest: Manifest, others: KnownPackages) -> Iterator[Flag]:
    """Flag examples and a description that a package of another publisher contained first."""
    examples = [TextFingerprint.from_text(text) for text in manifest.routing.examples]
    description = TextFingerprint.from_text(manifest.description)
    marks = frozenset().union(description.all_hashes, *(text.all_hashes for text in examples))
    owners = _exclude_own(others.find_owners(marks), manifest)
    sources = Counter(name for text in examples if (name := _find_source(text, owners)))
    if sources and sources.total() >= max(_MIN_COPIED_TEXTS, _MIN_COPIED_SHARE * len(examples)):
        ((other, _),) = sources.most_common(1)
        share = f"{sources.total()} of its {len(examples)} examples"
        yield Flag("copied", f"{share} are those of {_format_sources(other, sources)}", other)
    if description.shingles and (source := owners.get(description.whole)):
        yield Flag("copied", f"its description is that of {source}", source)


def _exclude_own(owners: Mapping[int, str], manifest: Manifest) -> dict[int, str]:
    """Leave out packages of the same publisher, who may copy them."""
    own = manifest.package.namespace
    return {mark: name for mark, name in owners.items() if name.partition("/")[0] != own}


def _find_source(text: TextFingerprint, owners: Mapping[int, str]) -> str | None:
    """Return the package that a text was copied from."""
    if text.whole in owners:
        return owners[text.whole]
    counts = Counter(owners[piece] for piece in text.shingles if piece in owners)
    enough = _MIN_SHARED_SHINGLES * len(text.shingles)
    return next((name for name, count in counts.most_common(1) if count > enough), None)


def _format_sources(first: str, sources: Mapping[str, int]) -> str:
    more = len(sources) - 1
    return f"{first} and {more} more" if more else first


def _hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


_MAX_KEYWORDS = 64
_MIN_UNRELATED = 8
_UNRELATED_SHARE = 0.6
_MIN_STOP_WORDS = 3
_MIN_NAMES = 3
_STEM_CHARACTERS = 4
_REPEATED_SHARE = 0.2
_REPEATED_TEXTS = 3
_REPEATED_WORDS = 6
_REPEATED_WORD_SHARE = 0.25
_MAX_SHOWN_WORDS = 3

_PACKAGE = re.compile(r"(?<![\w/.-])[a-z0-9]+(?:-[a-z0-9]+)*/[a-z0-9]+(?:-[a-z0-9]+)*(?![\w/])")
_ROUTER_INSTRUCTION = re.compile(
    r"\b(?:choose|select|pick|prefer|use|route|send|trust)\b.{0,20}\b(?:this|my) "
    r"(?:expert|adapter|package)\b"
    r"|\b(?:always|must|never|only)\b.{0,30}\b(?:expert|adapter)\b"
    r"|\b(?:ignore|disregard|bypass|override|forget)\b.{0,40}\b(?:experts?|adapters?|instructions?"
    r"|(?:the|your|its|any) (?:rout(?:er|ing)|scores?|threshold))\b"
    r"|\b(?:always|must) (?:choose|select|pick|prefer|route)\b"
    r"|\b(?:highest|best|maximum|top) (?:score|confidence|priority)\b"
    r"|<\|\w+\|>|\[/?INST\]|<</?SYS>>|^\s*system\s*:",
    re.IGNORECASE | re.MULTILINE,
)


def lint_manifest(manifest: Manifest, others: KnownPackages) -> Iterator[Flag]:
    """Flag a manifest that breaks a rule, and names of other packages in it."""
    yield from _check_keyword_stuffing(manifest)
    yield from _check_foreign_names(manifest, others)
    yield from _check_repetition(manifest.routing.examples)
    for flag in (_check_router_instructions(manifest), _check_confusables(manifest)):
        if flag is not None:
            yield flag


def _check_keyword_stuffing(manifest: Manifest) -> Iterator[Flag]:
    keywords = manifest.routing.keywords
    if len(keywords) > _MAX_KEYWORDS:
        yield Flag("stuffed", f"it has {len(keywords)} keywords")
    empty = [word for word in keywords if not has_content_word(word)]
    if len(empty) >= _MIN_STOP_WORDS:
        yield Flag("stuffed", f"{len(empty)} of its keywords say nothing: {_format_words(empty)}")
    foreign = _find_unrelated_keywords(manifest)
    if len(foreign) >= _MIN_UNRELATED and len(foreign) > _UNRELATED_SHARE * len(keywords):
        share = f"{len(foreign)} of its {len(keywords)} keywords"
        yield Flag("stuffed", f"{share} are in none of its texts: {_format_words(foreign)}")


def _find_unrelated_keywords(manifest: Manifest) -> list[str]:
    """Return the keywords of which no word occurs in the other texts of a package."""
    routing = manifest.routing
    texts = [manifest.description, manifest.name, routing.task, *manifest.tags, *routing.examples]
    stems = {
        word[:_STEM_CHARACTERS]
        for text in texts
        for word in split_words(fold_confusables(text).replace("-", " "))
    }
    return [
        keyword
        for keyword in routing.keywords
        if has_content_word(keyword)
        and not any(
            word[:_STEM_CHARACTERS] in stems
            for word in split_words(keyword)
            if word not in STOP_WORDS
        )
    ]


def _check_foreign_names(manifest: Manifest, others: KnownPackages) -> Iterator[Flag]:
    """Flag examples and keywords that name other packages."""
    routing = manifest.routing
    texts = [*routing.examples, *routing.keywords]
    named = {name for text in texts for name in _PACKAGE.findall(fold_confusables(text).casefold())}
    found = {n for n in others.find_names(named).values() if n != manifest.name}
    keywords = ["-".join(split_words(word)) for word in _find_unrelated_keywords(manifest)]
    short = {n for n in others.find_names(keywords).values() if n != manifest.name}
    found |= short if len(short) >= _MIN_NAMES else set()
    if found:
        first = min(found)
        yield Flag(
            "names-another", f"it names other packages: {_format_words(sorted(found))}", first
        )


def _check_repetition(examples: Sequence[str]) -> Iterator[Flag]:
    counts = Counter(" ".join(split_words(fold_confusables(text))) for text in examples)
    more = len(examples) - len(counts)
    if more >= max(_REPEATED_TEXTS, _REPEATED_SHARE * len(examples)):
        yield Flag("repeated", f"{more} of its {len(examples)} examples repeat others of its own")
    for text in examples:
        if word := _find_repeated_word(text):
            yield Flag("repeated", f"an example says {word!r} again and again")
            return


def _find_repeated_word(text: str) -> str | None:
    """Return a word that makes up much of a text."""
    words = split_words(fold_confusables(text))
    counts = Counter(w for w in words if w not in STOP_WORDS and not w[0].isdigit())
    least = max(_REPEATED_WORDS, _REPEATED_WORD_SHARE * len(words))
    return next((word for word, count in counts.most_common(1) if count >= least), None)


def _check_router_instructions(manifest: Manifest) -> Flag | None:
    routing = manifest.routing
    for text in (manifest.description, *routing.examples, *routing.keywords):
        if match := _ROUTER_INSTRUCTION.search(fold_confusables(text)):
            return Flag("instructs", f"it tells the router what to do: {truncate(match.group())!r}")
    return None


def _check_confusables(manifest: Manifest) -> Flag | None:
    routing = manifest.routing
    for text in (manifest.description, *routing.examples, *routing.keywords):
        if word := find_confusable(text):
            return Flag("disguised", f"its texts contain disguised letters: {truncate(word)!r}")
    return None


def _format_words(words: Sequence[str]) -> str:
    rest = f" and {len(words) - _MAX_SHOWN_WORDS} more" if len(words) > _MAX_SHOWN_WORDS else ""
    return f"{', '.join(truncate(word) for word in words[:_MAX_SHOWN_WORDS])}{rest}"


RULES_VERSION = 3
"""Incremented whenever the same packages would get other flags."""


def find_flags(manifest: Manifest, others: KnownPackages) -> tuple[Flag, ...]:
    """Return the flags of a manifest, given the texts and names of earlier packages."""
    return (*find_copied_texts(manifest, others), *lint_manifest(manifest, others))


@dataclass(slots=True)
class SeenManifests:
    """Texts and names of manifests, in memory; the first manifest with a text owns it."""

    fingerprints: dict[int, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, manifest: Manifest) -> None:
        """Add the texts and names of one more manifest."""
        self.names |= {manifest.name: manifest.name, manifest.package.name: manifest.name}
        for mark in fingerprint_manifest(manifest):
            self.fingerprints.setdefault(mark, manifest.name)

    def find_owners(self, marks: Collection[int]) -> Mapping[int, str]:
        """Return the package that first contained each known hash."""
        return {mark: self.fingerprints[mark] for mark in marks if mark in self.fingerprints}

    def find_names(self, names: Collection[str]) -> Mapping[str, str]:
        """Return which of these names are packages, with or without namespace."""
        return {name: self.names[name] for name in names if name in self.names}


COPY_FLAGS = frozenset({"copied", "near-copy"})
"""The flags of an expert that repeats another one."""
_PUBLISHER_ADVICE = {
    "copied": "write texts of its own",
    "near-copy": "write examples of its own",
    CATCH_ALL: "keep to examples of one kind, and say in the description what they have in common",
    "stuffed": "use a few keywords that also occur in its other texts",
    "names-another": "leave out the names of other packages",
    "repeated": "remove the repetitions",
    "instructs": "say what it does, not what the router should do",
    "disguised": "write plain letters",
}


def describe_missing_examples(
    ref: str,
    *,
    name_option: str,
    add: str = "build it with some (`expertctl init DIR --examples FILE`)",
) -> str:
    """Warn that an expert will hardly be chosen, and say what helps."""
    return (
        f"{ref} has no routing.examples, so hardly any prompt will be routed to it: "
        f"{add}, or name it with {name_option}"
    )


def advise_publisher(manifest: Manifest, flags: Iterable[Flag]) -> list[str]:
    """Return one line for each flag: what a publisher should change before publishing."""
    return [
        f"{manifest.name} will be flagged where others install it ({flag.code}): {flag.sentence}; "
        f"{_PUBLISHER_ADVICE[flag.code]}"
        for flag in dict.fromkeys(flags)
    ]


def describe_flag_effects(flags: Iterable[Flag], name_option: str) -> str:
    """Say how the router treats a flagged package of another publisher, and how to use it."""
    codes = {flag.code for flag in flags}
    does = "it loses ties"
    if codes & COPY_FLAGS:
        does = "it does not answer where that package does"
    elif CATCH_ALL in codes:
        does = "it is considered last until its publisher narrows its examples"
    return f"{does}; {name_option} uses it"
