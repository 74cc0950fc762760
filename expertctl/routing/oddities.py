"""Oddities of one manifest: what no honest description of an expert contains.

Piled-up or foreign keywords, repeated examples, names of other packages, orders to the router, and
letters that are not what they look like.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from expertctl.routing.spelling import hidden, plain
from expertctl.routing.words import STOP_WORDS, says_something, words_of
from expertctl.schema.manifest import Manifest
from expertctl.store.flags import Flag
from expertctl.store.suspicions import Known

_MANY_KEYWORDS = 64
_MANY_UNRELATED = 8
_UNRELATED_SHARE = 0.6
_MANY_STOP_WORDS = 3
_MANY_NAMES = 3
_STEM = 4
_REPEATED_SHARE = 0.2
_REPEATED_TEXTS = 3
_REPEATED_WORDS = 6
_REPEATED_WORD_SHARE = 0.25
_SHOWN = 3
_SHOWN_CHARACTERS = 60

_PACKAGE = re.compile(r"(?<![\w/.-])[a-z0-9]+(?:-[a-z0-9]+)*/[a-z0-9]+(?:-[a-z0-9]+)*(?![\w/])")
_ORDER = re.compile(
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


def oddities(manifest: Manifest, others: Known) -> Iterator[Flag]:
    """Flag what is odd about a manifest by itself, and names of other packages in it."""
    yield from _stuffed(manifest)
    yield from _naming(manifest, others)
    yield from _repeated(manifest.routing.examples)
    for flag in (_ordering(manifest), _disguised(manifest)):
        if flag is not None:
            yield flag


def _stuffed(manifest: Manifest) -> Iterator[Flag]:
    keywords = manifest.routing.keywords
    if len(keywords) > _MANY_KEYWORDS:
        yield Flag("stuffed", f"it has {len(keywords)} keywords")
    empty = [word for word in keywords if not says_something(word)]
    if len(empty) >= _MANY_STOP_WORDS:
        yield Flag("stuffed", f"{len(empty)} of its keywords say nothing: {_shown(empty)}")
    foreign = _unrelated(manifest)
    if len(foreign) >= _MANY_UNRELATED and len(foreign) > _UNRELATED_SHARE * len(keywords):
        told = f"{len(foreign)} of its {len(keywords)} keywords"
        yield Flag("stuffed", f"{told} are in none of its texts: {_shown(foreign)}")


def _unrelated(manifest: Manifest) -> list[str]:
    """Return the keywords of which no word stands in the texts of a package."""
    routing = manifest.routing
    texts = [manifest.description, manifest.name, routing.task, *manifest.tags, *routing.examples]
    stems = {word[:_STEM] for text in texts for word in words_of(plain(text).replace("-", " "))}
    return [
        keyword
        for keyword in routing.keywords
        if says_something(keyword)
        and not any(word[:_STEM] in stems for word in words_of(keyword) if word not in STOP_WORDS)
    ]


def _naming(manifest: Manifest, others: Known) -> Iterator[Flag]:
    """Flag examples and keywords that name other packages."""
    routing = manifest.routing
    texts = [*routing.examples, *routing.keywords]
    named = {name for text in texts for name in _PACKAGE.findall(plain(text).casefold())}
    found = {n for n in others.named(named).values() if n != manifest.name}
    keywords = ["-".join(words_of(word)) for word in _unrelated(manifest)]
    short = {n for n in others.named(keywords).values() if n != manifest.name}
    found |= short if len(short) >= _MANY_NAMES else set()
    if found:
        first = min(found)
        yield Flag("names-another", f"it names other packages: {_shown(sorted(found))}", first)


def _repeated(examples: Sequence[str]) -> Iterator[Flag]:
    counts = Counter(" ".join(words_of(plain(text))) for text in examples)
    more = len(examples) - len(counts)
    if more >= max(_REPEATED_TEXTS, _REPEATED_SHARE * len(examples)):
        yield Flag("repeated", f"{more} of its {len(examples)} examples repeat others of its own")
    for text in examples:
        if word := _piled(text):
            yield Flag("repeated", f"an example says {word!r} again and again")
            return


def _piled(text: str) -> str | None:
    """Return a word that makes up much of a text."""
    words = words_of(plain(text))
    counts = Counter(w for w in words if w not in STOP_WORDS and not w[0].isdigit())
    least = max(_REPEATED_WORDS, _REPEATED_WORD_SHARE * len(words))
    return next((word for word, count in counts.most_common(1) if count >= least), None)


def _ordering(manifest: Manifest) -> Flag | None:
    routing = manifest.routing
    for text in (manifest.description, *routing.examples, *routing.keywords):
        if match := _ORDER.search(plain(text)):
            return Flag("instructs", f"it tells the router what to do: {_short(match.group())!r}")
    return None


def _disguised(manifest: Manifest) -> Flag | None:
    routing = manifest.routing
    for text in (manifest.description, *routing.examples, *routing.keywords):
        if word := hidden(text):
            return Flag("disguised", f"its texts have letters in disguise: {_short(word)!r}")
    return None


def _shown(words: Sequence[str]) -> str:
    rest = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return f"{', '.join(_short(word) for word in words[:_SHOWN])}{rest}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
