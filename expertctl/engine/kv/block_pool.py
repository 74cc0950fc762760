"""Paged KV caches, and `BlockPool`, the owner of all pages.

A page holds sixteen tokens in one block of memory, in the layout of the backend (`PageLayout`); a
sequence has a list of its pages and of their addresses. Rows at and beyond ``length`` are never
read. A sequence may start with fewer pages than its capacity and gets more as it grows. Sequences
with a common prefix may share their first complete pages; shared pages are never written again, so
a sequence cannot rewind into them.

A sequence with the same prefix, cache key and plan as an earlier one shares its pages and only
reads them; a page in which the two diverge is copied. At least one token is always read, for its
logits. A completed sequence is kept for later ones; one that failed or was cancelled keeps nothing
of its own, and what it shared stays. Sequences without a key neither find nor keep anything. When
another sequence starts, a running one shares the complete pages of its prompt, but not of its
unfinished answer, and no page that is still written. From then on they are kept like all others,
even if the sequence fails: their rows are valid.

Bytes of pages count as ``kv`` and are reserved before they are allocated. Pages without a user are
evicted when `AdapterCache` reclaims memory, in any thread; so they share its lock. They are also
evicted at the end of a sequence if they exceed ``cached_limit``. Sequences are created in one
thread, and never while a prefill chunk of another is running.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, LANES, Scheme
from expertctl.engine.kv.kv_cache import KVAllocation, KVCacheBase, KVRequest, PrefixKey
from expertctl.engine.kv.radix_cache import (
    KVBlock,
    Numbers,
    PrefixMatch,
    RadixCache,
    Tokens,
)
from expertctl.engine.kv.recurrent_state import (
    SequenceStates,
    estimate_growth_bytes,
    estimate_state_bytes,
)
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig

_FLOAT_BYTES = 4


class PageLayout(Protocol):
    """How a page is stored; equal layouts store pages in the same way.

    All layouts begin with the axes [layers][keys, values][kv_heads].
    """

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
    """Pages that kernels read, as bytes; ``numbers`` is float32 or float16.

    Keys are [head_dim][16 tokens], values [head_dim / 16][16 tokens][16].
    """

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
        layers, heads, width = len(config.attention_layers), config.kv_heads, KV_PAGE_TOKENS
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
        heads = (config.kv_heads, KV_PAGE_TOKENS, config.head_dim)
        return aligned_zeros((len(config.attention_layers), 2, *heads), np.float32)

    def check_page(self, config: ModelConfig, page: AnyArray, filled: int) -> None:
        """Assert that the rows of its first ``filled`` tokens are finite."""
        assert page.shape[0] == len(config.attention_layers)
        assert np.isfinite(page[..., :filled, :]).all()


FLOAT32_PAGES = InterleavedPages(Scheme.FLOAT32)
ROW_PAGES = RowPages()


def count_pages(tokens: int) -> int:
    """Return the number of pages of so many tokens."""
    return -(-tokens // KV_PAGE_TOKENS)


def estimate_pages_bytes(config: ModelConfig, tokens: int, layout: PageLayout) -> int:
    """Return the bytes of the pages of so many tokens, and of the states of their sequence."""
    pages = count_pages(tokens)
    states = estimate_state_bytes(config, pages * KV_PAGE_TOKENS)
    return pages * layout.page_bytes(config) + states


PageCallback = Callable[[int], None]
"""Called with the bytes of pages before they are allocated; raises BudgetError."""


def _ignore_growth(_: int) -> None:
    """Do nothing: all pages exist already."""


class PagedKVCache(KVCacheBase):
    """Paged KV cache of ``capacity`` tokens, `length` of them filled; one generation owns it."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        layout: PageLayout = FLOAT32_PAGES,
        shared: Sequence[Numbers] = (),
        initial_tokens: int | None = None,
        on_growth: PageCallback = _ignore_growth,
    ) -> None:
        """Allocate pages for ``initial_tokens``, by default all; the ``shared`` ones are full."""
        super().__init__(capacity)
        self.config, self.layout = config, layout
        self.states = SequenceStates(config) if config.state_bytes else None
        self.length = self._shared_tokens = len(shared) * KV_PAGE_TOKENS
        self._more = on_growth
        self._pages = list(shared)
        self._table = np.zeros(count_pages(capacity), np.int64)
        self._table[: len(shared)] = [page.ctypes.data for page in shared]
        tokens = capacity if initial_tokens is None else initial_tokens
        self._add_pages(count_pages(tokens) - len(shared))

    @property
    def pages(self) -> Sequence[Numbers]:
        """Its pages, the shared ones first; valid until `ensure_capacity` or sharing."""
        return self._pages

    @property
    def table(self) -> int:
        """Address of the array of page addresses."""
        return self._table.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of its own pages and states, filled or not."""
        own = sum(page.nbytes for page in self._pages[self._shared_tokens // KV_PAGE_TOKENS :])
        tokens = len(self._pages) * KV_PAGE_TOKENS
        return own + estimate_state_bytes(self.config, tokens, shared_tokens=self._shared_tokens)

    def ensure_capacity(self, tokens: int) -> None:
        """Allocate the pages for so many more tokens.

        Raises:
            BudgetError: when the budget or the memory is exhausted.
        """
        super().ensure_capacity(tokens)
        missing = count_pages(self.length + tokens) - len(self._pages)
        if missing > 0:
            there, more = len(self._pages) * KV_PAGE_TOKENS, missing * KV_PAGE_TOKENS
            growth = estimate_growth_bytes(self.config, there, more)
            self._more(missing * self.layout.page_bytes(self.config) + growth)
            self._add_pages(missing)

    def use_shared_pages(self, pages: Sequence[Numbers]) -> None:
        """Replace the first pages by these, which have the same contents.

        Its own copies are freed unless they are the same. The array of addresses stays in place.
        """
        assert len(pages) * KV_PAGE_TOKENS <= self.length, "only what is written can be shared"
        self._pages[: len(pages)] = pages
        self._table[: len(pages)] = [page.ctypes.data for page in pages]
        self._shared_tokens = len(pages) * KV_PAGE_TOKENS

    def rewind(self, length: int) -> None:
        """Keep only the first ``length`` tokens, or all shared ones if those are more.

        So a cancelled prompt keeps the prefix that it shares with others.
        """
        super().rewind(max(length, self._shared_tokens))

    def copy_rows(self, page: Numbers, tokens: int) -> None:
        """Append the first rows of a page; the filled rows must end at a page boundary."""
        self.ensure_capacity(tokens)
        assert self.length % KV_PAGE_TOKENS == 0
        self._pages[self.length // KV_PAGE_TOKENS][...] = page
        self.advance(tokens)

    def list_full_pages(self) -> list[Numbers]:
        """Return the completely written pages."""
        return self._pages[: self.length // KV_PAGE_TOKENS]

    def take_pages(self) -> list[Numbers]:
        """Remove and return its pages."""
        pages, self._pages = self._pages, []
        self._table = np.zeros(0, np.int64)
        self.capacity = self.length = self._shared_tokens = 0
        return pages

    def check_integrity(self) -> None:
        """Assert the invariants: a possible length, and finite numbers in every filled row."""
        room = min(self.capacity, len(self._pages) * KV_PAGE_TOKENS)
        assert self._shared_tokens <= self.length <= room
        there = self._table[: len(self._pages)]
        assert [page.ctypes.data for page in self._pages] == there.tolist()
        for number, page in enumerate(self._pages[: count_pages(self.length)]):
            filled = min(self.length - number * KV_PAGE_TOKENS, KV_PAGE_TOKENS)
            self.layout.check_page(self.config, page, filled)
        if self.states is not None:
            self.states.check_integrity(self.length)

    def _add_pages(self, count: int) -> None:
        for place in range(len(self._pages), len(self._pages) + count):
            page = self.layout.allocate_page(self.config)
            self._table[place] = page.ctypes.data
            self._pages.append(page)


@dataclass(slots=True, eq=False)
class _SequenceBlocks:
    """Memory of one sequence: the blocks that it shares, and the bytes of its own pages."""

    origin: PrefixKey | None
    prompt: Tokens
    blocks: tuple[KVBlock, ...] = ()
    nbytes: int = 0
    pages: PagedKVCache | None = None
    """All its pages, shared ones included."""
    is_forgotten: bool = False


class BlockPool:
    """The owner of all pages."""

    def __init__(
        self,
        tiers: AdapterCache,
        *,
        layout: PageLayout = FLOAT32_PAGES,
        cached_limit: int | None = None,
    ) -> None:
        """Start empty; pages are in the device tier and have one ``layout``.

        ``cached_limit`` limits the bytes of pages that no running sequence uses; None: no limit.
        """
        self._tiers, self._layout, self._kept_limit = tiers, layout, cached_limit
        self._tree = RadixCache()
        self._sequences: list[_SequenceBlocks] = []
        tiers.register_reclaimable(
            Tier.DEVICE, nbytes=lambda: self._tree.idle_bytes, reclaim=self._evict
        )

    @contextmanager
    def allocate(self, request: KVRequest) -> Iterator[KVAllocation[PagedKVCache]]:
        """Lend pages; the first ones hold the rows of kept sequences with the same prefix."""
        sequence = _SequenceBlocks(request.prefix_key, request.list_row_tokens(request.ids))
        self._sequences.append(sequence)
        try:
            allocation = self._allocate(request, sequence)
        except BaseException:
            self._finish(sequence, ())
            raise
        try:
            yield allocation
        finally:
            tokens = allocation.list_completed_tokens(request)
            del allocation.cache
            self._finish(sequence, tokens)

    def check_free_row(self, request: KVRequest) -> None:
        """Do nothing: a sequence waits for nothing but memory."""

    @property
    def free_rows(self) -> int | None:
        """None: there are as many as fit into the memory."""
        return None

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; its running sequences will keep nothing."""
        with self._tiers.lock:
            before = self._tree.nbytes
            for sequence in self._sequences:
                if sequence.origin is not None and sequence.origin.owner == cache_key:
                    sequence.is_forgotten = True
            self._tree.forget(cache_key)
            freed = before - self._tree.nbytes
        self._release(freed)

    def clear(self) -> None:
        """Drop all pages that no running sequence uses."""
        self._evict(self._tree.idle_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, both kept and in use."""
        return self._tree.nbytes + sum(sequence.nbytes for sequence in self._sequences)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pages that no running sequence uses."""
        return self._tree.idle_bytes

    def check_integrity(self) -> None:
        """Assert the invariants: each block is referenced by the sequences that share it."""
        with self._tiers.lock:
            self._tree.check_integrity()
            limit = self._kept_limit
            assert limit is None or self._sequences or self.cached_bytes <= limit
            shared = Counter(block for sequence in self._sequences for block in sequence.blocks)
            assert all(block.ref_count == count for block, count in shared.items())
            lost = sum(block.nbytes for block in shared if block.is_detached)
            assert self._tree.nbytes == lost + sum(b.nbytes for b in self._tree.iterate_blocks())
            assert all(b.ref_count == 0 for b in self._tree.iterate_blocks() if b not in shared)
            for sequence in self._sequences:
                assert sequence.pages is None or sequence.nbytes == sequence.pages.nbytes

    def check_idle(self) -> None:
        """Assert that nothing is in use."""
        assert not self._sequences

    def _allocate(
        self, request: KVRequest, sequence: _SequenceBlocks
    ) -> KVAllocation[PagedKVCache]:
        found = self._reserve_pages(request, sequence)
        shared = [block.page for block in found.blocks]
        pages = PagedKVCache(
            request.config,
            request.capacity,
            layout=self._layout,
            shared=shared,
            initial_tokens=request.initial_tokens,
            on_growth=partial(self._reserve_growth, sequence, request.description),
        )
        if found.partial_block is not None:
            pages.copy_rows(found.partial_block.page, found.partial_tokens)
            self._share_blocks(sequence, found.blocks)
        if pages.states is not None:
            pages.states.current = found.state
        sequence.pages = pages
        return KVAllocation(pages, reused=max(found.tokens - request.virtual_tokens, 0))

    def _reserve_pages(self, request: KVRequest, sequence: _SequenceBlocks) -> PrefixMatch:
        """Share the blocks found and reserve the bytes of the rest.

        A page to be copied must be in memory together with its copy. Where both do not fit, its few
        tokens are read again.
        """
        found = self._find_prefix(request, sequence)
        try:
            self._reserve_bytes(request, found, sequence)
        except BudgetError:
            if found.partial_block is None:
                raise
            found = _cut_match(PrefixMatch(found.blocks), request)
            self._share_blocks(sequence, found.blocks)
            self._reserve_bytes(request, found, sequence)
        return found

    def _find_prefix(self, request: KVRequest, sequence: _SequenceBlocks) -> PrefixMatch:
        """Find the longest kept prefix of a sequence, and share it."""
        if sequence.origin is None or not request.reuse:
            return PrefixMatch()
        most = min(request.virtual_tokens + len(request.ids) - 1, request.capacity)
        with self._tiers.lock:
            for other in self._sequences:
                if other.origin == sequence.origin and not other.is_forgotten:
                    self._publish_prompt(other)
            found = _cut_match(self._tree.find(sequence.origin, sequence.prompt[:most]), request)
            self._replace_blocks(sequence, found.all_blocks)
        return found

    def _publish_prompt(self, sequence: _SequenceBlocks) -> None:
        """Share the complete pages of a prompt; of duplicate pages one stays."""
        if sequence.pages is None or sequence.origin is None:
            return
        count = min(sequence.pages.length, len(sequence.prompt)) // KV_PAGE_TOKENS
        if count <= len(sequence.blocks):
            return
        before = self.nbytes
        own = sequence.pages.list_full_pages()[:count]
        end = count * KV_PAGE_TOKENS
        states = {} if sequence.pages.states is None else sequence.pages.states.take_even(end)
        blocks = self._tree.insert_and_retain(sequence.origin, sequence.prompt[:end], own, states)
        own.clear()
        sequence.pages.use_shared_pages([block.page for block in blocks])
        had, sequence.blocks, sequence.nbytes = sequence.blocks, blocks, sequence.pages.nbytes
        self._tree.release(had)
        self._release(before - self.nbytes)

    def _share_blocks(self, sequence: _SequenceBlocks, blocks: tuple[KVBlock, ...]) -> None:
        with self._tiers.lock:
            self._replace_blocks(sequence, blocks)

    def _replace_blocks(self, sequence: _SequenceBlocks, blocks: tuple[KVBlock, ...]) -> None:
        """Retain these blocks for a sequence, and release those that it had."""
        self._tree.retain(blocks)
        before, sequence.blocks = sequence.blocks, blocks  # an interrupt releases nothing twice
        self._tree.release(before)

    def _reserve_bytes(
        self, request: KVRequest, prefix_match: PrefixMatch, sequence: _SequenceBlocks
    ) -> None:
        """Reserve the bytes of the pages that a sequence does not share."""
        tokens = request.capacity if request.initial_tokens is None else request.initial_tokens
        shared, pages = len(prefix_match.blocks), count_pages(tokens)
        size = (pages - shared) * self._layout.page_bytes(request.config)
        size += estimate_state_bytes(
            request.config, pages * KV_PAGE_TOKENS, shared_tokens=shared * KV_PAGE_TOKENS
        )
        self._tiers.reserve(Tier.DEVICE, "kv", size, what=request.description)
        sequence.nbytes = size

    def _reserve_growth(self, sequence: _SequenceBlocks, what: str, size: int) -> None:
        """Reserve the bytes of pages by which a sequence grows."""
        with self._tiers.lock:
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=what)
            sequence.nbytes += size

    def _finish(self, sequence: _SequenceBlocks, tokens: Tokens) -> None:
        """Keep the pages of ``tokens`` and free all others."""
        with self._tiers.lock:
            before = self.nbytes
            own, sequence.pages = sequence.pages, None  # they reference each other
            states = {}
            if own is not None and own.states is not None:
                states = own.states.take_all(own.length)
            pages = [] if own is None else own.take_pages()
            if tokens and sequence.origin is not None and not sequence.is_forgotten:
                self._tree.insert(sequence.origin, tokens, pages, states)
            self._replace_blocks(sequence, ())
            self._sequences.remove(sequence)
            if self._kept_limit is not None:
                self._tree.evict(self._tree.idle_bytes - self._kept_limit)
            freed = before - self.nbytes
            pages.clear()
            states.clear()
        self._release(freed)

    def _evict(self, size: int) -> None:
        """Free up to ``size`` bytes of unused pages."""
        with self._tiers.lock:
            freed = self._tree.evict(size)
        self._release(freed)

    def _release(self, size: int) -> None:
        """Release reserved bytes."""
        self._tiers.release(Tier.DEVICE, "kv", size)


def _cut_match(found: PrefixMatch, request: KVRequest) -> PrefixMatch:
    """Return what a request can use of a match: it must end where a state is kept, if there are."""
    usable = found.cut_to_state() if request.config.state_bytes else found
    return usable.keep_if_longer(request.virtual_tokens)
