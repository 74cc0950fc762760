"""The prefix index of KV pages: finds the rows of earlier sequences with the same prefix.

A *block* is a page with the tokens of its rows: sixteen, or fewer at the end of a sequence. It
follows another block or, at the start of a sequence, an *origin*: the owner of the sequence and the
plan that computed it. A block is found by its origin and all tokens up to its end, never by a hash
alone, so no sequence gets rows of another sequence, plan or owner. Rows of soft prompts precede the
first token; they are the same for one plan, and the token `kv_cache.VIRTUAL` stands for each.

Where a base has layers without keys and values, some blocks also have the state after their last
token, and a sequence can only start after such a block (`PrefixMatch.cut_to_state`).

Blocks in use stay, and so do those before them. Of the others, the least recently released is
evicted first; the last block of a sequence is released first, so an evicted block has no children.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS
from expertctl.engine.kv.kv_cache import PrefixKey, count_common_prefix
from expertctl.engine.kv.recurrent_state import State

Numbers = np.ndarray[Any, Any]
Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class KVBlock:
    """A page and the tokens of its filled rows."""

    origin: PrefixKey
    parent: "KVBlock | None"
    tokens: Tokens
    page: Numbers
    state: State | None = None
    """The state after its tokens, where a base has one and it is kept."""
    children: dict[Tokens, "KVBlock"] = field(default_factory=dict)
    ref_count: int = 0
    is_detached: bool = False
    """It is no longer found, and is freed when it is released."""

    @property
    def nbytes(self) -> int:
        """Bytes of its page and its state."""
        return self.page.nbytes + (0 if self.state is None else self.state.nbytes)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A matching prefix: blocks that match completely, and one that matches partially."""

    blocks: tuple[KVBlock, ...] = ()
    partial_block: KVBlock | None = None
    partial_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of matching tokens."""
        return len(self.blocks) * KV_PAGE_TOKENS + self.partial_tokens

    @property
    def all_blocks(self) -> tuple[KVBlock, ...]:
        """All matching blocks, in order."""
        return self.blocks if self.partial_block is None else (*self.blocks, self.partial_block)

    @property
    def state(self) -> State | None:
        """The state after its tokens, where it is kept."""
        blocks = self.all_blocks
        return blocks[-1].state if blocks else None

    def cut_to_state(self) -> "PrefixMatch":
        """Return the longest part of this match after which a state is kept."""
        part = self.partial_block
        if part is not None and part.state is not None and self.partial_tokens == len(part.tokens):
            return self
        ends = [n for n, block in enumerate(self.blocks, start=1) if block.state is not None]
        return PrefixMatch(self.blocks[: max(ends, default=0)])

    def keep_if_longer(self, tokens: int) -> "PrefixMatch":
        """Return this match if it is longer than ``tokens``, else an empty one."""
        return self if self.tokens > tokens else PrefixMatch()


class RadixCache:
    """The owner of the kept blocks."""

    def __init__(self) -> None:
        """Start empty."""
        self._origins: dict[PrefixKey, dict[Tokens, KVBlock]] = {}
        self._idle: OrderedDict[KVBlock, None] = OrderedDict()
        self.nbytes = 0
        """Bytes of all pages, including detached ones in use."""
        self.idle_bytes = 0
        """Bytes of the pages that can be evicted."""

    def find(self, origin: PrefixKey, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest kept prefix of a sequence."""
        siblings, blocks = self._origins.get(origin, {}), list[KVBlock]()
        for begin in range(0, len(tokens), KV_PAGE_TOKENS):
            block = siblings.get(tuple(tokens[begin : begin + KV_PAGE_TOKENS]))
            if block is None or len(block.tokens) < KV_PAGE_TOKENS:
                break
            blocks.append(block)
            siblings = block.children
        rest = tokens[len(blocks) * KV_PAGE_TOKENS : (len(blocks) + 1) * KV_PAGE_TOKENS]
        part = max(
            siblings.values(),
            key=lambda block: count_common_prefix(block.tokens, rest),
            default=None,
        )
        count = 0 if part is None else count_common_prefix(part.tokens, rest)
        return PrefixMatch(tuple(blocks), part if count else None, count)

    def retain(self, blocks: Sequence[KVBlock]) -> None:
        """Protect blocks from eviction until they are released."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self.idle_bytes -= block.nbytes
            block.ref_count += 1

    def release(self, blocks: Sequence[KVBlock]) -> None:
        """Release blocks, which are in the order of their sequence."""
        for block in reversed(blocks):
            block.ref_count -= 1
            assert block.ref_count >= 0, "a block is given back as often as it is rented"
            if block.ref_count:
                continue
            if block.is_detached:
                self.nbytes -= block.nbytes
            else:
                self._idle[block] = None
                self.idle_bytes += block.nbytes

    def insert(
        self,
        origin: PrefixKey,
        tokens: Sequence[int],
        pages: Sequence[Numbers],
        states: Mapping[int, State] = MappingProxyType({}),
    ) -> None:
        """Keep the pages and states of a sequence whose contents are not kept yet."""
        self.release(self.insert_and_retain(origin, tokens, pages, states))

    def insert_and_retain(
        self,
        origin: PrefixKey,
        tokens: Sequence[int],
        pages: Sequence[Numbers],
        states: Mapping[int, State] = MappingProxyType({}),
    ) -> tuple[KVBlock, ...]:
        """Keep the pages of a sequence and retain the blocks that hold its tokens.

        ``states`` are by the number of tokens before their end.
        """
        siblings, path = self._origins.setdefault(origin, {}), list[KVBlock]()
        for page, begin in zip(pages, range(0, len(tokens), KV_PAGE_TOKENS), strict=False):
            part = tuple(tokens[begin : begin + KV_PAGE_TOKENS])
            block = _find_longer(siblings, part)
            if block is None:
                block = siblings[part] = KVBlock(origin, path[-1] if path else None, part, page)
                self.nbytes += page.nbytes
                self._drop_shorter(siblings, part)
            self.retain([block])
            state = states.get(begin + len(part))
            if block.state is None and block.tokens == part and state is not None:
                block.state = state
                self.nbytes += state.nbytes
            path.append(block)
            siblings = block.children
        return tuple(path)

    def evict(self, size: int) -> int:
        """Evict up to ``size`` bytes of unused blocks; return the bytes freed."""
        before = self.nbytes
        while self._idle and before - self.nbytes < size:
            block = next(iter(self._idle))
            assert not block.children, "what goes has nothing behind it"
            self._remove(block)
        return before - self.nbytes

    def forget(self, owner: str) -> None:
        """Drop all blocks of an owner; those in use are freed when they are released."""
        for origin in [origin for origin in self._origins if origin.owner == owner]:
            for block in list(_walk(self._origins.pop(origin))):
                block.children = {}
                if block.ref_count:
                    block.is_detached = True
                else:
                    self._drop(block)

    def iterate_blocks(self) -> Iterator[KVBlock]:
        """Yield all blocks that can be found."""
        for siblings in self._origins.values():
            yield from _walk(siblings)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        found = list(self.iterate_blocks())
        assert all(self._origins.values())
        assert {block for block in found if not block.ref_count} == set(self._idle)
        assert self.idle_bytes == sum(block.nbytes for block in self._idle)
        assert len({block.page.ctypes.data for block in found}) == len(found)
        assert sum(block.nbytes for block in found) <= self.nbytes
        order = {block: place for place, block in enumerate(self._idle)}
        for block in found:
            assert not block.is_detached
            assert 0 < len(block.tokens) <= KV_PAGE_TOKENS
            assert len(block.tokens) == KV_PAGE_TOKENS or not block.children
            for tokens, behind in block.children.items():
                links = (behind.parent, behind.tokens, behind.origin)
                assert links == (block, tokens, block.origin)
                assert block.ref_count or order[behind] < order[block]
            assert block.ref_count >= sum(behind.ref_count for behind in block.children.values())

    def _drop_shorter(self, siblings: dict[Tokens, KVBlock], tokens: Tokens) -> None:
        """Drop shorter blocks that are a prefix of these tokens, unless they are in use."""
        for shorter in [block for block in siblings.values() if len(block.tokens) < len(tokens)]:
            if _starts_with(tokens, shorter.tokens) and not shorter.ref_count:
                self._remove(shorter)

    def _remove(self, block: KVBlock) -> None:
        siblings = block.parent.children if block.parent else self._origins[block.origin]
        del siblings[block.tokens]
        if not self._origins[block.origin]:
            del self._origins[block.origin]
        self._drop(block)

    def _drop(self, block: KVBlock) -> None:
        del self._idle[block]
        self.idle_bytes -= block.nbytes
        self.nbytes -= block.nbytes


def _starts_with(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning


def _find_longer(siblings: dict[Tokens, KVBlock], tokens: Tokens) -> KVBlock | None:
    """Return a block whose tokens start with these."""
    if tokens in siblings:
        return siblings[tokens]
    longer = (block for block in siblings.values() if _starts_with(block.tokens, tokens))
    return next(longer, None)


def _walk(siblings: dict[Tokens, KVBlock]) -> Iterator[KVBlock]:
    """Yield blocks and their descendants."""
    waiting = list(siblings.values())
    while waiting:
        block = waiting.pop()
        waiting.extend(block.children.values())
        yield block
