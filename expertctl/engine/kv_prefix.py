"""Which pages hold what, so that a text finds the rows of earlier ones that began as it does.

A *block* is a page and the tokens of the rows in it: sixteen, or fewer where a text ended. It
follows another block, or, at the beginning of a text, an *origin*: the owner of the text and the
plan that computed it. A block is found by its origin and all tokens up to its end, never by a hash
alone, so no text gets the rows of another text, plan or owner. Rows of soft prompts stand before
the first token; they are the same for one plan, and `VIRTUAL` is the token that stands for one.

Blocks that are rented stay, and so do those before them. Of the others, the one that was given back
longest ago goes first; the last block of a text is given back first, so a block that goes has none
after it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.kv_loan import Origin, common

Numbers = np.ndarray[Any, Any]
Tokens = tuple[int, ...]
VIRTUAL = -1
"""Stands for a row of a soft prompt; no token of a vocabulary is negative."""


@dataclass(slots=True, eq=False)
class Block:
    """A page and the tokens of its filled rows."""

    origin: Origin
    before: "Block | None"
    tokens: Tokens
    page: Numbers
    after: dict[Tokens, "Block"] = field(default_factory=dict)
    rents: int = 0
    is_lost: bool = False
    """It is not found any more, and goes when it is given back."""


@dataclass(frozen=True, slots=True)
class Found:
    """How a text begins: blocks that agree whole, and one that agrees for some tokens more."""

    blocks: tuple[Block, ...] = ()
    part: Block | None = None
    part_tokens: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens agree."""
        return len(self.blocks) * PAGE + self.part_tokens

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """All of them, in order."""
        return self.blocks if self.part is None else (*self.blocks, self.part)

    def beyond(self, tokens: int) -> "Found":
        """Return what was found if more tokens agree than so many, else nothing."""
        return self if self.tokens > tokens else Found()


class PrefixTree:
    """The owner of the blocks that are kept."""

    def __init__(self) -> None:
        """Begin with none."""
        self._origins: dict[Origin, dict[Tokens, Block]] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self.nbytes = 0
        """Bytes of all pages, with those that are lost but rented."""
        self.idle_bytes = 0
        """Bytes of the pages that may go."""

    def find(self, origin: Origin, tokens: Sequence[int]) -> Found:
        """Return what agrees with the beginning of a text, as far as it goes."""
        siblings, blocks = self._origins.get(origin, {}), list[Block]()
        for begin in range(0, len(tokens), PAGE):
            block = siblings.get(tuple(tokens[begin : begin + PAGE]))
            if block is None or len(block.tokens) < PAGE:
                break
            blocks.append(block)
            siblings = block.after
        rest = tokens[len(blocks) * PAGE : (len(blocks) + 1) * PAGE]
        part = max(siblings.values(), key=lambda block: common(block.tokens, rest), default=None)
        count = 0 if part is None else common(part.tokens, rest)
        return Found(tuple(blocks), part if count else None, count)

    def rent(self, blocks: Sequence[Block]) -> None:
        """Keep blocks from going until they are given back."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self.idle_bytes -= block.page.nbytes
            block.rents += 1

    def give_back(self, blocks: Sequence[Block]) -> None:
        """End a rent; ``blocks`` are in the order of the text."""
        for block in reversed(blocks):
            block.rents -= 1
            assert block.rents >= 0, "a block is given back as often as it is rented"
            if block.rents:
                continue
            if block.is_lost:
                self.nbytes -= block.page.nbytes
            else:
                self._idle[block] = None
                self.idle_bytes += block.page.nbytes

    def insert(self, origin: Origin, tokens: Sequence[int], pages: Sequence[Numbers]) -> None:
        """Keep the pages of a text, as far as what they hold is not there yet."""
        self.give_back(self.rented(origin, tokens, pages))

    def rented(
        self, origin: Origin, tokens: Sequence[int], pages: Sequence[Numbers]
    ) -> tuple[Block, ...]:
        """Keep the pages of a text and rent the blocks that hold its tokens."""
        siblings, path = self._origins.setdefault(origin, {}), list[Block]()
        for page, begin in zip(pages, range(0, len(tokens), PAGE), strict=False):
            part = tuple(tokens[begin : begin + PAGE])
            block = _that_begins(siblings, part)
            if block is None:
                block = siblings[part] = Block(origin, path[-1] if path else None, part, page)
                self.nbytes += page.nbytes
                self._supersede(siblings, part)
            self.rent([block])
            path.append(block)
            siblings = block.after
        return tuple(path)

    def evict(self, size: int) -> int:
        """Let go of blocks until so many bytes are free or all are rented; return how many went."""
        before = self.nbytes
        while self._idle and before - self.nbytes < size:
            block = next(iter(self._idle))
            assert not block.after, "what goes has nothing behind it"
            self._remove(block)
        return before - self.nbytes

    def forget(self, owner: str) -> None:
        """Let go of all blocks of an owner; rented ones go when they are given back."""
        for origin in [origin for origin in self._origins if origin.owner == owner]:
            for block in list(_all(self._origins.pop(origin))):
                block.after = {}
                if block.rents:
                    block.is_lost = True
                else:
                    self._drop(block)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks that can be found."""
        for siblings in self._origins.values():
            yield from _all(siblings)

    def check_integrity(self) -> None:
        """Assert what always holds."""
        found = list(self.blocks())
        assert all(self._origins.values())
        assert {block for block in found if not block.rents} == set(self._idle)
        assert self.idle_bytes == sum(block.page.nbytes for block in self._idle)
        assert len({block.page.ctypes.data for block in found}) == len(found)
        assert sum(block.page.nbytes for block in found) <= self.nbytes
        order = {block: place for place, block in enumerate(self._idle)}
        for block in found:
            assert not block.is_lost
            assert 0 < len(block.tokens) <= PAGE
            assert len(block.tokens) == PAGE or not block.after
            for tokens, behind in block.after.items():
                assert (behind.before, behind.tokens, behind.origin) == (
                    block,
                    tokens,
                    block.origin,
                )
                assert block.rents or order[behind] < order[block]
            assert block.rents >= sum(behind.rents for behind in block.after.values())

    def _supersede(self, siblings: dict[Tokens, Block], tokens: Tokens) -> None:
        """Let go of shorter blocks that these tokens begin with, unless they are rented."""
        for shorter in [block for block in siblings.values() if len(block.tokens) < len(tokens)]:
            if _begins(tokens, shorter.tokens) and not shorter.rents:
                self._remove(shorter)

    def _remove(self, block: Block) -> None:
        siblings = block.before.after if block.before else self._origins[block.origin]
        del siblings[block.tokens]
        if not self._origins[block.origin]:
            del self._origins[block.origin]
        self._drop(block)

    def _drop(self, block: Block) -> None:
        del self._idle[block]
        self.idle_bytes -= block.page.nbytes
        self.nbytes -= block.page.nbytes


def _begins(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning


def _that_begins(siblings: dict[Tokens, Block], tokens: Tokens) -> Block | None:
    """Return the block that holds these tokens, and maybe more."""
    if tokens in siblings:
        return siblings[tokens]
    longer = (block for block in siblings.values() if _begins(block.tokens, tokens))
    return next(longer, None)


def _all(siblings: dict[Tokens, Block]) -> Iterator[Block]:
    """Yield blocks and what stands behind them."""
    waiting = list(siblings.values())
    while waiting:
        block = waiting.pop()
        waiting.extend(block.after.values())
        yield block
