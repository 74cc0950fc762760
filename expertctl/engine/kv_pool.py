"""`KVPool`: the owner of all pages of keys and values, of running texts and of kept ones.

A text is lent the pages that it has room for. Where it begins like an earlier text of the same
cache key and plan, it shares that text's pages and only reads them; a page within which it goes on
is copied. At least one token is always read, for its scores. A text that completed is kept for
the next ones; one that failed, was stopped or was given up leaves nothing of its own, and what it
shared stays as it was. Texts without a key neither find nor leave anything.

When another text begins, a running text shares the pages of its prompt that are written whole: not
its answer, which is no text before its end, and no page that is still written. From then on they
are kept like all others, even if it fails: their rows are valid.

Bytes of pages count as ``kv`` and are entered before there is memory. Pages that no text rents
are given up when `Tiers` asks for their bytes, in any thread; so the lock is that of `Tiers`. They
are also given up at the end of a text, as far as they take more than ``kept_limit``. Texts come
from one thread, and none begins while a stretch of another is read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_loan import KVLoan, KVWanted, Origin
from expertctl.engine.kv_pages import KVPages, pages_bytes
from expertctl.engine.kv_prefix import VIRTUAL, Block, Found, PrefixTree, Tokens
from expertctl.engine.tiers import Tier, Tiers
from expertctl.errors import BudgetError


@dataclass(slots=True, eq=False)
class _Rent:
    """What one text has: blocks that it shares, and bytes of pages of its own."""

    origin: Origin | None
    prompt: Tokens
    blocks: tuple[Block, ...] = ()
    nbytes: int = 0
    pages: KVPages | None = None
    """All that it was lent, with what it shares."""
    is_forgotten: bool = False


class KVPool:
    """The owner of all pages."""

    def __init__(
        self, tiers: Tiers, *, numbers: Scheme = Scheme.FLOAT32, kept_limit: int | None = None
    ) -> None:
        """Begin with none; its memory is that of the device tier, ``numbers`` what pages hold.

        ``kept_limit``: the most bytes of pages that no running text has; None: no limit.
        """
        self._tiers, self._numbers, self._kept_limit = tiers, numbers, kept_limit
        self._tree = PrefixTree()
        self._rents: list[_Rent] = []
        tiers.spare_from(Tier.DEVICE, nbytes=lambda: self._tree.idle_bytes, give_up=self._let_go)

    @contextmanager
    def borrow(self, wanted: KVWanted) -> Iterator[KVLoan[KVPages]]:
        """Lend pages; the first ones hold what is kept of texts that begin in the same way.

        Raises:
            BudgetError: when they cannot fit.
        """
        rent = _Rent(wanted.origin, _tokens(wanted, wanted.ids))
        self._rents.append(rent)
        try:
            loan = self._lent(wanted, rent)
        except BaseException:
            self._end(rent, ())
            raise
        try:
            yield loan
        finally:
            tokens = _left(loan, wanted)
            del loan.cache
            self._end(rent, tokens)

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
        self._let_go(self._tree.idle_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, those of running texts and kept ones."""
        return self._tree.nbytes + sum(rent.nbytes for rent in self._rents)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pages that no running text has."""
        return self._tree.idle_bytes

    def check_integrity(self) -> None:
        """Assert what always holds: each block is rented by the texts that share it, no other."""
        with self._tiers.lock:
            self._tree.check_integrity()
            assert self._kept_limit is None or self._rents or self.kept_bytes <= self._kept_limit
            shared = Counter(block for rent in self._rents for block in rent.blocks)
            assert all(block.rents == count for block, count in shared.items())
            lost = sum(block.page.nbytes for block in shared if block.is_lost)
            assert self._tree.nbytes == lost + sum(b.page.nbytes for b in self._tree.blocks())
            assert all(b.rents == 0 for b in self._tree.blocks() if b not in shared)
            lent = [(rent, rent.pages) for rent in self._rents if rent.pages is not None]
            assert all(rent.nbytes == pages.nbytes for rent, pages in lent)

    def check_idle(self) -> None:
        """Assert that nothing is lent."""
        assert not self._rents

    def _lent(self, wanted: KVWanted, rent: _Rent) -> KVLoan[KVPages]:
        found = self._reserved(wanted, rent)
        shared = [block.page for block in found.blocks]
        pages = KVPages(
            wanted.config,
            wanted.capacity,
            numbers=self._numbers,
            shared=shared,
            at_once=wanted.at_once,
            more=partial(self._grow, rent, wanted.what),
        )
        if found.part is not None:
            pages.copy_rows(found.part.page, found.part_tokens)
            self._share(rent, found.blocks)
        rent.pages = pages
        return KVLoan(pages, reused=max(found.tokens - wanted.virtual, 0))

    def _reserved(self, wanted: KVWanted, rent: _Rent) -> Found:
        """Share what was found and enter the bytes of the rest.

        A page that would be copied has to be there beside its copy. Where both do not fit, its few
        tokens are read again.
        """
        found = self._found(wanted, rent)
        try:
            self._reserve(wanted, found, rent)
        except BudgetError:
            if found.part is None:
                raise
            found = Found(found.blocks).beyond(wanted.virtual)
            self._share(rent, found.blocks)
            self._reserve(wanted, found, rent)
        return found

    def _found(self, wanted: KVWanted, rent: _Rent) -> Found:
        """Find how the text begins, and share that."""
        if rent.origin is None or not wanted.reuse:
            return Found()
        most = min(wanted.virtual + len(wanted.ids) - 1, wanted.capacity)
        with self._tiers.lock:
            for other in self._rents:
                if other.origin == rent.origin and not other.is_forgotten:
                    self._offer(other)
            found = self._tree.find(rent.origin, rent.prompt[:most]).beyond(wanted.virtual)
            self._exchange(rent, found.all_blocks)
        return found

    def _offer(self, rent: _Rent) -> None:
        """Let others share the whole pages of a prompt; of pages written twice one stays."""
        count = 0 if rent.pages is None else min(rent.pages.length, len(rent.prompt)) // PAGE
        if rent.pages is None or rent.origin is None or count <= len(rent.blocks):
            return
        before = self.nbytes
        own = rent.pages.full_pages()[:count]
        blocks = self._tree.rented(rent.origin, rent.prompt[: count * PAGE], own)
        own.clear()
        rent.pages.share([block.page for block in blocks])
        had, rent.blocks, rent.nbytes = rent.blocks, blocks, rent.pages.nbytes
        self._tree.give_back(had)
        self._release(before - self.nbytes)

    def _share(self, rent: _Rent, blocks: tuple[Block, ...]) -> None:
        with self._tiers.lock:
            self._exchange(rent, blocks)

    def _exchange(self, rent: _Rent, blocks: tuple[Block, ...]) -> None:
        """Rent these blocks for a text, and no longer those that it had."""
        self._tree.rent(blocks)
        before, rent.blocks = rent.blocks, blocks  # an interrupt gives nothing back twice
        self._tree.give_back(before)

    def _reserve(self, wanted: KVWanted, found: Found, rent: _Rent) -> None:
        """Enter the bytes of the pages that a text does not share."""
        tokens = wanted.capacity if wanted.at_once is None else wanted.at_once
        tokens -= len(found.blocks) * PAGE
        size = pages_bytes(wanted.config, tokens, self._numbers)
        self._tiers.reserve(Tier.DEVICE, "kv", size, what=wanted.what)
        rent.nbytes = size

    def _grow(self, rent: _Rent, what: str, size: int) -> None:
        """Enter the bytes of pages that a text needs in its middle."""
        with self._tiers.lock:
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=what)
            rent.nbytes += size

    def _end(self, rent: _Rent, tokens: Tokens) -> None:
        """Keep the pages of ``tokens``, let go of all others."""
        with self._tiers.lock:
            before = self.nbytes
            pages = [] if rent.pages is None else rent.pages.hand_over()
            rent.pages = None  # they refer to each other
            if tokens and rent.origin is not None and not rent.is_forgotten:
                self._tree.insert(rent.origin, tokens, pages)
            self._exchange(rent, ())
            self._rents.remove(rent)
            if self._kept_limit is not None:
                self._tree.evict(self._tree.idle_bytes - self._kept_limit)
            freed = before - self.nbytes
            pages.clear()
        self._release(freed)

    def _let_go(self, size: int) -> None:
        """Free so many bytes of what is not rented, as far as there are."""
        with self._tiers.lock:
            freed = self._tree.evict(size)
        self._release(freed)

    def _release(self, size: int) -> None:
        """Strike out bytes that are free."""
        self._tiers.release(Tier.DEVICE, "kv", size)


def _tokens(wanted: KVWanted, ids: Sequence[int]) -> Tokens:
    """Return what the rows of a text stand for."""
    return (VIRTUAL,) * wanted.virtual + tuple(ids)


def _left(loan: KVLoan[KVPages], wanted: KVWanted) -> Tokens:
    """Return what the rows that are there stand for, if the text completed."""
    if loan.completed is None:
        return ()
    assert loan.completed[: len(wanted.ids)] == tuple(wanted.ids), "a text begins with its prompt"
    return _tokens(wanted, loan.completed)[: loan.cache.length]
