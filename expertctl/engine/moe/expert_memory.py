"""Blocks of memory for routed experts, fewer than there are experts.

A block is free, on its way, or holds an expert. Experts that have a slot stay; all others share
the rest of the blocks, the *pool*, and who is worth least gives his block to the next
(`expert_pool`). All blocks are alike: an expert that gets a slot, or loses it, is not moved. An
expert may also be *lent* for one pass: it is computed where it lies outside these blocks.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.memory import allocate
from expertctl.engine.moe.expert_pool import (
    Expert as Expert,
)  # whoever asks a memory names them, too
from expertctl.engine.moe.expert_pool import ExpertPool

Numbers = np.ndarray[Any, Any]
Read = Callable[[Numbers], int]
"""Fills the bytes of an expert; returns how many bytes of files that took."""


class Blocks(Protocol):
    """Memory in blocks that are all alike, wherever it is."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""

    def __len__(self) -> int:
        """How many blocks there are."""

    def place(self, number: int) -> int:
        """Return where a block is, as those name it who compute; never 0."""

    def fill(self, number: int, read: Read) -> int:
        """Have a block filled, in any thread; return what ``read`` returns."""


class HostBlocks:
    """Blocks in the memory of the machine, by their addresses."""

    def __init__(self, size: int, *, count: int, taken: int = 0) -> None:
        """Take the memory of so many blocks of a size, or as many bytes if that is more."""
        self._memory = np.frombuffer(allocate(max(count * size, taken)), np.uint8)
        self._blocks = self._memory[: count * size].reshape(count, size)

    @classmethod
    def within(cls, total: int, shape: ExpertShape, *, most: int) -> "HostBlocks":
        """Take so many bytes for blocks of a shape, of which no more than some are of use."""
        size = shape.block_bytes
        return cls(size, count=min(total // size, most), taken=total)

    @property
    def nbytes(self) -> int:
        """Bytes that were taken for them."""
        return self._memory.nbytes

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def place(self, number: int) -> int:
        """Return the address of a block."""
        return int(self._blocks[number].ctypes.data)

    def fill(self, number: int, read: Read) -> int:
        """Have a block filled where it is."""
        return read(self._blocks[number])


class ExpertMemory:
    """The one owner of the blocks, and of the tables that say where experts are.

    ``places`` int64 and ``hits`` float32 [layers, experts] are read by programs while they run.
    """

    def __init__(
        self, shape: ExpertShape, *, layers: int, experts: int, blocks: int | Blocks
    ) -> None:
        """Own blocks, all of them free; of a number of blocks take the memory here."""
        self.shape = shape
        self.places = np.zeros((layers, experts), np.int64)
        self.hits = np.zeros((layers, experts), np.float32)
        if isinstance(blocks, int):
            blocks = HostBlocks(shape.block_bytes, count=blocks)
        self._blocks = blocks
        self._free = list(range(len(blocks)))
        self._held: dict[Expert, int] = {}
        self._pool = ExpertPool(layers=layers, experts=experts)
        """Those without a slot."""
        self._lent: list[Expert] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._blocks.nbytes

    @property
    def worths(self) -> Numbers:
        """What each is worth to keep, float64 [layers, experts]; the owner of the slots says so."""
        return self._pool.worths

    @property
    def experts(self) -> int:
        """How many experts a layer has."""
        return int(self.places.shape[1])

    def __contains__(self, expert: Expert) -> bool:
        """Whether an expert is there."""
        return expert in self._held

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def held(self, layer: int) -> Numbers:
        """Return float32 [experts], 1 for those who have a block; it changes with the memory."""
        row: Numbers = self.hits[layer]
        lent = [name for place, name in self._lent if place == layer]
        if lent:
            row = row.copy()
            row[[name for name in lent if (layer, name) not in self._held]] = 0
        return row

    def fill(self, number: int, read: Read) -> int:
        """Have a block filled that was taken, in any thread; return what ``read`` returns."""
        return self._blocks.fill(number, read)

    def take(self, spared: Collection[Expert]) -> int | None:
        """Return a block to fill, if need be that of an expert in the pool that is not spared.

        None where there is none.
        """
        if self._free:
            return self._free.pop()
        least = self._pool.least(spared)
        return None if least is None else self._evict(least)

    def put(self, expert: Expert, number: int) -> None:
        """Say that an expert is in a block that was taken; it is in the pool, as used last."""
        assert expert not in self._held
        self._held[expert] = number
        self._pool.add(expert)
        self.places[expert] = self._blocks.place(number)
        self.hits[expert] = 1

    def give_back(self, number: int) -> None:
        """Say that nothing came into a block that was taken."""
        self._free.append(number)

    def use(self, experts: Iterable[Expert]) -> None:
        """Say that experts were used, so that of equals those in the pool go last."""
        self._pool.use(experts)

    def keep(self, expert: Expert) -> None:
        """Take an expert out of the pool, into a slot."""
        self._pool.remove(expert)

    def let_go(self, expert: Expert) -> None:
        """Put an expert that had a slot into the pool, as used last."""
        assert expert in self._held
        self._pool.add(expert)

    def lend(self, expert: Expert, address: int) -> None:
        """Say where an expert lies that has no block, until `end_lending`."""
        assert expert not in self._held
        self.places[expert], self.hits[expert] = address, 1
        self._lent.append(expert)

    def count_lent(self, experts: Iterable[Expert]) -> int:
        """Return how many of them are lent and have no block."""
        return sum(expert not in self._held and bool(self.places[expert]) for expert in experts)

    def end_lending(self) -> None:
        """Forget where experts lie that have no block; some may have got one meanwhile."""
        for expert in self._lent:
            if expert not in self._held:
                self.places[expert], self.hits[expert] = 0, 0
        self._lent.clear()

    def check_integrity(self, *, coming: int = 0, kept: Collection[Expert] = ()) -> None:
        """Assert what always holds; so many blocks are on their way, and these have slots."""
        held = list(self._held.values())
        assert len(held) == len(set(held))
        assert len(held) + len(self._free) + coming == len(self._blocks)
        assert not set(held) & set(self._free)
        assert self._pool.members | set(kept) == self._held.keys()
        assert not self._pool.members & set(kept)
        places = np.zeros_like(self.places)
        for expert in self._lent:  # until the next pass, if one failed
            places[expert] = self.places[expert]
        for expert, number in self._held.items():
            places[expert] = self._blocks.place(number)
        assert np.array_equal(places, self.places)
        assert np.array_equal(places != 0, self.hits == 1)

    def _evict(self, expert: Expert) -> int:
        self._pool.remove(expert)
        self.places[expert], self.hits[expert] = 0, 0
        return self._held.pop(expert)
