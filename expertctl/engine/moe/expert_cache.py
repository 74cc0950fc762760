"""The routed experts of a base that is larger than its memory: which are kept, which are read.

A pass asks for experts layer by layer. Missing ones are read by threads into the pool of
`expert_memory` while the pass waits, or are left out where that was asked for. Slots are reassigned
only between two passes, so nothing that a program reads changes under it. An expert without a slot
stays in the pool as long as it is worth more than others: by what was asked for, and by which
expert follows which. Likely experts of the next layer are read ahead, where that is mostly right.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.moe.arrivals import Arrivals
from expertctl.engine.moe.choices import Choices
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.exchanges import Scores, affordable, exchanges
from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory
from expertctl.engine.moe.followers import Followers
from expertctl.engine.moe.guesses import Guesses
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.lending import Lending
from expertctl.engine.moe.miss_policy import EXACT, MissPolicy
from expertctl.engine.moe.pass_log import PassLog
from expertctl.engine.moe.phase import Phase, cache_phase
from expertctl.engine.moe.pinning import pin_swaps
from expertctl.engine.moe.placement import in_turn
from expertctl.engine.moe.report import Activity, Residence, RoutedReport
from expertctl.engine.moe.skipping import over_cap
from expertctl.engine.moe.update_policy import UpdatePolicy
from expertctl.engine.moe.updates import RequestBuffer, Swap, Update, updates_between_tokens

Numbers = np.ndarray[Any, Any]
_BESIDE = 4
"""So many expected experts are read while a pass is computed."""


class ExpertCache:
    """The one owner of routed experts that do not all fit; it serves one pass at a time."""

    is_whole = False

    def __init__(
        self,
        memory: ExpertMemory,
        reader: ExpertReader,
        *,
        numbers: Sequence[int],
        slots: Sequence[LayerSlots],
        policy: MissPolicy = EXACT,
        threads: int = 3,
    ) -> None:
        """Begin with no expert in memory; ``numbers`` are those of routed layers in the base.

        The blocks beyond all slots must hold the experts of any one layer that have no slot.
        """
        self._memory, self._numbers = memory, tuple(numbers)
        self._lending = Lending(memory, reader, self._numbers)
        self.slots, self._policy = tuple(slots), policy
        self._requests, self._pace = RequestBuffer(), UpdatePolicy()
        self._followers = Followers(layers=len(self.slots), experts=memory.experts)
        self._log = PassLog(self._numbers, experts=memory.experts, skips=policy.skips)
        self._arrivals = Arrivals(memory, reader, self._numbers, threads=threads)
        self._expected = deque[Expert]()
        """Experts that will probably be asked for, read as long as there are empty slots."""
        self._scores: dict[int, Scores] = {}
        self._rate = 0.0
        self._pins_come = False
        """Whether a pinned expert may have no slot yet."""
        self._some_go = any(layer.capacity < layer.experts for layer in slots)
        self._swaps, self._waited = 0, 0.0
        self._missing: list[Expert] = []
        """The experts that the pass waits for."""
        self._spared = frozenset[Expert]()
        """Experts that are not evicted until all have come."""
        self._guesses = Guesses()
        self._likely: tuple[int, Numbers] | None = None
        """The place of the next layer, and what it will probably be asked for."""

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
        """Bytes of all blocks, and of the chances of which expert follows which."""
        return self._memory.nbytes + self._followers.nbytes

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, int64 [experts]; 0 for what is missing."""
        row: Numbers = self._memory.places[layer]
        return row

    def hits(self, layer: int) -> Numbers:
        """Return float32 [experts], 1 for what is there and 0 for what is missing."""
        row: Numbers = self._memory.hits[layer]
        return row

    @property
    def counters(self) -> Counters:
        """What the lanes of each layer did until now; another thread may ask."""
        return self._log.counters

    def ask(self, layer: int, room: Choices, tokens: int, *, foresees: bool = True) -> bool:
        """Begin to read what tokens chose in a layer and may not skip; tell whether to `wait`.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        if layer == 0:
            self._memory.end_lending()  # of a pass that failed
        selected, slots = room.selected[layer, :tokens], self.slots[layer]
        self._land()  # first, so that experts found present below stay
        self._log.ask(layer, selected, self._memory.held(layer))
        different = set(selected.ravel().tolist())
        self._guesses.judge(layer, different)
        if slots.capacity < slots.experts:
            slots.chances = self._followers.chances(layer, selected)
            self._memory.worths[layer] = slots.worths()
        asked = [(layer, expert) for expert in sorted(different - slots.seated)]
        self._spared = frozenset(asked)
        self._missing = self._not_skipped(layer, room, tokens, asked) if asked else []
        self._likely = None
        if foresees and self._policy.reads_ahead and layer + 1 < len(self._numbers):
            self._likely = layer + 1, room.likely[layer + 1, :tokens]
        if not self._missing:
            self._arrivals.end_guesses(self._spared)
            self._all_came()
            return False
        with self._waiting():
            self._seat(self._arrivals.begin(self._missing, self._spared))
        self._log.began()
        return True

    def wait_for_some(self) -> bool:
        """Wait for some of the missing experts; tell whether others are still to come.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._log.waits()
        with self._waiting():
            self._seat(self._arrivals.await_some(self._missing, self._spared))
        if all(expert in self._memory for expert in self._missing):
            self._all_came()
            return False
        self._log.began()
        return True

    def wait(self) -> None:
        """Wait for all of them, as `wait_for_some` does."""
        while self.wait_for_some():
            pass

    def bring(self, layer: int, room: Choices, tokens: int) -> None:
        """Ask, and wait for all of them, as `wait_for_some` does."""
        if self.ask(layer, room, tokens):
            self.wait()

    def passed(self, room: Choices, tokens: int, *, phase: Phase) -> None:
        """Learn what was chosen in all layers of a pass that is over; then slots may change."""
        asked = self._log.passed(room, tokens)
        self._land()
        self._memory.end_lending()
        if asked is None:
            return  # it failed
        self._requests.append(asked)
        if self._some_go:
            self._followers.passed(asked, tokens)
        begins = phase is not Phase.DECODE and cache_phase(phase, tokens) is Phase.PROMPT
        if begins:
            self._pace = UpdatePolicy()
        self._pace.generated(tokens)
        if begins or self._pace.is_due():
            self._update()
        if self._pins_come:
            self._seat_pinned()
        if self._expected:
            self._go_on_filling(_BESIDE)

    def activity(self) -> Activity:
        """Return what was asked for and brought until now; another thread may ask."""
        totals, arrivals = self._log.totals, self._arrivals
        return Activity(
            requests=totals.requests,
            misses=totals.misses,
            loads=arrivals.loads,
            read_ahead=arrivals.ahead,
            read_bytes=arrivals.read_bytes,
            waited_ms=self._waited * 1e3,
            lent=self._lending.lent,
            swaps=self._swaps,
            mass=totals.mass,
            skipped=totals.skipped,
        )

    def report(self) -> RoutedReport:
        """Return `activity`, with how many experts are in memory at most."""
        held = Residence(
            miss="skip" if self.skips else "exact",
            layers=len(self._numbers),
            experts=self._memory.experts,
            slots=sum(layer.capacity for layer in self.slots) // len(self._numbers),
            blocks=self._memory.blocks,
        )
        return RoutedReport(held, self.activity())

    def _update(self) -> None:
        update = updates_between_tokens(self.slots, self._requests, layer_budget=self._pace.budget)
        for swap in update.swaps:
            if self._is_worth_bringing((swap.layer, swap.add)):
                self._exchange(swap)
        if self._rate:
            self._exchange_by_gain(update)
        self._pace.updated(update)

    def fill(self, ranked: Sequence[Sequence[int]]) -> None:
        """Bring experts into all empty slots, those ranked first; those ranked next into the pool.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        for layer, slots in enumerate(self.slots):
            wanted = [(layer, expert) for expert in slots.first_residents(ranked[layer])]
            self._have([e for e in wanted if e not in self._memory], frozenset(wanted))
        self._have(self._memory.absent(ranked), frozenset())

    def expect(self, ranked: Sequence[Sequence[int]]) -> None:
        """Fill empty slots while passes go on, in each layer with the experts ranked first.

        Pinned experts come in any case: they replace others that took the slots first.
        """
        room = [len(slots.free) for slots in self.slots]
        firsts = [[(n, e) for e in order[: room[n]]] for n, order in enumerate(ranked)]
        self._expected = deque(in_turn(firsts))
        self._pins_come = any(slots.pinned for slots in self.slots)
        self._go_on_filling(len(self._expected))

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        """Let updates also exchange experts for ones with higher scores; a rate of 0 ends that.

        ``rate`` is the share of all residents that an update may exchange within its usual budget.
        """
        self._scores, self._rate = dict(enumerate(scores)), rate

    @property
    def scores(self) -> Sequence[Scores]:
        """The scores of experts for exchanges, by layer."""
        return [self._scores.get(layer, {}) for layer in range(len(self.slots))]

    @property
    def exchange_rate(self) -> float:
        """The share of all residents that a profile may exchange in an update."""
        return self._rate

    def pin(self, experts: Sequence[frozenset[int]]) -> None:
        """Pin these experts of each layer from now on, and bring those that are absent."""
        for slots, pinned in zip(self.slots, experts, strict=True):
            slots.pin(pinned)
        self._pins_come = True

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what a person should know of experts that could not be read."""
        return self._arrivals.take_notes()

    def close(self) -> None:
        """End all reads."""
        self._arrivals.close()

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""
        kept = [(n, expert) for n, slots in enumerate(self.slots) for expert in slots.residents]
        self._memory.check_integrity(coming=len(self._arrivals), kept=kept)
        for slots in self.slots:
            slots.check_integrity()

    def _go_on_filling(self, count: int) -> None:
        """Read some expected experts; those that gave way to more urgent ones are tried again."""
        first: list[Expert] = []
        while self._expected and len(first) < count:
            expert = self._expected.popleft()
            can_come = expert not in self._memory and expert not in self._arrivals.unread
            if self.slots[expert[0]].free and can_come:
                first.append(expert)
        self._arrivals.foresee(first, frozenset())
        self._expected.extendleft(reversed(first))

    def _is_worth_bringing(self, expert: Expert) -> bool:
        """Tell whether an expert asked for may have a slot: not if it was read, then evicted."""
        if self.skips or expert in self._memory:
            return True
        return self._lending.can(expert)

    def _exchange_by_gain(self, update: Update) -> None:
        """Do the exchanges that gain most by scores, as far as the update may do more."""
        found = exchanges(dict(enumerate(self.slots)), self._scores, rate=self._rate)
        layers = self._pace.budget
        for swap in affordable(found.swaps, update.swaps, layer_budget=layers):
            self._exchange(swap)

    def _seat_pinned(self) -> None:
        """Give pinned experts slots, as many at once as an update may, and read the next ones."""
        due = pin_swaps(self.slots)
        there = [swap for swap in due if (swap.layer, swap.add) in self._memory]
        for swap in affordable(there, (), layer_budget=len(self.slots)):
            self._exchange(swap)
        absent = [(swap.layer, swap.add) for swap in due if swap not in there]
        readable = [expert for expert in absent if expert not in self._arrivals.unread]
        self._pins_come = bool(there or readable)
        self._arrivals.foresee(readable[:_BESIDE], frozenset())

    def _all_came(self) -> None:
        """Log that all missing experts came, and begin to read ahead."""
        self._log.brought()
        if self._likely is not None and not self.slots[self._likely[0]].has_all:
            self._read_ahead(*self._likely, self._spared)

    def _not_skipped(
        self, layer: int, room: Choices, tokens: int, asked: list[Expert]
    ) -> list[Expert]:
        """Return which of the experts without a slot must be read, for they may not be left out."""
        self._memory.use(asked)
        missing = self._lending.rest_of_asked(asked)
        if missing and self._policy.skips:
            selected = room.selected[layer, :tokens]
            there = self.hits(layer)[selected]
            over = over_cap(room.weights[layer, :tokens], there, self._policy.cap)
            needed = set(_experts(layer, selected[over]))
            missing = [expert for expert in missing if expert in needed]
        return missing

    def _have(self, missing: Sequence[Expert], spared: frozenset[Expert]) -> None:
        """Read experts and wait for them; spared ones are not evicted."""
        if missing:
            with self._waiting():
                self._seat(self._arrivals.begin(missing, spared))
                self._seat(self._arrivals.end(missing, spared))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begun

    def _read_ahead(self, layer: int, likely: Numbers, spared: Iterable[Expert]) -> None:
        """Begin to read what a layer will probably be asked for, first choices first."""
        absent = self._memory.places[layer][likely] == 0
        if absent.any():
            worth_it = self._guesses.worth_reading(layer, likely, absent)
            missing = self._lending.rest((layer, expert) for expert in worth_it)
            if missing:
                spared = frozenset(spared).union(_experts(layer, likely))
                self._arrivals.foresee(missing, spared, is_guess=True)

    def _land(self) -> None:
        """Take in what has come meanwhile."""
        if len(self._arrivals):
            self._seat(self._arrivals.land())

    def _seat(self, came: Iterable[Expert]) -> None:
        """Give each expert that came a slot, if its layer has an empty one."""
        for layer, name in came:
            slots = self.slots[layer]
            if slots.free and (layer, name) in self._memory:  # it may be evicted already
                slots.exchange(slot=slots.free[0], expert=name)
                self._memory.keep((layer, name))
            else:
                self._pins_come |= name in slots.pinned

    def _exchange(self, swap: Swap) -> None:
        """Give a slot to another expert if it has a block; else read it for a later exchange."""
        expert = (swap.layer, swap.add)
        if expert not in self._memory:
            self._arrivals.foresee([expert], frozenset())
            return
        gone = self.slots[swap.layer].exchange(slot=swap.slot, expert=swap.add)
        self._memory.keep(expert)
        if gone is not None:
            self._memory.let_go((swap.layer, gone))
        self._swaps += 1
        self._log.count_swap(self._numbers[swap.layer])


def _experts(layer: int, selected: Numbers) -> list[Expert]:
    """Return the experts that are selected in a layer, each once."""
    return [(layer, expert) for expert in sorted(set(selected.ravel().tolist()))]
