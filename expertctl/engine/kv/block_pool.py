"""Keys and values of a text in pages of sixteen tokens, as the kernels read them.

A page is one block of memory, ``[layers][keys, values][kv_heads][head_dim * 16]`` float32 or
float16, and a text has a list of the addresses of its pages. What stands at and beyond ``length``
is never read. A text may begin with fewer pages than it has room for, and gets more as it grows.
Texts that begin in the same way may share their first pages, whole ones only; those are not written
any more, so a text cannot go back into them. A text may begin to share its own between two passes,
when another begins as it did.

`BlockPool`: the owner of all pages of keys and values, of running texts and of kept ones.

A text is lent the pages that it has room for. Where it begins like an earlier text of the same
cache key and plan, it shares that text's pages and only reads them; a page within which it goes on
is copied. At least one token is always read, for its scores. A text that completed is kept for
the next ones; one that failed, was stopped or was given up leaves nothing of its own, and what it
shared stays as it was. Texts without a key neither find nor leave anything.

When another text begins, a running text shares the pages of its prompt that are written whole: not
its answer, which is no text before its end, and no page that is still written. From then on they
are kept like all others, even if it fails: their rows are valid.

Bytes of pages count as ``kv`` and are entered before there is memory. Pages that no text rents
are given up when `AdapterCache` asks for their bytes, in any thread; so the lock is that of `AdapterCache`. They
are also given up at the end of a text, as far as they take more than ``kept_limit``. Texts come
from one thread, and none begins while a stretch of another is read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from expertctl.engine.kernels.layer_operations import KV_PAGE_TOKENS
from expertctl.engine.kernels.memory import aligned_zeros
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.simd import LANES
from expertctl.engine.kv.radix_cache import VIRTUAL, KVBlock, PrefixMatch, RadixCache, Tokens
from expertctl.engine.kv.sequence_cache import KVAllocation, KVCacheBase, KVRequest, PrefixKey
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
PageCallback = Callable[[int], None]
"""Called with the bytes of pages before there is memory for them; raises BudgetError."""


def count_pages(tokens: int) -> int:
    """Return how many pages so many tokens need."""
    return -(-tokens // KV_PAGE_TOKENS)


def estimate_pages_bytes(config: ModelConfig, tokens: int, numbers: Scheme) -> int:
    """Return what the pages of so many tokens take."""
    itemsize = numbers.layout.vector_bytes // LANES
    return count_pages(tokens) * config.count_kv_bytes(KV_PAGE_TOKENS, itemsize=itemsize)


def _ignore_growth(_: int) -> None:
    """All is there already."""


class PagedKVCache(KVCacheBase):
    """Room for ``capacity`` tokens; `length` of them are filled. One generation owns it."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        numbers: Scheme = Scheme.FLOAT32,
        shared: Sequence[Numbers] = (),
        initial_tokens: int | None = None,
        on_growth: PageCallback = _ignore_growth,
    ) -> None:
        """Have pages for ``at_once`` tokens, all by default; those ``shared`` are full."""
        super().__init__(capacity)
        self.numbers = numbers
        self.length = self._shared_tokens = len(shared) * KV_PAGE_TOKENS
        self._shape = (config.layers, 2, config.kv_heads, config.head_dim * KV_PAGE_TOKENS)
        self._page_bytes, self._more = (
            estimate_pages_bytes(config, KV_PAGE_TOKENS, numbers),
            on_growth,
        )
        self._pages = list(shared)
        self._table = np.zeros(count_pages(capacity), np.int64)
        self._table[: len(shared)] = [page.ctypes.data for page in shared]
        self._add_pages(
            count_pages(capacity if initial_tokens is None else initial_tokens) - len(shared)
        )

    @property
    def table(self) -> int:
        """The address of the list of addresses of its pages."""
        return self._table.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of its own pages, filled or not."""
        return sum(page.nbytes for page in self._pages[self._shared_tokens // KV_PAGE_TOKENS :])

    def ensure_capacity(self, tokens: int) -> None:
        """Have pages for so many more tokens.

        Raises:
            BudgetError: when there is no room or no memory for them.
        """
        super().ensure_capacity(tokens)
        missing = count_pages(self.length + tokens) - len(self._pages)
        if missing > 0:
            self._more(missing * self._page_bytes)
            self._add_pages(missing)

    def use_shared_pages(self, pages: Sequence[Numbers]) -> None:
        """Have these as first pages from now on; they hold what its own ones held.

        Its own memory of them is free unless they are the same. The list of addresses stays where
        it is.
        """
        assert len(pages) * KV_PAGE_TOKENS <= self.length, "only what is written can be shared"
        self._pages[: len(pages)] = pages
        self._table[: len(pages)] = [page.ctypes.data for page in pages]
        self._shared_tokens = len(pages) * KV_PAGE_TOKENS

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens only, or all that it shares where that is more.

        So a prompt that is given up keeps the beginning that it shares with others.
        """
        super().rewind(max(length, self._shared_tokens))

    def copy_rows(self, page: Numbers, tokens: int) -> None:
        """Copy the first rows of a page behind the filled ones, which end where a page does."""
        self.ensure_capacity(tokens)
        assert self.length % KV_PAGE_TOKENS == 0
        self._pages[self.length // KV_PAGE_TOKENS][...] = page
        self.advance(tokens)

    def list_full_pages(self) -> list[Numbers]:
        """Return the pages that are written whole."""
        return self._pages[: self.length // KV_PAGE_TOKENS]

    def take_pages(self) -> list[Numbers]:
        """Return its pages, and have none any more."""
        pages, self._pages = self._pages, []
        self._table = np.zeros(0, np.int64)
        self.capacity = self.length = self._shared_tokens = 0
        return pages

    def check_integrity(self) -> None:
        """Assert what always holds: a possible length, numbers in every filled row."""
        assert (
            self._shared_tokens
            <= self.length
            <= min(self.capacity, len(self._pages) * KV_PAGE_TOKENS)
        )
        there = self._table[: len(self._pages)]
        assert [page.ctypes.data for page in self._pages] == there.tolist()
        for number in range(count_pages(self.length)):
            self._check_page(
                self._pages[number], min(self.length - number * KV_PAGE_TOKENS, KV_PAGE_TOKENS)
            )

    def _add_pages(self, count: int) -> None:
        for place in range(len(self._pages), len(self._pages) + count):
            page = aligned_zeros(self._page_bytes, np.uint8)
            self._table[place] = page.ctypes.data
            self._pages.append(page)

    def _check_page(self, page: Numbers, filled: int) -> None:
        kind = np.float16 if self.numbers is Scheme.FLOAT16 else np.float32
        numbers = page.view(kind).reshape(self._shape)
        keys = numbers[:, 0].reshape(*self._shape[:1], self._shape[2], -1, KV_PAGE_TOKENS)
        values = numbers[:, 1].reshape(
            *self._shape[:1], self._shape[2], -1, KV_PAGE_TOKENS, KV_PAGE_TOKENS
        )
        assert np.isfinite(keys[..., :filled]).all()
        assert np.isfinite(values[..., :filled, :]).all()


@dataclass(slots=True, eq=False)
class _SequenceBlocks:
    """What one text has: blocks that it shares, and bytes of pages of its own."""

    origin: PrefixKey | None
    prompt: Tokens
    blocks: tuple[KVBlock, ...] = ()
    nbytes: int = 0
    pages: PagedKVCache | None = None
    """All that it was lent, with what it shares."""
    is_forgotten: bool = False


class BlockPool:
    """The owner of all pages."""

    def __init__(
        self,
        tiers: AdapterCache,
        *,
        numbers: Scheme = Scheme.FLOAT32,
        cached_limit: int | None = None,
    ) -> None:
        """Begin with none; its memory is that of the device tier, ``numbers`` what pages hold.

        ``kept_limit``: the most bytes of pages that no running text has; None: no limit.
        """
        self._tiers, self._numbers, self._kept_limit = tiers, numbers, cached_limit
        self._tree = RadixCache()
        self._rents: list[_SequenceBlocks] = []
        tiers.register_reclaimable(
            Tier.DEVICE, nbytes=lambda: self._tree.idle_bytes, reclaim=self._evict
        )

    @contextmanager
    def allocate(self, request: KVRequest) -> Iterator[KVAllocation[PagedKVCache]]:
        """Lend pages; the first ones hold what is kept of texts that begin in the same way.

        Raises:
            BudgetError: when they cannot fit.
        """
        rent = _SequenceBlocks(request.prefix_key, _list_row_tokens(request, request.ids))
        self._rents.append(rent)
        try:
            loan = self._allocate(request, rent)
        except BaseException:
            self._finish(rent, ())
            raise
        try:
            yield loan
        finally:
            tokens = _list_completed_tokens(loan, request)
            del loan.cache
            self._finish(rent, tokens)

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; texts of it that run now leave nothing."""
        with self._tiers.lock:
            before = self._tree.nbytes
            for rent in self._rents:
                rent.is_forgotten |= rent.origin is not None and rent.origin.owner == cache_key
            self._tree.forget(cache_key)
            freed = before - self._tree.nbytes
        self._release(freed)

    def clear(self) -> None:
        """Drop all that is kept and not shared by a running text."""
        self._evict(self._tree.idle_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, those of running texts and kept ones."""
        return self._tree.nbytes + sum(rent.nbytes for rent in self._rents)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pages that no running text has."""
        return self._tree.idle_bytes

    def check_integrity(self) -> None:
        """Assert what always holds: each block is rented by the texts that share it, no other."""
        with self._tiers.lock:
            self._tree.check_integrity()
            assert self._kept_limit is None or self._rents or self.cached_bytes <= self._kept_limit
            shared = Counter(block for rent in self._rents for block in rent.blocks)
            assert all(block.ref_count == count for block, count in shared.items())
            lost = sum(block.page.nbytes for block in shared if block.is_detached)
            assert self._tree.nbytes == lost + sum(
                b.page.nbytes for b in self._tree.iterate_blocks()
            )
            assert all(b.ref_count == 0 for b in self._tree.iterate_blocks() if b not in shared)
            lent = [(rent, rent.pages) for rent in self._rents if rent.pages is not None]
            assert all(rent.nbytes == pages.nbytes for rent, pages in lent)

    def check_idle(self) -> None:
        """Assert that nothing is lent."""
        assert not self._rents

    def _allocate(
        self, request: KVRequest, sequence: _SequenceBlocks
    ) -> KVAllocation[PagedKVCache]:
        found = self._reserve_pages(request, sequence)
        shared = [block.page for block in found.blocks]
        pages = PagedKVCache(
            request.config,
            request.capacity,
            numbers=self._numbers,
            shared=shared,
            initial_tokens=request.initial_tokens,
            on_growth=partial(self._reserve_growth, sequence, request.description),
        )
        if found.partial_block is not None:
            pages.copy_rows(found.partial_block.page, found.partial_tokens)
            self._share_blocks(sequence, found.blocks)
        sequence.pages = pages
        return KVAllocation(pages, reused=max(found.tokens - request.virtual_tokens, 0))

    def _reserve_pages(self, request: KVRequest, sequence: _SequenceBlocks) -> PrefixMatch:
        """Share what was found and enter the bytes of the rest.

        A page that would be copied has to be there beside its copy. Where both do not fit, its few
        tokens are read again.
        """
        found = self._find_prefix(request, sequence)
        try:
            self._reserve_bytes(request, found, sequence)
        except BudgetError:
            if found.partial_block is None:
                raise
            found = PrefixMatch(found.blocks).keep_if_longer(request.virtual_tokens)
            self._share_blocks(sequence, found.blocks)
            self._reserve_bytes(request, found, sequence)
        return found

    def _find_prefix(self, request: KVRequest, sequence: _SequenceBlocks) -> PrefixMatch:
        """Find how the text begins, and share that."""
        if sequence.origin is None or not request.reuse:
            return PrefixMatch()
        most = min(request.virtual_tokens + len(request.ids) - 1, request.capacity)
        with self._tiers.lock:
            for other in self._rents:
                if other.origin == sequence.origin and not other.is_forgotten:
                    self._publish_prompt(other)
            found = self._tree.find(sequence.origin, sequence.prompt[:most]).keep_if_longer(
                request.virtual_tokens
            )
            self._replace_blocks(sequence, found.all_blocks)
        return found

    def _publish_prompt(self, sequence: _SequenceBlocks) -> None:
        """Let others share the whole pages of a prompt; of pages written twice one stays."""
        count = (
            0
            if sequence.pages is None
            else min(sequence.pages.length, len(sequence.prompt)) // KV_PAGE_TOKENS
        )
        if sequence.pages is None or sequence.origin is None or count <= len(sequence.blocks):
            return
        before = self.nbytes
        own = sequence.pages.list_full_pages()[:count]
        blocks = self._tree.insert_and_retain(
            sequence.origin, sequence.prompt[: count * KV_PAGE_TOKENS], own
        )
        own.clear()
        sequence.pages.use_shared_pages([block.page for block in blocks])
        had, sequence.blocks, sequence.nbytes = sequence.blocks, blocks, sequence.pages.nbytes
        self._tree.release(had)
        self._release(before - self.nbytes)

    def _share_blocks(self, sequence: _SequenceBlocks, blocks: tuple[KVBlock, ...]) -> None:
        with self._tiers.lock:
            self._replace_blocks(sequence, blocks)

    def _replace_blocks(self, sequence: _SequenceBlocks, blocks: tuple[KVBlock, ...]) -> None:
        """Rent these blocks for a text, and no longer those that it had."""
        self._tree.retain(blocks)
        before, sequence.blocks = sequence.blocks, blocks  # an interrupt gives nothing back twice
        self._tree.release(before)

    def _reserve_bytes(
        self, request: KVRequest, prefix_match: PrefixMatch, sequence: _SequenceBlocks
    ) -> None:
        """Enter the bytes of the pages that a text does not share."""
        tokens = request.capacity if request.initial_tokens is None else request.initial_tokens
        tokens -= len(prefix_match.blocks) * KV_PAGE_TOKENS
        size = estimate_pages_bytes(request.config, tokens, self._numbers)
        self._tiers.reserve(Tier.DEVICE, "kv", size, what=request.description)
        sequence.nbytes = size

    def _reserve_growth(self, sequence: _SequenceBlocks, what: str, size: int) -> None:
        """Enter the bytes of pages that a text needs in its middle."""
        with self._tiers.lock:
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=what)
            sequence.nbytes += size

    def _finish(self, sequence: _SequenceBlocks, tokens: Tokens) -> None:
        """Keep the pages of ``tokens``, let go of all others."""
        with self._tiers.lock:
            before = self.nbytes
            pages = [] if sequence.pages is None else sequence.pages.take_pages()
            sequence.pages = None  # they refer to each other
            if tokens and sequence.origin is not None and not sequence.is_forgotten:
                self._tree.insert(sequence.origin, tokens, pages)
            self._replace_blocks(sequence, ())
            self._rents.remove(sequence)
            if self._kept_limit is not None:
                self._tree.evict(self._tree.idle_bytes - self._kept_limit)
            freed = before - self.nbytes
            pages.clear()
        self._release(freed)

    def _evict(self, size: int) -> None:
        """Free so many bytes of what is not rented, as far as there are."""
        with self._tiers.lock:
            freed = self._tree.evict(size)
        self._release(freed)

    def _release(self, size: int) -> None:
        """Strike out bytes that are free."""
        self._tiers.release(Tier.DEVICE, "kv", size)


def _list_row_tokens(request: KVRequest, ids: Sequence[int]) -> Tokens:
    """Return what the rows of a text stand for."""
    return (VIRTUAL,) * request.virtual_tokens + tuple(ids)


def _list_completed_tokens(allocation: KVAllocation[PagedKVCache], request: KVRequest) -> Tokens:
    """Return what the rows that are there stand for, if the text completed."""
    if allocation.completed is None:
        return ()
    assert allocation.completed[: len(request.ids)] == tuple(request.ids), (
        "a text begins with its prompt"
    )
    return _list_row_tokens(request, allocation.completed)[: allocation.cache.length]
