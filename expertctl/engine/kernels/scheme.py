"""How the numbers of a packed matrix are stored, and what the rows for its products look like.

Sixteen rows lie together, so that one vector holds some columns of all sixteen and no sum ever
runs across lanes; decode and prompts read the same bytes.
"""

from dataclasses import dataclass
from enum import Enum

GROUP = 128
"""Columns that share a scale, where there are scales."""


class Scheme(Enum):
    """The storage of a matrix."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def layout(self) -> "Layout":
        """What one vector of it holds."""
        return _LAYOUTS[self]


@dataclass(frozen=True, slots=True)
class Layout:
    """What one vector holds: ``columns`` columns of sixteen rows."""

    columns: int
    vector_bytes: int
    row_bytes: int
    """Bytes of one number of the rows for its products: float32, bfloat16 or int8."""
    zero: int
    """What stands for 0 where numbers are stored unsigned."""
    tokens: int
    """Tokens in the largest tile, so that its sums stay in registers."""

    @property
    def is_grouped(self) -> bool:
        """Whether numbers are integers with a scale per group of columns."""
        return self.zero != 0

    def vectors(self, columns: int) -> int:
        """Return how many vectors one block of rows takes."""
        return -(-columns // self.columns)

    def groups(self, columns: int) -> int:
        """Return how many scales a row takes."""
        return -(-columns // GROUP) if self.is_grouped else 0


_LAYOUTS = {
    Scheme.FLOAT32: Layout(columns=1, vector_bytes=64, row_bytes=4, zero=0, tokens=6),
    Scheme.FLOAT16: Layout(columns=1, vector_bytes=32, row_bytes=4, zero=0, tokens=6),
    Scheme.BFLOAT16: Layout(columns=2, vector_bytes=64, row_bytes=2, zero=0, tokens=6),
    Scheme.INT8: Layout(columns=4, vector_bytes=64, row_bytes=1, zero=128, tokens=6),
    Scheme.INT4: Layout(columns=8, vector_bytes=64, row_bytes=1, zero=8, tokens=4),
}

FLOATING = frozenset({Scheme.FLOAT32, Scheme.FLOAT16})
"""Schemes whose products take float32 rows as they are."""
