"""Read routed experts into memory, in threads, or map those in the page cache of a copy.

`PageCacheExperts` asks the reader each time whether an expert is cached, because the operating
system decides which parts of a file it caches. A mapped expert stays mapped until the end of a
pass.

`ExpertLoader` has several threads for the experts that a pass waits for and one thread for
predictions: an expert that is needed after all does not wait in its queue, and a wrong prediction
is *dropped* in the middle of the read, so that it delays no other expert.

`PredictionFilter` judges predictions of the next layer. The router of a layer is applied early, to
what the layer before it reads, and names as many experts as a token uses, the likeliest first: each
has a *rank*. How often a prediction is right differs: with a small trained base from 98 % for the
first rank of a late layer to 22 % in the second layer. For each layer and rank it keeps the share
of absent experts that were in fact chosen, updated once per pass with its share ``right``:

    share += 0.02 * (right - share)

A rank that is right in less than half of all cases is not read: half of what it reads would evict
other experts for nothing. It is judged all the same, so it may be read again later. At first all
ranks are read. Passes of more than 16 tokens, which are prompts, are neither filtered nor judged:
that many tokens choose nearly every expert.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory
from expertctl.engine.moe.layer_slots import MAX_SEQUENCES, Ids
from expertctl.errors import ExpertError
from expertctl.store.quantised_file import ReadCancelled


class PageCacheExperts:
    """Maps experts of a reader into a memory, and counts those that were chosen."""

    def __init__(
        self, memory: ExpertMemory, reader: ExpertReader, layer_numbers: Sequence[int]
    ) -> None:
        """Start with no expert mapped; ``layer_numbers`` are those of routed layers in the base."""
        self._memory, self._reader, self._layer_numbers = memory, reader, layer_numbers
        self.mapped_requests = 0
        """Experts that were chosen and mapped."""

    def is_cached(self, expert: Expert) -> bool:
        """Tell whether an expert can be computed in the page cache now."""
        return self._find_address(expert) is not None

    def map_cached(self, wanted: Iterable[Expert]) -> list[Expert]:
        """Map the missing experts that are cached; return those that have to be read."""
        missing = []
        for expert in wanted:
            if self._memory.places[expert]:
                continue
            address = self._find_address(expert)
            if address is None:
                missing.append(expert)
            else:
                self._memory.map_expert(expert, address)
        return missing

    def map_requested(self, asked: Sequence[Expert]) -> list[Expert]:
        """Do the same for experts that were chosen, and count those that are mapped."""
        missing = self.map_cached(asked)
        self.mapped_requests += self._memory.count_mapped(asked)
        return missing

    def _find_address(self, expert: Expert) -> int | None:
        layer, name = expert
        return self._reader.find_cached_address(self._layer_numbers[layer], name)


_MAX_WAVES, _MIN_WAVE = 3, 8
"""Missing experts are computed in at most three parts, all but the last of at least eight."""


@dataclass(frozen=True, slots=True)
class _PendingRead:
    """A read in progress, and the block that it fills."""

    block: int
    future: Future[int]
    is_prefetch: bool
    generation: int
    """The number of `ExpertLoader.start_reads` calls when this read was submitted."""
    drop_event: Event | None = None
    """Set when the expert is no longer wanted; only predictions have one."""

    @property
    def was_dropped(self) -> bool:
        """Whether it was dropped; the read may complete all the same."""
        return self.drop_event is not None and self.drop_event.is_set()


class ExpertLoader:
    """Owner of all reads into the blocks of a memory; one thread uses it."""

    def __init__(
        self,
        memory: ExpertMemory,
        reader: ExpertReader,
        layer_numbers: Sequence[int],
        *,
        threads: int,
    ) -> None:
        """Read in ``threads`` threads, and one more for predictions.

        ``layer_numbers`` are the numbers of routed layers in the base.
        """
        self._memory, self._reader, self._layer_numbers = memory, reader, layer_numbers
        self._urgent_pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self._prefetch_pool = ThreadPoolExecutor(1, thread_name_prefix="experts-ahead")
        self._pending: dict[Expert, _PendingRead] = {}
        self._generation = 0
        self._unread: set[Expert] = set()
        self._unreported = deque[str]()
        """Why experts in `unread` could not be read, until `take_notes` returns it."""
        self.loads = self.prefetched = self.read_bytes = 0

    def __len__(self) -> int:
        """Return the number of reads in progress."""
        return len(self._pending)

    @property
    def unread(self) -> Set[Expert]:
        """Experts whose read failed while no pass waited for them; read again when one does."""
        return self._unread

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, a note of reads that failed while no pass waited; one thread calls it."""
        notes = [self._unreported.popleft() for _ in range(len(self._unreported))]
        if not notes:
            return ()
        return (f"could not prefetch {len(notes)} routed experts; {notes[0]}",)

    def start_reads(self, missing: Sequence[Expert], protected: Collection[Expert]) -> list[Expert]:
        """Start to read experts; return those that arrived. Protected ones are not evicted.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._generation += 1
        self.drop_wrong_predictions(protected)
        self._cancel_others(protected)
        loaded = [*self.collect(), *self._wait_for_dropped(missing)]
        for expert in missing:
            if not self._promote(expert):
                loaded += self._start_read(expert, protected)
        return loaded

    def wait_for_some(
        self, missing: Sequence[Expert], protected: Collection[Expert]
    ) -> list[Expert]:
        """Wait for enough missing experts to be worth computing; return those that arrived.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        minimum = max(_MIN_WAVE, -(-len(missing) // _MAX_WAVES))
        return self.finish_reads(missing, protected, minimum=minimum)

    def finish_reads(
        self,
        missing: Sequence[Expert],
        protected: Collection[Expert],
        *,
        minimum: int | None = None,
    ) -> list[Expert]:
        """Wait for all missing experts, or for ``minimum`` more; return those that arrived.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        loaded: list[Expert] = []
        left = sum(expert in self._pending for expert in missing)
        enough = 0 if minimum is None else max(left - minimum, 0)
        while sum(expert in self._pending for expert in missing) > enough:
            loaded += self._wait_for_one(protected)
        return loaded

    def prefetch(
        self,
        wanted: Iterable[Expert],
        protected: Collection[Expert],
        *,
        is_prediction: bool = False,
    ) -> None:
        """Start to read experts that will probably be chosen, as far as blocks are available.

        A prediction is dropped as soon as a layer chooses other experts.
        """
        for expert in wanted:
            if expert in self._memory or expert in self._pending or expert in self._unread:
                continue
            number = self._memory.take_block(protected)
            if number is None:
                return
            self._submit_read(
                expert, number, is_prefetch=True, drop_event=Event() if is_prediction else None
            )

    def collect(self, wanted: Container[Expert] = ()) -> list[Expert]:
        """Put the experts that arrived into the pool, and return them.

        A failed read is an error if its expert is wanted; if it was submitted before the last
        `start_reads`, it is retried instead. An unwanted expert is then not prefetched until it is
        wanted. A bug of ours is an error in any case.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        loaded: list[Expert] = []
        failed: list[BaseException] = []
        for expert, read in [(e, c) for e, c in self._pending.items() if c.future.done()]:
            del self._pending[expert]
            if read.future.cancelled():
                self._memory.release_block(read.block)
                continue
            error = read.future.exception()
            if error is None:
                self._unread.discard(expert)
                self._memory.add(expert, read.block)
                self.loads += 1
                self.prefetched += read.is_prefetch
                self.read_bytes += read.future.result()
                loaded.append(expert)
                continue
            is_ours = not isinstance(error, ExpertError | OSError)
            if expert in wanted and read.generation < self._generation and not is_ours:
                self._submit_read(expert, read.block)
                continue
            self._memory.release_block(read.block)
            if isinstance(error, ReadCancelled):
                self.read_bytes += error.read_bytes
            elif expert in wanted or is_ours:
                failed.append(error)
            else:
                self._unread.add(expert)
                self._unreported.append(self._describe_failure(expert, error))
        for error in failed:
            raise error
        return loaded

    def drop_wrong_predictions(self, requested: Container[Expert]) -> None:
        """Drop wrong predictions; right ones are ordinary reads from now on."""
        for expert, read in list(self._pending.items()):
            if read.drop_event is None:
                continue
            if expert not in requested:
                read.drop_event.set()
            elif not read.was_dropped:
                self._pending[expert] = replace(read, drop_event=None)

    def close(self) -> None:
        """Stop all reads."""
        for read in self._pending.values():
            read.future.cancel()
        for pool in (self._urgent_pool, self._prefetch_pool):
            pool.shutdown(cancel_futures=True)

    def _describe_failure(self, expert: Expert, error: BaseException) -> str:
        layer, name = expert
        why = error.message if isinstance(error, ExpertError) else str(error)
        return f"the first is expert {name} of layer {self._layer_numbers[layer]}: {why}"

    def _promote(self, expert: Expert) -> bool:
        """Tell whether an expert is resident or read; move a queued prefetch to other threads."""
        read = self._pending.get(expert)
        if read is None:
            return expert in self._memory
        if read.is_prefetch and read.future.cancel():
            self._submit_read(expert, read.block)
        return True

    def _cancel_others(self, wanted: Container[Expert]) -> None:
        """Cancel reads of unwanted experts that have not started."""
        for expert, read in list(self._pending.items()):
            if expert not in wanted and read.future.cancel():
                del self._pending[expert]
                self._memory.release_block(read.block)

    def _wait_for_dropped(self, missing: Iterable[Expert]) -> list[Expert]:
        """Wait for experts that were dropped and are wanted now; return those that arrived."""
        there = (self._pending[expert] for expert in missing if expert in self._pending)
        dropped = [read.future for read in there if read.was_dropped]
        if not dropped:
            return []
        wait(dropped)
        return self.collect()

    def _start_read(self, expert: Expert, protected: Collection[Expert]) -> list[Expert]:
        """Start to read an expert; while all blocks are taken, wait for other reads."""
        loaded: list[Expert] = []
        while (number := self._memory.take_block(protected)) is None:
            assert self._pending, "there are blocks for the experts of any one layer"
            loaded += self._wait_for_one(protected)
        self._submit_read(expert, number)
        return loaded

    def _submit_read(
        self,
        expert: Expert,
        number: int,
        *,
        is_prefetch: bool = False,
        drop_event: Event | None = None,
    ) -> None:
        layer, name = expert
        read = partial(self._reader.read, self._layer_numbers[layer], name)
        if drop_event is not None:
            read = partial(read, is_wanted=lambda: not drop_event.is_set())
        readers = self._prefetch_pool if is_prefetch else self._urgent_pool
        reading = Future[int]()
        try:
            self._pending[expert] = _PendingRead(
                number, reading, is_prefetch, self._generation, drop_event
            )
            readers.submit(_run_read, reading, partial(self._memory.fill, number, read))
        except BaseException:  # no thread can be started, or the user interrupts
            if reading.cancel():  # else a thread reads it already
                self._pending.pop(expert, None)
                self._memory.release_block(number)
            raise

    def _wait_for_one(self, wanted: Container[Expert]) -> list[Expert]:
        wait([read.future for read in self._pending.values()], return_when=FIRST_COMPLETED)
        return self.collect(wanted)


def _run_read(reading: Future[int], read: Callable[[], int]) -> None:
    """Read, unless cancelled: a pool may keep a task for which it found no thread."""
    if not reading.set_running_or_notify_cancel():
        return
    try:
        reading.set_result(read())
    except BaseException as error:  # noqa: BLE001  # raised where it is waited for
        reading.set_exception(error)


HIT_RATE_STEP = 0.02
"""The weight of the next pass in a share."""
MIN_HIT_RATE = 0.5
"""The share from which a rank is read."""
_INITIAL_HIT_RATE = 1.0


class PredictionFilter:
    """Owner of the shares of all layers; a layer is predicted before its experts are chosen."""

    def __init__(self) -> None:
        """Start by trusting all ranks."""
        self._hit_rates: dict[int, list[float]] = {}
        self._pending: tuple[int, Sequence[list[int]]] | None = None
        """The last layer that was predicted, and the experts that were absent there, by rank."""

    def hit_rates(self, layer: int) -> Sequence[float]:
        """Return the share of each rank of a layer; empty before its first prediction."""
        return tuple(self._hit_rates.get(layer, ()))

    def select(self, layer: int, likely: Ids, absent: NDArray[np.bool_]) -> list[int]:
        """Return which experts of a layer to read, the first ranks first, each once.

        ``likely`` is [tokens, used], and ``absent`` says which of them are not in memory.
        """
        if len(likely) > MAX_SEQUENCES:
            self._pending = None
            return list(dict.fromkeys(likely.T[absent.T].tolist()))
        pairs = zip(likely.T.tolist(), absent.T.tolist(), strict=True)
        ranks = [[e for e, is_absent in zip(*pair, strict=True) if is_absent] for pair in pairs]
        self._pending = layer, ranks
        shares = self._hit_rates.setdefault(layer, [_INITIAL_HIT_RATE] * len(ranks))
        trusted = (rank for rank, share in zip(ranks, shares, strict=True) if share >= MIN_HIT_RATE)
        return list(dict.fromkeys(expert for rank in trusted for expert in rank))

    def record_outcome(self, layer: int, asked: Set[int]) -> None:
        """Update the shares of the last prediction with the experts that were in fact chosen."""
        guess, self._pending = self._pending, None
        if guess is None or guess[0] != layer:
            return  # there was no prediction, or that pass failed
        shares = self._hit_rates[layer]
        for number, rank in enumerate(guess[1]):
            if rank:
                right = sum(expert in asked for expert in rank) / len(rank)
                shares[number] += HIT_RATE_STEP * (right - shares[number])
