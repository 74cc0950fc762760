"""Routed experts that are computed where they lie, outside the blocks of a memory.

The reader is asked each time whether an expert can be lent, for that changes: the system decides
which parts of a file it holds. A lent expert stays lent to the end of a pass.
"""

from collections.abc import Iterable, Sequence

from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory


class Lending:
    """Lends experts of a reader to a memory, and counts those that were asked for."""

    def __init__(self, memory: ExpertMemory, reader: ExpertReader, numbers: Sequence[int]) -> None:
        """Begin with no expert lent; ``numbers`` are those of routed layers in the base."""
        self._memory, self._reader, self._numbers = memory, reader, numbers
        self.lent = 0
        """Experts that were asked for and lent."""

    def can(self, expert: Expert) -> bool:
        """Tell whether an expert can be computed where it lies now."""
        return self._address(expert) is not None

    def rest(self, wanted: Iterable[Expert]) -> list[Expert]:
        """Lend the missing experts that can be lent; return those that have to be read."""
        missing = []
        for expert in wanted:
            if self._memory.places[expert]:
                continue
            address = self._address(expert)
            if address is None:
                missing.append(expert)
            else:
                self._memory.lend(expert, address)
        return missing

    def rest_of_asked(self, asked: Sequence[Expert]) -> list[Expert]:
        """Do the same for experts that are asked for now, and count those that are lent."""
        missing = self.rest(asked)
        self.lent += self._memory.count_lent(asked)
        return missing

    def _address(self, expert: Expert) -> int | None:
        layer, name = expert
        return self._reader.lend(self._numbers[layer], name)
