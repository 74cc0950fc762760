"""Blocks of memory for routed experts, fewer than there are experts.

A block is free, being filled, or holds an expert. Experts with a slot stay; all others share the
rest of the blocks, the *pool*, where the least valuable expert is evicted for the next one; of
equals, the least recently used. A victim is chosen once for each expert that is read, and worths
change for a whole layer at a time, so no order is kept: numpy looks at all of them. All blocks are
alike: an expert that gets or loses a slot is not moved. An expert may also be *mapped* for one
pass: it is computed in the page cache, outside these blocks.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.memory.host import allocate
from expertctl.engine.moe.placement import interleave

Expert = tuple[int, int]
"""The index of a routed layer, and the number of an expert there."""


class ExpertPool:
    """Owner of the pool's members and their last uses; others set the worths."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Start empty."""
        self.worths = np.zeros((layers, experts))
        """The worth of each expert, in the pool or not."""
        self._last_use = np.zeros((layers, experts), np.int64)
        self._membership = np.zeros((layers, experts), np.bool_)
        self._clock = 0

    def __len__(self) -> int:
        """Return the number of experts in the pool."""
        return int(np.count_nonzero(self._membership))

    def __contains__(self, expert: Expert) -> bool:
        """Tell whether an expert is in the pool."""
        return bool(self._membership[expert])

    @property
    def members(self) -> set[Expert]:
        """All experts in the pool."""
        layers, experts = self._membership.nonzero()
        return set(zip(layers.tolist(), experts.tolist(), strict=True))

    def add(self, expert: Expert) -> None:
        """Add an expert, as the last used."""
        self._membership[expert] = True
        self.touch([expert])

    def remove(self, expert: Expert) -> None:
        """Remove an expert."""
        assert self._membership[expert]
        self._membership[expert] = False

    def touch(self, experts: Iterable[Expert]) -> None:
        """Record that experts were used, one after the other; they need not be in the pool."""
        for expert in experts:
            self._clock += 1
            self._last_use[expert] = self._clock

    def find_victim(self, protected: Collection[Expert] = ()) -> Expert | None:
        """Return the expert to evict next, never a protected one; None if there is none."""
        candidates = self._membership
        if protected:
            candidates = candidates.copy()
            for expert in protected:
                candidates[expert] = False
        members = np.flatnonzero(candidates)
        if not len(members):
            return None
        worths = self.worths.ravel()[members]
        equals = members[worths == worths.min()]
        oldest = equals[self._last_use.ravel()[equals].argmin()]
        return divmod(int(oldest), self._membership.shape[1])


Numbers = np.ndarray[Any, Any]
ReadExpert = Callable[[Numbers], int]
"""Fills the bytes of an expert; returns how many bytes of files it read."""


class BlockStorage(Protocol):
    """Memory in blocks of equal size, in host or device memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""

    def __len__(self) -> int:
        """Return the number of blocks."""

    def locate(self, number: int) -> int:
        """Return the address or row of a block; never 0."""

    def fill(self, number: int, read: ReadExpert) -> int:
        """Fill a block, in any thread; return what ``read`` returns."""


class HostBlockStorage:
    """Blocks in host memory, by their addresses."""

    def __init__(self, size: int, *, count: int, taken: int = 0) -> None:
        """Allocate ``count`` blocks of ``size`` bytes, or ``taken`` bytes if that is more."""
        self._memory = np.frombuffer(allocate(max(count * size, taken)), np.uint8)
        self._blocks = self._memory[: count * size].reshape(count, size)

    @classmethod
    def from_budget(cls, total: int, shape: ExpertShape, *, max_count: int) -> "HostBlockStorage":
        """Allocate ``total`` bytes for blocks of a shape, at most ``max_count`` of them."""
        size = shape.block_bytes
        return cls(size, count=min(total // size, max_count), taken=total)

    @property
    def nbytes(self) -> int:
        """Bytes that were allocated."""
        return self._memory.nbytes

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def locate(self, number: int) -> int:
        """Return the address of a block."""
        return int(self._blocks[number].ctypes.data)

    def fill(self, number: int, read: ReadExpert) -> int:
        """Fill a block in place."""
        return read(self._blocks[number])


class ExpertMemory:
    """Owner of the blocks, and of the tables that say where experts are.

    ``places`` int64 and ``hits`` float32 [layers, experts] are read by programs while they run.
    """

    def __init__(
        self, shape: ExpertShape, *, layers: int, experts: int, blocks: int | BlockStorage
    ) -> None:
        """Own blocks, all of them free; a number allocates them in host memory."""
        self.shape = shape
        self.places = np.zeros((layers, experts), np.int64)
        self.hits = np.zeros((layers, experts), np.float32)
        if isinstance(blocks, int):
            blocks = HostBlockStorage(shape.block_bytes, count=blocks)
        self._blocks = blocks
        self._free = list(range(len(blocks)))
        self._block_numbers: dict[Expert, int] = {}
        self._pool = ExpertPool(layers=layers, experts=experts)
        """Experts in a block but without a slot."""
        self._mapped: dict[int, list[int]] = {}
        """Mapped experts, by layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._blocks.nbytes

    @property
    def worths(self) -> Numbers:
        """Worth of each expert, float64 [layers, experts]; the owner of the slots sets it."""
        return self._pool.worths

    @property
    def experts(self) -> int:
        """The number of experts of a layer."""
        return int(self.places.shape[1])

    def __contains__(self, expert: Expert) -> bool:
        """Tell whether an expert has a block."""
        return expert in self._block_numbers

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def choose_absent(self, ranked: Iterable[Sequence[int]]) -> list[Expert]:
        """Return as many absent experts as blocks are free: the first of each layer, and so on."""
        orders = ([(layer, one) for one in order] for layer, order in enumerate(ranked))
        there_not = (expert for expert in interleave(orders) if expert not in self._block_numbers)
        return list(islice(there_not, len(self._free)))

    def resident_mask(self, layer: int) -> Numbers:
        """Return float32 [experts], 1 for each that has a block; a view that may change."""
        row: Numbers = self.hits[layer]
        if mapped := self._mapped.get(layer):
            row = row.copy()
            row[[name for name in mapped if (layer, name) not in self._block_numbers]] = 0
        return row

    def fill(self, number: int, read: ReadExpert) -> int:
        """Fill a block that was taken, in any thread; return what ``read`` returns."""
        return self._blocks.fill(number, read)

    def take_block(self, protected: Collection[Expert]) -> int | None:
        """Return a free block, or evict an unprotected expert of the pool; None if neither."""
        if self._free:
            return self._free.pop()
        least = self._pool.find_victim(protected)
        return None if least is None else self._evict(least)

    def add(self, expert: Expert, number: int) -> None:
        """Record that an expert is in a taken block; it joins the pool, as the last used."""
        assert expert not in self._block_numbers
        self._block_numbers[expert] = number
        self._pool.add(expert)
        self.places[expert] = self._blocks.locate(number)
        self.hits[expert] = 1

    def release_block(self, number: int) -> None:
        """Return a block that was taken and stayed empty."""
        self._free.append(number)

    def touch(self, experts: Iterable[Expert]) -> None:
        """Record that experts were used: among equals in the pool they are evicted last."""
        self._pool.touch(experts)

    def assign_slot(self, expert: Expert) -> None:
        """Move an expert from the pool into a slot."""
        self._pool.remove(expert)

    def release_slot(self, expert: Expert) -> None:
        """Move an expert from its slot into the pool, as the last used."""
        assert expert in self._block_numbers
        self._pool.add(expert)

    def map_expert(self, expert: Expert, address: int) -> None:
        """Record the address of an expert without a block, until `unmap_all`."""
        assert expert not in self._block_numbers
        self.places[expert], self.hits[expert] = address, 1
        self._mapped.setdefault(expert[0], []).append(expert[1])

    def count_mapped(self, experts: Iterable[Expert]) -> int:
        """Return how many of these experts are mapped and have no block."""
        return sum(
            expert not in self._block_numbers and bool(self.places[expert]) for expert in experts
        )

    def unmap_all(self) -> None:
        """Forget the addresses of mapped experts, except those that got a block meanwhile."""
        for layer, names in self._mapped.items():
            gone = [name for name in names if (layer, name) not in self._block_numbers]
            self.places[layer, gone], self.hits[layer, gone] = 0, 0
        self._mapped.clear()

    def check_integrity(self, *, coming: int = 0, kept: Collection[Expert] = ()) -> None:
        """Assert the invariants; ``coming`` blocks are being filled, and ``kept`` have slots."""
        numbers = list(self._block_numbers.values())
        assert len(numbers) == len(set(numbers))
        assert len(numbers) + len(self._free) + coming == len(self._blocks)
        assert not set(numbers) & set(self._free)
        assert self._pool.members | set(kept) == self._block_numbers.keys()
        assert not self._pool.members & set(kept)
        places = np.zeros_like(self.places)
        for layer, names in self._mapped.items():  # until the next pass, if one failed
            places[layer, names] = self.places[layer, names]
        for expert, number in self._block_numbers.items():
            places[expert] = self._blocks.locate(number)
        assert np.array_equal(places, self.places)
        assert np.array_equal(places != 0, self.hits == 1)

    def _evict(self, expert: Expert) -> int:
        self._pool.remove(expert)
        self.places[expert], self.hits[expert] = 0, 0
        return self._block_numbers.pop(expert)
