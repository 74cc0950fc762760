"""The layouts of KV pages: how the keys and values of sixteen tokens are stored in all layers.

A backend chooses the layout of its pages; `BlockPool` lends pages of any layout by the same rules.
All layouts begin with the axes [layers][keys, values][kv_heads], so a page is one block of memory.

- `InterleavedPages`, for kernels: keys are [head_dim][16 tokens], values [head_dim / 16][16
  tokens][16]; float32 or float16.
- `RowPages`, for numpy: keys and values are rows [16 tokens][head_dim], of any width; float32.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, LANES, Scheme
from expertctl.package.model_config import ModelConfig

_FLOAT_BYTES = 4


class PageLayout(Protocol):
    """How a page is stored; equal layouts store pages in the same way."""

    @property
    def name(self) -> str:
        """Equal for backends that can share one pool."""

    def page_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a page."""

    def allocate_page(self, config: ModelConfig) -> AnyArray:
        """Return a page of zeros; one that is copied is assigned to it."""

    def check_page(self, config: ModelConfig, page: AnyArray, filled: int) -> None:
        """Assert that the rows of its first ``filled`` tokens are finite."""


@dataclass(frozen=True, slots=True)
class InterleavedPages:
    """Pages that kernels read, as bytes; ``numbers`` is float32 or float16."""

    numbers: Scheme = Scheme.FLOAT32

    @property
    def name(self) -> str:
        """Equal for backends that can share one pool."""
        return f"pages of {self.numbers.value}"

    def page_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a page."""
        itemsize = self.numbers.layout.vector_bytes // LANES
        return config.count_kv_bytes(KV_PAGE_TOKENS, itemsize=itemsize)

    def allocate_page(self, config: ModelConfig) -> AnyArray:
        """Return a page of zeros, uint8."""
        return aligned_zeros(self.page_bytes(config), np.uint8)

    def check_page(self, config: ModelConfig, page: AnyArray, filled: int) -> None:
        """Assert that the rows of its first ``filled`` tokens are finite."""
        layers, heads, width = config.layers, config.kv_heads, KV_PAGE_TOKENS
        kind = np.float16 if self.numbers is Scheme.FLOAT16 else np.float32
        numbers = page.view(kind).reshape(layers, 2, heads, -1)
        keys = numbers[:, 0].reshape(layers, heads, -1, width)
        values = numbers[:, 1].reshape(layers, heads, -1, width, width)
        assert np.isfinite(keys[..., :filled]).all()
        assert np.isfinite(values[..., :filled, :]).all()


@dataclass(frozen=True, slots=True)
class RowPages:
    """Pages of rows: float32 [layers, 2, kv_heads, 16, head_dim]."""

    @property
    def name(self) -> str:
        """Equal for backends that can share one pool."""
        return "plain pages"

    def page_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a page."""
        return config.count_kv_bytes(KV_PAGE_TOKENS, itemsize=_FLOAT_BYTES)

    def allocate_page(self, config: ModelConfig) -> AnyArray:
        """Return a page of zeros."""
        shape = (config.layers, 2, config.kv_heads, KV_PAGE_TOKENS, config.head_dim)
        return aligned_zeros(shape, np.float32)

    def check_page(self, config: ModelConfig, page: AnyArray, filled: int) -> None:
        """Assert that the rows of its first ``filled`` tokens are finite."""
        assert page.shape[0] == config.layers
        assert np.isfinite(page[..., :filled, :]).all()


FLOAT32_PAGES = InterleavedPages(Scheme.FLOAT32)
ROW_PAGES = RowPages()


def count_pages(tokens: int) -> int:
    """Return the number of pages of so many tokens."""
    return -(-tokens // KV_PAGE_TOKENS)


def estimate_pages_bytes(config: ModelConfig, tokens: int, layout: PageLayout) -> int:
    """Return the bytes of the pages of so many tokens."""
    return count_pages(tokens) * layout.page_bytes(config)
