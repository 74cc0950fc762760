"""Routed experts on their way into memory: who reads them, and what became of it.

What a pass waits for is read by several threads. What is only foreseen is read by one, so that a
wrong guess delays nobody by more than one expert; who is needed after all does not wait in its row.
"""

from collections.abc import Container, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory


@dataclass(frozen=True, slots=True)
class _Coming:
    """What is being read, and into which block."""

    block: int
    reading: Future[int]
    is_foreseen: bool


class Arrivals:
    """The one owner of what is being read into the blocks of a memory; one thread asks it."""

    def __init__(
        self, memory: ExpertMemory, reader: ExpertReader, numbers: Sequence[int], *, threads: int
    ) -> None:
        """Read with so many threads, and one more; ``numbers`` are those of layers in the base."""
        self._memory, self._reader, self._numbers = memory, reader, numbers
        self._wanted = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self._foreseen = ThreadPoolExecutor(1, thread_name_prefix="experts-ahead")
        self._coming: dict[Expert, _Coming] = {}
        self.loads = self.ahead = self.read_bytes = 0

    def __len__(self) -> int:
        """How many are on their way."""
        return len(self._coming)

    def begin(self, missing: Sequence[Expert], spared: Container[Expert]) -> list[Expert]:
        """Have experts read; return who came meanwhile. Those that are spared stay.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._give_up_others(spared)
        came: list[Expert] = []
        for expert in missing:
            if not self._hurry(expert):
                came += self._begin(expert, spared)
        return came

    def end(self, missing: Sequence[Expert], spared: Container[Expert]) -> list[Expert]:
        """Wait until experts are there who were begun; return who came.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        came: list[Expert] = []
        while any(expert in self._coming for expert in missing):
            came += self._await_one(spared)
        return came

    def foresee(self, wanted: Iterable[Expert], spared: Container[Expert]) -> None:
        """Begin to read what will be asked for, as far as there are blocks for it."""
        for expert in wanted:
            if expert in self._memory or expert in self._coming:
                continue
            number = self._memory.take(spared)
            if number is None:
                return
            self._read(expert, number, is_foreseen=True)

    def land(self, wanted: Container[Expert] = ()) -> list[Expert]:
        """Take in what has come, and return who that is; they are in the pool.

        What did not come is an error where it is wanted; whoever wants it later reads it again.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        came: list[Expert] = []
        failed: list[BaseException] = []
        for expert, coming in [(e, c) for e, c in self._coming.items() if c.reading.done()]:
            del self._coming[expert]
            error = coming.reading.exception()
            if error is None:
                self._memory.put(expert, coming.block)
                self.loads += 1
                self.ahead += coming.is_foreseen
                self.read_bytes += coming.reading.result()
                came.append(expert)
            else:
                self._memory.give_back(coming.block)
                failed += [error] if expert in wanted else []
        for error in failed:
            raise error
        return came

    def close(self) -> None:
        """End what is being read."""
        for pool in (self._wanted, self._foreseen):
            pool.shutdown(cancel_futures=True)

    def _hurry(self, expert: Expert) -> bool:
        """Tell whether an expert is on its way; who waits behind others does so no more."""
        coming = self._coming.get(expert)
        if coming is None:
            return expert in self._memory
        if coming.is_foreseen and coming.reading.cancel():
            self._read(expert, coming.block)
        return True

    def _give_up_others(self, wanted: Container[Expert]) -> None:
        """Do not begin to read what was foreseen and is not wanted."""
        for expert, coming in list(self._coming.items()):
            if expert not in wanted and coming.reading.cancel():
                del self._coming[expert]
                self._memory.give_back(coming.block)

    def _begin(self, expert: Expert, spared: Container[Expert]) -> list[Expert]:
        """Have an expert read; while all blocks are taken, wait for one that comes."""
        came: list[Expert] = []
        while (number := self._memory.take(spared)) is None:
            assert self._coming, "there are blocks for the experts of any one layer"
            came += self._await_one(spared)
        self._read(expert, number)
        return came

    def _read(self, expert: Expert, number: int, *, is_foreseen: bool = False) -> None:
        layer, name = expert
        read = partial(self._reader.read, self._numbers[layer], name)
        readers = self._foreseen if is_foreseen else self._wanted
        reading = readers.submit(self._memory.fill, number, read)
        self._coming[expert] = _Coming(number, reading, is_foreseen)

    def _await_one(self, wanted: Container[Expert]) -> list[Expert]:
        wait([coming.reading for coming in self._coming.values()], return_when=FIRST_COMPLETED)
        return self.land(wanted)
