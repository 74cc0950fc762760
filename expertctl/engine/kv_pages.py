"""Keys and values of a text in pages of sixteen tokens, as the kernels read them.

A page is one block of memory, ``[layers][keys, values][kv_heads][head_dim * 16]`` float32, and a
text has a list of the addresses of its pages. Memory is not cleared; what stands at and beyond
``length`` is never read.
"""

from typing import Any

import numpy as np

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.kernels.lanes import VECTOR_BYTES
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
_FLOAT_BYTES = 4


class KVPages:
    """Room for ``capacity`` tokens; `length` of them are filled. One generation owns it."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        """Reserve the memory, once."""
        self.capacity = capacity
        self.length = 0
        page = config.kv_bytes(PAGE, itemsize=_FLOAT_BYTES)
        self._shape = (config.layers, 2, config.kv_heads, config.head_dim * PAGE)
        self._pages = [_page(page) for _ in range(-(-capacity // PAGE))]
        self._table = np.array([part.ctypes.data for part in self._pages], np.int64)

    @property
    def table(self) -> int:
        """The address of the list of addresses of its pages."""
        return self._table.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, filled or not."""
        return sum(page.nbytes for page in self._pages)

    def require(self, tokens: int) -> None:
        """Check that so many more tokens fit.

        Raises:
            BudgetError: when they do not.
        """
        if self.length + tokens > self.capacity:
            raise BudgetError(
                f"{tokens} more tokens do not fit into the KV cache: "
                f"{self.length} of {self.capacity} are used",
                hint="shorten the prompt or ask for fewer tokens",
            )

    def advance(self, tokens: int) -> None:
        """Count what every layer has written."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens only."""
        assert 0 <= length <= self.length, f"cannot rewind from {self.length} to {length}"
        self.length = length

    def reset(self) -> None:
        """Make room for another generation."""
        self.rewind(0)

    def copy_from(self, other: "KVPages") -> None:
        """Become what other pages of the same base hold; those stay as they are.

        Raises:
            BudgetError: when it does not fit.
        """
        self.reset()
        self.require(other.length)
        for own, others in zip(self._pages, other._pages[: _pages(other.length)], strict=False):
            own[...] = others
        self.advance(other.length)

    def check_integrity(self) -> None:
        """Assert what always holds: a possible length, numbers in every filled row."""
        assert 0 <= self.length <= self.capacity <= len(self._pages) * PAGE
        assert [page.ctypes.data for page in self._pages] == self._table.tolist()
        for number in range(_pages(self.length)):
            filled = min(self.length - number * PAGE, PAGE)
            numbers = self._pages[number].view(np.float32).reshape(self._shape)
            keys = numbers[:, 0].reshape(*self._shape[:1], self._shape[2], -1, PAGE)
            values = numbers[:, 1].reshape(*self._shape[:1], self._shape[2], -1, PAGE, PAGE)
            assert np.isfinite(keys[..., :filled]).all()
            assert np.isfinite(values[..., :filled, :]).all()


def _page(size: int) -> Numbers:
    """Return memory that begins where a vector does."""
    raw = np.empty(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size]


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
