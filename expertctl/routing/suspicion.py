"""Suspicion: what in a manifest looks as if it were made to mislead the router.

Deterministic, from the manifest and from what other packages brought before. Nothing here refuses a
package: a flag is told to people, and costs a package its ties.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Protocol, Self

from expertctl.routing.spelling import plain
from expertctl.routing.words import words_of
from expertctl.schema.manifest import Manifest
from expertctl.store.suspicions import Flag

RULES = 1
"""Raised whenever the same packages would get other flags."""

_SHINGLE = 3
_SAMPLE = 32
"""How many pieces of a text are marked: those with the smallest numbers, so copies share them."""
_COPIED_PIECES = 0.6
_COPIED_TEXTS = 0.2
_FEW = 2


class Known(Protocol):
    """What other packages brought before."""

    def owners(self, marks: Collection[int]) -> Mapping[int, str]:
        """Return the package that brought each mark first; of new marks, nothing."""

    def named(self, names: Collection[str]) -> Mapping[str, str]:
        """Return which of these names are packages, with or without namespace."""


@dataclass(slots=True)
class KnownManifests:
    """What some manifests bring, kept in memory; the first of a text owns it."""

    marks: dict[int, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> Self:
        """Return what these bring, the earliest first."""
        known = cls()
        for manifest in manifests:
            known.add(manifest)
        return known

    def add(self, manifest: Manifest) -> None:
        """Add what one more brings."""
        self.names |= {str(manifest.package): manifest.name, manifest.package.name: manifest.name}
        for mark in marks_of(manifest):
            self.marks.setdefault(mark, manifest.name)

    def owners(self, marks: Collection[int]) -> Mapping[int, str]:
        """Return the package that brought each mark first."""
        return {mark: self.marks[mark] for mark in marks if mark in self.marks}

    def named(self, names: Collection[str]) -> Mapping[str, str]:
        """Return which of these names are packages."""
        return {name: self.names[name] for name in names if name in self.names}


@dataclass(frozen=True, slots=True)
class Marked:
    """A text as numbers: one of all its words, some of pieces of three words."""

    whole: int
    pieces: frozenset[int]

    @property
    def marks(self) -> frozenset[int]:
        """All of them."""
        return self.pieces | {self.whole}


def flags(manifest: Manifest, others: Known) -> tuple[Flag, ...]:
    """Return what is suspicious about a manifest, given what others brought before."""
    return tuple(_found(manifest, others))


def marks_of(manifest: Manifest) -> frozenset[int]:
    """Return the marks of the texts of a manifest."""
    texts = [manifest.description, *manifest.routing.examples]
    return frozenset().union(*(marked(text).marks for text in texts))


def marked(text: str) -> Marked:
    """Turn a text into marks; numbers count alike, so that changing them makes no other text."""
    words = ["#" if word[0].isdigit() else word for word in words_of(plain(text))]
    pieces = {_mark(" ".join(words[i : i + _SHINGLE])) for i in range(len(words) - _SHINGLE + 1)}
    return Marked(_mark("\n".join(words)), frozenset(islice(sorted(pieces), _SAMPLE)))


def _mark(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _found(manifest: Manifest, others: Known) -> Iterator[Flag]:
    yield from _copied(manifest, others)


def _copied(manifest: Manifest, others: Known) -> Iterator[Flag]:
    examples = [marked(text) for text in manifest.routing.examples]
    description = marked(manifest.description)
    marks = frozenset().union(description.marks, *(text.marks for text in examples))
    owners = {
        mark: name
        for mark, name in others.owners(marks).items()
        if name.partition("/")[0] != manifest.package.namespace
    }
    copied = Counter(name for text in examples if (name := _source(text, owners)))
    if copied and (share := copied.total()) >= max(_FEW, _COPIED_TEXTS * len(examples)):
        other = copied.most_common(1)[0][0]
        yield Flag("copied", f"{share} of its {len(examples)} examples are those of {other}", other)
    if (source := owners.get(description.whole)) is not None:
        yield Flag("copied", f"its description is that of {source}", source)


def _source(text: Marked, owners: Mapping[int, str]) -> str | None:
    """Return the package that a text was taken from."""
    if text.whole in owners:
        return owners[text.whole]
    counts = Counter(owners[piece] for piece in text.pieces if piece in owners)
    enough = _COPIED_PIECES * len(text.pieces)
    return next((name for name, count in counts.most_common(1) if count > enough), None)
