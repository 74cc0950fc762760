"""Resemblance: what the vectors of a package say about it beside those of other packages.

A near copy says what another says in other words. A grab-all has examples that have nothing in
common with each other, but each with those of somebody else.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from expertctl.routing.encoder import Encoder
from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable
from expertctl.store.flags import Flag

NEAR = 0.9
"""Texts this similar say the same in other words."""

LEXICAL = "lexical"
"""The encoder that sees words, not meaning: examples of one task may share none."""

_SAMPLE = 12
"""How many examples of a package are compared with all others."""
_NEAR_SHARE = 0.4
_FEW = 2
_ALIKE = 0.6
_UNLIKE = 0.25
"""Examples this far apart on average have nothing in common."""
_GRABBED = 4
"""From how many packages the examples of a grab-all resemble one."""
_GRABBED_SHARE = 0.5
_BLOCK = 1 << 14

Name = Callable[[int], str]
"""Position → the name of the package there."""


def resemblance(
    table: VectorTable,
    examples: Vectors,
    *,
    others: Mask,
    name: Name,
    encoder: Encoder,
) -> Iterator[Flag]:
    """Flag a near copy and a grab-all; ``others`` are the positions that count."""
    if len(examples) < _FEW or not others.any():
        return
    sample = examples[np.unique(np.linspace(0, len(examples) - 1, _SAMPLE).astype(int))]
    cosines, owners = _closest(table, sample, others)
    meant = encoder.calibrate(cosines)
    near = Counter(int(at) for at in owners[meant >= NEAR])
    if near and (count := max(near.values())) >= max(_FEW, _NEAR_SHARE * len(sample)):
        other = name(near.most_common(1)[0][0])
        told = f"{count} of {len(sample)} examples say in other words"
        yield Flag("near-copy", f"{told} what those of {other} say", other)
    if encoder.name != LEXICAL and _is_grab_all(examples, meant, owners):
        told = "its examples have little in common, but most resemble those of other packages"
        yield Flag("grab-all", told)


def _is_grab_all(examples: Vectors, meant: Vectors, owners: Rows) -> bool:
    alike = meant >= _ALIKE
    spread = len(np.unique(owners[alike])) >= _GRABBED and alike.mean() >= _GRABBED_SHARE
    return bool(spread) and _common(examples) < _UNLIKE


def _closest(table: VectorTable, queries: Vectors, others: Mask) -> tuple[Vectors, Rows]:
    """Return the cosine of the closest row of others for each query, and whose it is."""
    last = int(np.flatnonzero(others)[-1])
    end = int(table.starts[last] + table.counts[last])
    best = np.full(len(queries), -1, np.float32)
    owner = np.zeros(len(queries), np.int64)
    for start in range(0, end, _BLOCK):
        part = slice(start, min(start + _BLOCK, end))
        own = table.owners[part]
        cosines = queries @ table.rows[part].T
        cosines[:, np.flatnonzero(~others[own])] = -1
        at = cosines.argmax(1)
        top = cosines[np.arange(len(queries)), at]
        better = top > best
        best[better], owner[better] = top[better], own[at[better]]
    return best, owner


def _common(rows: Vectors) -> float:
    """Return the mean cosine of different rows."""
    total, count = rows.sum(0), len(rows)
    return float((total @ total - count) / (count * (count - 1)))
