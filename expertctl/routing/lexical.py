"""The built-in encoder: hashed words and pieces of words, no model, nothing to download.

Two texts are close when they ask in the same words: shared words, parts of words, word pairs and
numbers with a unit. What a request is about (lists, ``key: value`` pairs, anything after a colon)
counts less than what it asks for. Synonyms are not seen, so documents say ``encoder: "lexical"``.

Its cosines are smaller than those of a trained model; `LexicalEncoder.calibrate` maps them so that
thresholds mean the same for either encoder (ADR 4).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.encoded import Encoded, made_unit, mapped
from expertctl.routing.vector_table import Vectors
from expertctl.routing.words import STOP_WORDS, Word, is_number, read_words

DIMENSIONS = 1024
VERSION = 1
"""Raised whenever the same text gets another vector, so that stored vectors are made again."""

CALIBRATION = ((-1.0, -1.0), (0.0, 0.0), (0.22, 0.5), (0.42, 0.6), (1.0, 1.0))
"""Raw cosine → similarity: piecewise linear through these points, measured for ADR 4."""

_REQUEST_WORDS = frozenset(
    """
    best change create describe explain find five good help list many much name names need new one
    rewrite say three turn two want write
    """.split()  # noqa: SIM905  # reads better as text
)
_STOP, _REQUEST, _NUMBER, _WORD = 0.08, 0.25, 0.3, 1.0
_PAIR, _PAIR_WITH_ONE, _PAIR_OF_TWO = 0.8, 0.35, 0.12
_AMOUNT, _PIECES, _DATA = 0.6, 0.5, 0.35
_PIECE_SIZES = (3, 4)


class LexicalEncoder:
    """Signed feature hashing (blake2b, the same on every machine) with sublinear counts."""

    name = "lexical"
    dimensions = DIMENSIONS
    deep_dimensions = DIMENSIONS
    stamp = f"lexical {VERSION}"

    def digest(self) -> Digest:
        """Return what the vectors depend on: the version."""
        return Digest.of(self.stamp.encode())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text; a text without a word gives zeros."""
        rows = np.zeros((len(texts), DIMENSIONS), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for feature, weight in _weights(read_words(text)).items():
                place, sign = _hashed(feature)
                row[place] += sign * weight
        return made_unit(rows)

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        """Return the rows, deep as they are: words are all that is seen."""
        return Encoded.flat(self.encode(texts))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map raw cosines to similarities; monotone."""
        return mapped(cosines, CALIBRATION)


@dataclass(frozen=True, slots=True)
class _Token:
    """A word as the encoder sees it: all numbers alike, data with less weight."""

    text: str
    importance: float

    @property
    def is_common(self) -> bool:
        return self.text == "#" or self.text in STOP_WORDS or self.text in _REQUEST_WORDS


def _weights(words: list[Word]) -> dict[str, float]:
    """Return the weight of every feature of a text; repetition counts by its logarithm."""
    tokens = [_Token("#" if is_number(w.text) else w.text, _DATA if w.data else 1) for w in words]
    counts: dict[str, tuple[int, float]] = {}
    for feature, weight in _features(tokens):
        count, before = counts.get(feature, (0, 0.0))
        counts[feature] = (count + 1, max(weight, before))
    return {feature: weight * (1 + math.log(n)) for feature, (n, weight) in counts.items()}


def _features(tokens: list[_Token]) -> Iterator[tuple[str, float]]:
    for token in tokens:
        yield f"word {token.text}", _word_weight(token)
        if not token.is_common:
            pieces = list(_pieces(token.text))
            share = _PIECES * token.importance / math.sqrt(len(pieces))
            yield from ((f"piece {piece}", share) for piece in pieces)
    for a, b in pairwise(tokens):
        common = (_PAIR, _PAIR_WITH_ONE, _PAIR_OF_TWO)[a.is_common + b.is_common]
        yield f"pair {a.text} {b.text}", common * min(a.importance, b.importance)
        if a.text == "#" and not b.is_common:
            yield "amount", _AMOUNT


def _word_weight(token: _Token) -> float:
    if token.text == "#":
        return _NUMBER
    if token.text in STOP_WORDS:
        return _STOP
    return (_REQUEST if token.is_common else _WORD) * token.importance


def _pieces(word: str) -> Iterator[str]:
    padded = f"<{word}>"
    for size in _PIECE_SIZES:
        yield from (padded[i : i + size] for i in range(len(padded) - size + 1))


def _hashed(feature: str) -> tuple[int, float]:
    value = int.from_bytes(blake2b(feature.encode(), digest_size=8).digest(), "little")
    return value % DIMENSIONS, 1.0 if value >> 63 else -1.0
