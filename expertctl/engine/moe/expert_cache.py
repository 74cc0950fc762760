"""The routed experts of a base that is larger than its memory: who is kept, and who is brought.

A pass asks for experts layer by layer. What is missing is read by threads into the pool of
`expert_memory` while the pass waits, or is left out where that was asked for. Only between two
passes is it decided who has a slot, so nothing that a program reads changes under it. What the next
layer is likely to ask for is read ahead.
"""

import time
from collections.abc import Container, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.moe.counters import Counters, requested_by_layer
from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.phase import Phase, cache_phase
from expertctl.engine.moe.report import Activity, Residence, RoutedReport
from expertctl.engine.moe.routed_room import RoutedRoom
from expertctl.engine.moe.skipping import SkipTotals, over_cap, skip_totals
from expertctl.engine.moe.update_policy import UpdatePolicy
from expertctl.engine.moe.updates import RequestBuffer, Swap, updates_between_tokens

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What happens where an expert is missing: it is brought, or left out within a cap.

    ``cap`` is how much of a token's weights may be left out at most, of 1. What the next layer will
    ask for is read ahead; then what is left out depends on how fast that is.
    """

    skips: bool = False
    cap: float = 1.0
    reads_ahead: bool = True


EXACT = MissPolicy()


@dataclass(frozen=True, slots=True)
class _Coming:
    """What is being read, and into which block."""

    block: int
    reading: Future[int]


class ExpertCache:
    """The one owner of routed experts that do not all fit; a pass at a time asks it."""

    is_whole = False

    def __init__(
        self,
        memory: ExpertMemory,
        reader: ExpertReader,
        *,
        numbers: Sequence[int],
        slots: Sequence[LayerSlots],
        policy: MissPolicy = EXACT,
        threads: int = 2,
    ) -> None:
        """Begin with no expert in memory; ``numbers`` are those of routed layers in the base.

        The blocks that have no slot must hold the experts of any one layer that have none.
        """
        self._memory, self._reader, self._numbers = memory, reader, tuple(numbers)
        self.slots, self._policy = tuple(slots), policy
        self._requests, self._pace = RequestBuffer(), UpdatePolicy()
        self.counters = Counters(self._numbers, experts=memory.experts)
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self._coming: dict[Expert, _Coming] = {}
        self._asked: list[Numbers] = []
        """What this pass asked for so far, [tokens, used] of each layer."""
        self._hits: list[Numbers] = []
        """And who had a slot then, [experts] of each layer."""
        self._totals = SkipTotals()
        self._loads = self._ahead = self._read_bytes = self._swaps = 0
        self._waited = 0.0

    @property
    def shape(self) -> ExpertShape:
        """What the block of an expert holds."""
        return self._memory.shape

    @property
    def skips(self) -> bool:
        """Whether what is missing may be left out."""
        return self._policy.skips

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._memory.nbytes

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, int64 [experts]; 0 for what is missing."""
        row: Numbers = self._memory.places[layer]
        return row

    def hits(self, layer: int) -> Numbers:
        """Return float32 [experts], 1 for what is there and 0 for what is missing."""
        row: Numbers = self._memory.hits[layer]
        return row

    def bring(self, layer: int, room: RoutedRoom, tokens: int) -> None:
        """Have in memory what tokens chose in a layer, or may not be skipped of it.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        selected = room.selected[layer, :tokens]
        del self._asked[layer:], self._hits[layer:]
        self._asked.append(selected.copy())  # what is skipped is struck out of it
        self._hits.append(self.slots[layer].hit_mask.copy())
        self._land()  # first: nobody goes any more of whom it is decided now that he is there
        asked = _experts(layer, selected)
        needed = asked
        if self._policy.skips:
            there = self.hits(layer)[selected]
            over = over_cap(room.weights[layer, :tokens], there, self._policy.cap)
            needed = _experts(layer, selected[over])
        spared = frozenset(asked)
        self._have(needed, spared)
        self._memory.use(asked)
        if self._policy.reads_ahead and layer + 1 < len(self._numbers):
            self._read_ahead(_experts(layer + 1, room.likely[layer + 1, :tokens]), spared)

    def passed(self, room: RoutedRoom, tokens: int, *, phase: Phase) -> None:
        """Learn what was chosen in all layers of a pass that is over; between two, slots change."""
        asked, self._asked = self._asked, []
        hits, self._hits = self._hits, []
        self._land()
        if len(asked) < len(self._numbers):
            return  # of a pass that failed
        self._count(np.stack(asked), np.stack(hits), room, tokens)
        self._requests.append(asked)
        begins = cache_phase(phase, tokens) is Phase.PROMPT
        if begins:
            self._pace = UpdatePolicy()
        self._pace.generated(tokens)
        if begins or self._pace.is_due():
            self._update()

    def activity(self) -> Activity:
        """Return what was asked for and brought until now; another thread may ask."""
        totals = self._totals
        return Activity(
            requests=totals.requests,
            misses=totals.misses,
            loads=self._loads,
            read_ahead=self._ahead,
            read_bytes=self._read_bytes,
            waited_ms=self._waited * 1e3,
            swaps=self._swaps,
            mass=totals.mass,
            skipped=totals.skipped,
        )

    def report(self) -> RoutedReport:
        """Return that, with how many experts are in memory at most."""
        residence = Residence(
            miss="skip" if self.skips else "exact",
            layers=len(self._numbers),
            experts=self._memory.experts,
            slots=max(slots.capacity for slots in self.slots),
            blocks=self._memory.nbytes // self.shape.nbytes,
        )
        return RoutedReport(residence, self.activity())

    def _count(self, asked: Numbers, hits: Numbers, room: RoutedRoom, tokens: int) -> None:
        """Count a pass whose tokens asked for [layers, tokens, used]."""
        requests = requested_by_layer(asked, self._memory.experts)
        self.counters.count_pass(requests, hits.astype(np.int64) - 1)
        left, skipped = room.weights[:, :tokens].sum(-1), room.skipped[:, :tokens]
        mass = np.where(left > 0, left, skipped)  # who stays has taken over the weights of all
        if not self.skips:
            skipped = np.zeros_like(mass)
        self._totals += skip_totals(requests, hits, mass=mass, skipped=skipped)

    def _update(self) -> None:
        update = updates_between_tokens(self.slots, self._requests, layer_budget=self._pace.budget)
        for swap in update.swaps:
            self._exchange(swap)
        self._pace.updated(update)

    def fill(self, ranked: Sequence[Sequence[int]]) -> None:
        """Bring experts into all empty slots, for each layer those that are ranked first.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        for layer, slots in enumerate(self.slots):
            wanted = [(layer, expert) for expert in slots.first_residents(ranked[layer])]
            self._have(wanted, frozenset(wanted))

    def close(self) -> None:
        """End what is being read."""
        self._readers.shutdown(cancel_futures=True)

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""
        self._memory.check_integrity(coming=len(self._coming))
        for layer, slots in enumerate(self.slots):
            slots.check_integrity()
            assert all((layer, expert) in self._memory for expert in slots.residents)

    def _have(self, wanted: Sequence[Expert], spared: frozenset[Expert]) -> None:
        """Wait until experts are there, reading those that nobody reads yet.

        Those that are spared stay.
        """
        missing = [expert for expert in wanted if expert not in self._memory]
        if not missing:
            return
        begun = time.perf_counter()
        self._give_up_others(spared)
        for expert in missing:
            if expert not in self._coming and expert not in self._memory:
                self._begin(expert, spared)
        while any(expert in self._coming for expert in missing):
            self._await_one(spared)
        self._waited += time.perf_counter() - begun

    def _read_ahead(self, wanted: Sequence[Expert], spared: frozenset[Expert]) -> None:
        """Begin to read what will be asked for, as far as there are blocks for it."""
        spared = spared.union(wanted)
        for expert in wanted:
            if expert in self._memory or expert in self._coming:
                continue
            number = self._memory.take(spared)
            if number is None:
                return
            self._read(expert, number)
            self._ahead += 1

    def _give_up_others(self, wanted: Container[Expert]) -> None:
        """Do not begin to read what was foreseen and is not wanted."""
        for expert, coming in list(self._coming.items()):
            if expert not in wanted and coming.reading.cancel():
                del self._coming[expert]
                self._memory.give_back(coming.block)

    def _begin(self, expert: Expert, spared: frozenset[Expert]) -> None:
        """Have an expert read; while all blocks are taken, wait for one that comes."""
        while (number := self._memory.take(spared)) is None:
            assert self._coming, "there are blocks for the experts of any one layer"
            self._await_one(spared)
        self._read(expert, number)

    def _read(self, expert: Expert, number: int) -> None:
        layer, name = expert
        block = self._memory.block(number)
        reading = self._readers.submit(self._reader.read, self._numbers[layer], name, block)
        self._coming[expert] = _Coming(number, reading)

    def _await_one(self, wanted: Container[Expert]) -> None:
        wait([coming.reading for coming in self._coming.values()], return_when=FIRST_COMPLETED)
        self._land(wanted)

    def _land(self, wanted: Container[Expert] = ()) -> None:
        """Take in what has come; into a slot where one is empty.

        What did not come is an error where it is wanted; whoever wants it later reads it again.
        """
        failed: list[BaseException] = []
        for expert, coming in [(e, c) for e, c in self._coming.items() if c.reading.done()]:
            del self._coming[expert]
            error = coming.reading.exception()
            if error is None:
                self._took(expert, coming)
            else:
                self._memory.give_back(coming.block)
                failed += [error] if expert in wanted else []
        for error in failed:
            raise error

    def _took(self, expert: Expert, coming: _Coming) -> None:
        self._loads += 1
        self._read_bytes += coming.reading.result()
        self._memory.put(expert, coming.block)
        self._take_a_seat(expert)

    def _take_a_seat(self, expert: Expert) -> None:
        layer, name = expert
        for slot in self.slots[layer].free[:1]:
            self.slots[layer].exchange(slot=slot, expert=name)
            self._memory.keep(expert)

    def _exchange(self, swap: Swap) -> None:
        """Give a slot to another expert, if it is there; one that was left out is fetched."""
        expert = (swap.layer, swap.add)
        if expert not in self._memory:
            if self.skips:
                self._read_ahead([expert], frozenset())
            return
        gone = self.slots[swap.layer].exchange(slot=swap.slot, expert=swap.add)
        self._memory.keep(expert)
        if gone is not None:
            self._memory.let_go((swap.layer, gone))
        self._swaps += 1
        self.counters.count_swaps(self._numbers[swap.layer], 1)


def _experts(layer: int, selected: Numbers) -> list[Expert]:
    """Return who is selected in a layer, each once."""
    return [(layer, int(expert)) for expert in np.unique(selected)]
