"""The naive rival: an expert that is missing is read when it is asked for.

Each layer has slots; the least recently used expert is evicted. Nothing is read ahead, and experts
are read one after the other.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.memory import allocate
from expertctl.engine.moe.choices import Choices
from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.phase import Phase

Numbers = np.ndarray[Any, Any]


class LoadOnMiss:
    """Routed experts as `engine.moe.routed_experts` wants them."""

    is_whole, skips = False, False

    def __init__(
        self,
        shape: ExpertShape,
        reader: ExpertReader,
        *,
        numbers: tuple[int, ...],
        experts: int,
        slots: int,
    ) -> None:
        """Begin with no expert in memory, and so many slots in each of the layers ``numbers``."""
        self.shape, self._reader, self._numbers = shape, reader, numbers
        layers = len(numbers)
        memory = np.frombuffer(allocate(layers * slots * shape.nbytes), np.uint8)
        self._blocks = memory.reshape(layers, slots, shape.nbytes)
        self._places = np.zeros((layers, experts), np.int64)
        self._hits = np.zeros((layers, experts), np.float32)
        self._held = [OrderedDict[int, int]() for _ in numbers]
        self.requests = self.misses = self.read_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._blocks.nbytes

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, 0 for those that are missing."""
        row: Numbers = self._places[layer]
        return row

    def hits(self, layer: int) -> Numbers:
        """Return 1 for experts that are there and 0 for those that are missing."""
        row: Numbers = self._hits[layer]
        return row

    def ask(self, layer: int, room: Choices, tokens: int, *, foresees: bool = True) -> bool:
        """Read the experts that tokens chose and that are missing; then none is waited for."""
        wanted = np.unique(room.selected[layer, :tokens]).tolist()
        held = self._held[layer]
        self.requests += len(wanted)
        missing = [expert for expert in wanted if expert not in held]
        self.misses += len(missing)
        for expert in set(wanted).difference(missing):
            held.move_to_end(expert)
        for expert in missing:
            self._bring_one(layer, expert)
        return False

    def wait_for_some(self) -> bool:
        """Return False: all experts are there."""
        return False

    def passed(self, room: Choices, tokens: int, *, phase: Phase) -> None:
        """Do nothing: slots change when experts are read."""

    def _bring_one(self, layer: int, expert: int) -> None:
        held = self._held[layer]
        slot = len(held)
        if slot == len(self._blocks[layer]):
            gone, slot = held.popitem(last=False)
            self._places[layer, gone], self._hits[layer, gone] = 0, 0
        block = self._blocks[layer, slot]
        self.read_bytes += self._reader.read(self._numbers[layer], expert, block)
        held[expert] = slot
        self._places[layer, expert], self._hits[layer, expert] = block.ctypes.data, 1
