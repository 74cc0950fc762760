"""`Encoded`: what one pass of an encoder says about texts.

A text has a row, whose cosines say how close it is to another one, and a deep row, in which a head
finds more of what tells experts apart. Where an encoder sees nothing more, both are the same.
"""

from dataclasses import dataclass
from typing import Self

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
