"""Routed experts on their way into memory: which threads read them, and with what result.

Several threads read what a pass waits for. One thread reads what is only foreseen: an expert that
is needed after all does not wait in its queue, and a wrong guess is *dropped* in the middle of the
read, so that it delays no other expert.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory
from expertctl.errors import ExpertError
from expertctl.store.copy_file import Dropped

_WAVES, _LEAST_WAVE = 3, 8
"""Missing experts are computed in at most so many parts, each but the last of at least so many."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A read under way, and the block that it fills."""

    block: int
    reading: Future[int]
    is_foreseen: bool
    begun: int
    """How often `Arrivals.begin` had been called when this read was begun."""
    dropped: Event | None = None
    """Set when the expert is no longer wanted; only guesses have one."""

    @property
    def is_dropped(self) -> bool:
        """Whether it was dropped; then it may still come, or not."""
        return self.dropped is not None and self.dropped.is_set()


class Arrivals:
    """The one owner of all reads into the blocks of a memory; one thread uses it."""

    def __init__(
        self, memory: ExpertMemory, reader: ExpertReader, numbers: Sequence[int], *, threads: int
    ) -> None:
        """Read with so many threads, and one more; ``numbers`` are layer numbers in the base."""
        self._memory, self._reader, self._numbers = memory, reader, numbers
        self._wanted = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self._foreseen = ThreadPoolExecutor(1, thread_name_prefix="experts-ahead")
        self._coming: dict[Expert, _Coming] = {}
        self._begun = 0
        self._unread: set[Expert] = set()
        self._untold = deque[str]()
        """Why experts in `unread` could not be read, until `take_notes` tells it."""
        self.loads = self.ahead = self.read_bytes = 0

    def __len__(self) -> int:
        """How many experts are on their way."""
        return len(self._coming)

    @property
    def unread(self) -> Set[Expert]:
        """Experts whose read failed while no pass waited for them; read again when one does."""
        return self._unread

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, a note of experts that failed while no pass waited; one thread calls it."""
        untold = [self._untold.popleft() for _ in range(len(self._untold))]
        if not untold:
            return ()
        return (f"routed experts that were to come could not be read: {len(untold)}; {untold[0]}",)

    def begin(self, missing: Sequence[Expert], spared: Collection[Expert]) -> list[Expert]:
        """Begin to read experts; return those that came meanwhile. Spared ones are not evicted.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._begun += 1
        self.end_guesses(spared)
        self._give_up_others(spared)
        came = [*self.land(), *self._after_dropped(missing)]
        for expert in missing:
            if not self._hurry(expert):
                came += self._begin(expert, spared)
        return came

    def await_some(self, missing: Sequence[Expert], spared: Collection[Expert]) -> list[Expert]:
        """Wait until enough missing experts came to be worth computing; return those that came.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        least = max(_LEAST_WAVE, -(-len(missing) // _WAVES))
        return self.end(missing, spared, least=least)

    def end(
        self, missing: Sequence[Expert], spared: Collection[Expert], *, least: int | None = None
    ) -> list[Expert]:
        """Wait until all missing experts came, or ``least`` more; return those that came.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        came: list[Expert] = []
        left = sum(expert in self._coming for expert in missing)
        enough = 0 if least is None else max(left - least, 0)
        while sum(expert in self._coming for expert in missing) > enough:
            came += self._await_one(spared)
        return came

    def foresee(
        self, wanted: Iterable[Expert], spared: Collection[Expert], *, is_guess: bool = False
    ) -> None:
        """Begin to read experts that will be asked for, as far as there are blocks for them.

        A guess is dropped as soon as a layer asks for others.
        """
        for expert in wanted:
            if expert in self._memory or expert in self._coming or expert in self._unread:
                continue
            number = self._memory.take(spared)
            if number is None:
                return
            self._read(expert, number, is_foreseen=True, dropped=Event() if is_guess else None)

    def land(self, wanted: Container[Expert] = ()) -> list[Expert]:
        """Take in the experts that have come: put them into the pool, and return them.

        A failed read is an error where its expert is wanted; if it was begun before the last
        `begin`, the expert is read again instead. An expert that is not wanted is then not foreseen
        again until it is wanted. A bug of ours is an error in any case.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        came: list[Expert] = []
        failed: list[BaseException] = []
        for expert, coming in [(e, c) for e, c in self._coming.items() if c.reading.done()]:
            del self._coming[expert]
            if coming.reading.cancelled():
                self._memory.give_back(coming.block)
                continue
            error = coming.reading.exception()
            if error is None:
                self._unread.discard(expert)
                self._memory.put(expert, coming.block)
                self.loads += 1
                self.ahead += coming.is_foreseen
                self.read_bytes += coming.reading.result()
                came.append(expert)
                continue
            is_ours = not isinstance(error, ExpertError | OSError)
            if expert in wanted and coming.begun < self._begun and not is_ours:
                self._read(expert, coming.block)
                continue
            self._memory.give_back(coming.block)
            if isinstance(error, Dropped):
                self.read_bytes += error.read_bytes
            elif expert in wanted or is_ours:
                failed.append(error)
            else:
                self._unread.add(expert)
                self._untold.append(self._told(expert, error))
        for error in failed:
            raise error
        return came

    def end_guesses(self, right: Container[Expert]) -> None:
        """Drop wrong guesses; right ones are ordinary reads from now on."""
        for expert, coming in list(self._coming.items()):
            if coming.dropped is None:
                continue
            if expert not in right:
                coming.dropped.set()
            elif not coming.is_dropped:
                self._coming[expert] = replace(coming, dropped=None)

    def close(self) -> None:
        """End all reads."""
        for coming in self._coming.values():
            coming.reading.cancel()
        for pool in (self._wanted, self._foreseen):
            pool.shutdown(cancel_futures=True)

    def _told(self, expert: Expert, error: BaseException) -> str:
        layer, name = expert
        why = error.message if isinstance(error, ExpertError) else str(error)
        return f"the first was {name} of layer {self._numbers[layer]}: {why}"

    def _hurry(self, expert: Expert) -> bool:
        """Tell whether an expert is there or coming; move one that is queued to other threads."""
        coming = self._coming.get(expert)
        if coming is None:
            return expert in self._memory
        if coming.is_foreseen and coming.reading.cancel():
            self._read(expert, coming.block)
        return True

    def _give_up_others(self, wanted: Container[Expert]) -> None:
        """Cancel reads that have not started, of experts that are not wanted."""
        for expert, coming in list(self._coming.items()):
            if expert not in wanted and coming.reading.cancel():
                del self._coming[expert]
                self._memory.give_back(coming.block)

    def _after_dropped(self, missing: Iterable[Expert]) -> list[Expert]:
        """Wait for experts that were dropped before and are wanted now; return those that came."""
        there = (self._coming[expert] for expert in missing if expert in self._coming)
        dropped = [coming.reading for coming in there if coming.is_dropped]
        if not dropped:
            return []
        wait(dropped)
        return self.land()

    def _begin(self, expert: Expert, spared: Collection[Expert]) -> list[Expert]:
        """Begin to read an expert; while all blocks are taken, wait for others to come."""
        came: list[Expert] = []
        while (number := self._memory.take(spared)) is None:
            assert self._coming, "there are blocks for the experts of any one layer"
            came += self._await_one(spared)
        self._read(expert, number)
        return came

    def _read(
        self,
        expert: Expert,
        number: int,
        *,
        is_foreseen: bool = False,
        dropped: Event | None = None,
    ) -> None:
        layer, name = expert
        read = partial(self._reader.read, self._numbers[layer], name)
        if dropped is not None:
            read = partial(read, is_wanted=lambda: not dropped.is_set())
        readers = self._foreseen if is_foreseen else self._wanted
        reading = Future[int]()
        try:
            self._coming[expert] = _Coming(number, reading, is_foreseen, self._begun, dropped)
            readers.submit(_do, reading, partial(self._memory.fill, number, read))
        except BaseException:  # no thread can be started, or the user interrupts
            if reading.cancel():  # else a thread reads it already
                self._coming.pop(expert, None)
                self._memory.give_back(number)
            raise

    def _await_one(self, wanted: Container[Expert]) -> list[Expert]:
        wait([coming.reading for coming in self._coming.values()], return_when=FIRST_COMPLETED)
        return self.land(wanted)


def _do(reading: Future[int], read: Callable[[], int]) -> None:
    """Read, unless that was cancelled: a pool may keep a task that it found no thread for."""
    if not reading.set_running_or_notify_cancel():
        return
    try:
        reading.set_result(read())
    except BaseException as error:  # noqa: BLE001  # raised where it is waited for
        reading.set_exception(error)
