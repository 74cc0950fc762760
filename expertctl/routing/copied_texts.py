"""Copied texts: which examples of a manifest another package brought first.

A text is turned into numbers, its marks: one of all its words, and some of pieces of three words.
So a copy with other words around it, or other numbers in it, is still found. Looking up marks costs
the same however many packages there are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from expertctl.routing.spelling import plain
from expertctl.routing.words import words_of
from expertctl.schema.manifest import Manifest
from expertctl.store.flags import Flag
from expertctl.store.suspicions import Known

_PIECE = 3
_SAMPLE = 32
"""How many pieces of a text are marked: those with the smallest numbers, which copies share."""
_SAME_PIECES = 0.6
_SAME_TEXTS = 0.25
"""The shares of pieces and of examples from which on a text and a package are copies."""
_FEW = 2


@dataclass(frozen=True, slots=True)
class Marked:
    """A text as numbers: one of all its words, some of pieces of it."""

    whole: int
    pieces: frozenset[int]

    @classmethod
    def of(cls, text: str) -> "Marked":
        """Turn a text into marks; numbers count alike, so changing them makes no other text."""
        words = ["#" if word[0].isdigit() else word for word in words_of(plain(text))]
        spans = (words[i : i + _PIECE] for i in range(len(words) - _PIECE + 1))
        pieces = sorted({_mark(" ".join(span)) for span in spans})
        return cls(_mark("\n".join(words)), frozenset(pieces[:_SAMPLE]))

    @property
    def marks(self) -> frozenset[int]:
        """All of them."""
        return self.pieces | {self.whole}


def marks_of(manifest: Manifest) -> frozenset[int]:
    """Return the marks of the texts of a manifest."""
    texts = [manifest.description, *manifest.routing.examples]
    return frozenset().union(*(Marked.of(text).marks for text in texts))


def copied_texts(manifest: Manifest, others: Known) -> Iterator[Flag]:
    """Flag examples and a description that another publisher's package brought first."""
    examples = [Marked.of(text) for text in manifest.routing.examples]
    description = Marked.of(manifest.description)
    marks = frozenset().union(description.marks, *(text.marks for text in examples))
    owners = _foreign(others.owners(marks), manifest)
    sources = Counter(name for text in examples if (name := _source(text, owners)))
    if sources and sources.total() >= max(_FEW, _SAME_TEXTS * len(examples)):
        ((other, _),) = sources.most_common(1)
        told = f"{sources.total()} of its {len(examples)} examples"
        yield Flag("copied", f"{told} are those of {_and_others(other, sources)}", other)
    if description.pieces and (source := owners.get(description.whole)):
        yield Flag("copied", f"its description is that of {source}", source)


def _foreign(owners: Mapping[int, str], manifest: Manifest) -> dict[int, str]:
    """Leave out what the same publisher brought: that is not copying."""
    own = manifest.package.namespace
    return {mark: name for mark, name in owners.items() if name.partition("/")[0] != own}


def _source(text: Marked, owners: Mapping[int, str]) -> str | None:
    """Return the package that a text was taken from."""
    if text.whole in owners:
        return owners[text.whole]
    counts = Counter(owners[piece] for piece in text.pieces if piece in owners)
    enough = _SAME_PIECES * len(text.pieces)
    return next((name for name, count in counts.most_common(1) if count > enough), None)


def _and_others(first: str, sources: Mapping[str, int]) -> str:
    more = len(sources) - 1
    return f"{first} and {more} more" if more else first


def _mark(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
