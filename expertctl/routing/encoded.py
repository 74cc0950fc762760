"""`Encoded`: what one pass of an encoder says about texts.

A text has a row, whose cosines say how close it is to another one, and a deep row, in which a head
finds more of what tells experts apart. Where an encoder sees nothing more, both are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from expertctl.routing.vector_table import Vectors


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of unit length, or of zeros where a text says nothing, in the order of the texts."""

    rows: Vectors  # [texts, dimensions]
    deep: Vectors  # [texts, deep_dimensions]

    @classmethod
    def flat(cls, rows: Vectors) -> Self:
        """Return rows that are deep as they are."""
        return cls(rows, rows)


def made_unit(rows: Vectors) -> Vectors:
    """Give rows unit length, in place; those of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Vectors = np.divide(rows, norms, out=rows, where=norms > 0)
    return unit


def mapped(cosines: Vectors, points: Sequence[tuple[float, float]]) -> Vectors:
    """Map cosines by linear interpolation between points."""
    raw, meant = zip(*points, strict=True)
    similar: Vectors = np.interp(cosines, raw, meant).astype(np.float32)
    return similar
