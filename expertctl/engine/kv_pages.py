"""Keys and values of a text in pages of sixteen tokens, as the kernels read them.

A page is one block of memory, ``[layers][keys, values][kv_heads][head_dim * 16]`` float32 or
float16, and a text has a list of the addresses of its pages. What stands at and beyond ``length``
is never read. A text may begin with fewer pages than it has room for, and gets more as it grows.
Texts that begin in the same way may share their first pages, whole ones only; those are not written
any more, so a text cannot go back into them. A text may begin to share its own between two passes,
when another begins as it did.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_room import KVRoom
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
More = Callable[[int], None]
"""Called with the bytes of pages before there is memory for them; raises BudgetError."""


def page_count(tokens: int) -> int:
    """Return how many pages so many tokens need."""
    return -(-tokens // PAGE)


def pages_bytes(config: ModelConfig, tokens: int, numbers: Scheme) -> int:
    """Return what the pages of so many tokens take."""
    itemsize = numbers.layout.vector_bytes // LANES
    return page_count(tokens) * config.kv_bytes(PAGE, itemsize=itemsize)


def _nobody_asks(_: int) -> None:
    """All is there already."""


class KVPages(KVRoom):
    """Room for ``capacity`` tokens; `length` of them are filled. One generation owns it."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        numbers: Scheme = Scheme.FLOAT32,
        shared: Sequence[Numbers] = (),
        at_once: int | None = None,
        more: More = _nobody_asks,
    ) -> None:
        """Have pages for ``at_once`` tokens, all by default; those ``shared`` are full."""
        super().__init__(capacity)
        self.numbers = numbers
        self.length = self._shared_tokens = len(shared) * PAGE
        self._shape = (config.layers, 2, config.kv_heads, config.head_dim * PAGE)
        self._page_bytes, self._more = pages_bytes(config, PAGE, numbers), more
        self._pages = list(shared)
        self._table = np.zeros(page_count(capacity), np.int64)
        self._table[: len(shared)] = [page.ctypes.data for page in shared]
        self._add(page_count(capacity if at_once is None else at_once) - len(shared))

    @property
    def table(self) -> int:
        """The address of the list of addresses of its pages."""
        return self._table.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of its own pages, filled or not."""
        return sum(page.nbytes for page in self._pages[self._shared_tokens // PAGE :])

    def require(self, tokens: int) -> None:
        """Have pages for so many more tokens.

        Raises:
            BudgetError: when there is no room or no memory for them.
        """
        super().require(tokens)
        missing = page_count(self.length + tokens) - len(self._pages)
        if missing > 0:
            self._more(missing * self._page_bytes)
            self._add(missing)

    def share(self, pages: Sequence[Numbers]) -> None:
        """Have these as first pages from now on; they hold what its own ones held.

        Its own memory of them is free unless they are the same. The list of addresses stays where
        it is.
        """
        assert len(pages) * PAGE <= self.length, "only what is written can be shared"
        self._pages[: len(pages)] = pages
        self._table[: len(pages)] = [page.ctypes.data for page in pages]
        self._shared_tokens = len(pages) * PAGE

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens only, or all that it shares where that is more.

        So a prompt that is given up keeps the beginning that it shares with others.
        """
        super().rewind(max(length, self._shared_tokens))

    def copy_rows(self, page: Numbers, tokens: int) -> None:
        """Copy the first rows of a page behind the filled ones, which end where a page does."""
        self.require(tokens)
        assert self.length % PAGE == 0
        self._pages[self.length // PAGE][...] = page
        self.advance(tokens)

    def full_pages(self) -> list[Numbers]:
        """Return the pages that are written whole."""
        return self._pages[: self.length // PAGE]

    def hand_over(self) -> list[Numbers]:
        """Return its pages, and have none any more."""
        pages, self._pages = self._pages, []
        self._table = np.zeros(0, np.int64)
        self.capacity = self.length = self._shared_tokens = 0
        return pages

    def check_integrity(self) -> None:
        """Assert what always holds: a possible length, numbers in every filled row."""
        assert self._shared_tokens <= self.length <= min(self.capacity, len(self._pages) * PAGE)
        there = self._table[: len(self._pages)]
        assert [page.ctypes.data for page in self._pages] == there.tolist()
        for number in range(page_count(self.length)):
            self._check(self._pages[number], min(self.length - number * PAGE, PAGE))

    def _add(self, count: int) -> None:
        for place in range(len(self._pages), len(self._pages) + count):
            page = aligned(self._page_bytes, np.uint8)
            self._table[place] = page.ctypes.data
            self._pages.append(page)

    def _check(self, page: Numbers, filled: int) -> None:
        kind = np.float16 if self.numbers is Scheme.FLOAT16 else np.float32
        numbers = page.view(kind).reshape(self._shape)
        keys = numbers[:, 0].reshape(*self._shape[:1], self._shape[2], -1, PAGE)
        values = numbers[:, 1].reshape(*self._shape[:1], self._shape[2], -1, PAGE, PAGE)
        assert np.isfinite(keys[..., :filled]).all()
        assert np.isfinite(values[..., :filled, :]).all()
