"""Resemblance: what the vectors of a package say about it beside those of other packages.

A near copy says in other words what another package says. The examples of a grab-all have little in
common, and either are also far from its description or mostly resemble those of other packages.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from expertctl.routing.encoder import Encoder
from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable
from expertctl.store.flags import GRAB_ALL, Flag

NEAR = 0.9
"""Texts this similar say the same in other words."""

MEANING = "minilm"
"""The encoder that sees meaning; examples of one task may have no words in common."""

_SAMPLE = 12
"""How many examples of a package are compared with all others."""
_NEAR_SHARE = 0.4
COMPARED_FROM = 2
"""Fewer examples tell nothing."""
_ALIKE = 0.6
_UNLIKE = 0.25
"""Examples this far apart on average have nothing in common."""
_GRABBED = 4
"""How many other packages the examples of a grab-all resemble at least."""
_GRABBED_SHARE = 0.5
_SEVERAL = 10
"""How many examples must have nothing in common for this to count by itself."""
_UNLIKE_ALL = 0.19
_UNTOLD = 0.12
"""Examples this far from each other and from their description are about everything: even in a
field as wide as medicine they are closer to the description."""
_BLOCK = 1 << 14

Name = Callable[[int], str]
"""Position → the name of the package there."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """The rows of a package's description and examples."""

    description: Vectors  # [dimensions]
    examples: Vectors  # [examples, dimensions]


@dataclass(frozen=True, slots=True, eq=False)
class _Closest:
    """How similar the closest text of other packages is to each example, and its owner."""

    similarities: Vectors
    owners: Rows


def resemblance(
    table: VectorTable, told: Told, *, others: Mask, name: Name, encoder: Encoder
) -> Iterator[Flag]:
    """Flag a near copy and a grab-all; ``others`` are the positions that count."""
    if len(told.examples) < COMPARED_FROM:
        return
    last = len(told.examples) - 1
    sample = told.examples[np.unique(np.linspace(0, last, _SAMPLE).astype(int))]
    closest = _closest(table, sample, others, encoder)
    yield from _near_copy(closest, name)
    if encoder.name == MEANING:
        yield from _grab_all(told, closest)


def _near_copy(closest: _Closest, name: Name) -> Iterator[Flag]:
    compared = len(closest.owners)
    near = Counter(closest.owners[closest.similarities >= NEAR].tolist())
    for other, count in near.most_common(1):
        if count >= max(COMPARED_FROM, _NEAR_SHARE * compared):
            told = f"{count} of {compared} examples say in other words"
            yield Flag("near-copy", f"{told} what those of {name(other)} say", name(other))


def _grab_all(told: Told, closest: _Closest) -> Iterator[Flag]:
    common = _common(told.examples)
    alike = closest.similarities >= _ALIKE
    others = len(np.unique(closest.owners[alike]))
    if common < _UNLIKE and others >= _GRABBED and alike.mean() >= _GRABBED_SHARE:
        sentence = "its examples have little in common, but most resemble those of other packages"
        yield Flag(GRAB_ALL, sentence)
    elif common < _UNLIKE_ALL and len(told.examples) >= _SEVERAL and _is_untold(told):
        sentence = "its examples have little in common with each other and with its description"
        yield Flag(GRAB_ALL, sentence)


def _is_untold(told: Told) -> bool:
    return float((told.examples @ told.description).mean()) < _UNTOLD


def _closest(table: VectorTable, queries: Vectors, others: Mask, encoder: Encoder) -> _Closest:
    """Return how close others are to each query; the owner is -1 where there are none."""
    best = np.full(len(queries), -1, np.float32)
    owner = np.full(len(queries), -1, np.int64)
    end = _end(table, others)
    for start in range(0, end, _BLOCK):
        part = slice(start, min(start + _BLOCK, end))
        own = table.owners[part]
        cosines = queries @ table.rows[part].T
        cosines[:, np.flatnonzero(~others[own])] = -1
        at = cosines.argmax(1)
        top = cosines[np.arange(len(queries)), at]
        better = top > best
        best[better], owner[better] = top[better], own[at[better]]
    return _Closest(encoder.calibrate(best), owner)


def _end(table: VectorTable, others: Mask) -> int:
    """Return where the rows of the last of the others end."""
    positions = np.flatnonzero(others)
    return int(table.starts[positions[-1]] + table.counts[positions[-1]]) if len(positions) else 0


def _common(rows: Vectors) -> float:
    """Return the mean cosine of different rows."""
    total, count = rows.sum(0), len(rows)
    return float((total @ total - count) / (count * (count - 1)))
