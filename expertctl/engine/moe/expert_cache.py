"""The routed experts of a base that is larger than its memory: which are kept, which are read.

A pass requests experts layer by layer. Threads read missing ones into the pool of `ExpertMemory`
while the pass waits, or they are skipped if the user chose that. Slots are reassigned only between
two passes, so nothing that a program reads changes under it. An expert without a slot stays in the
pool as long as it is worth more than others, by past requests and by the transition model. Likely
experts of the next layer are prefetched, if such predictions are mostly right.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import (
    Counters,
    ExpertActivity,
    ExpertResidency,
    Phase,
    RoutedExpertStats,
)
from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_loader import ExpertLoader, PageCacheExperts, PredictionFilter
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots, TransitionModel
from expertctl.engine.moe.placement import interleave
from expertctl.engine.moe.routed_experts import (
    PassLog,
    RoutedExperts,
    RoutingChoices,
    find_tokens_over_cap,
)
from expertctl.engine.moe.swap_policy import (
    ExpertScores,
    RequestBuffer,
    Swap,
    SwapUpdate,
    UpdatePolicy,
    limit_swaps,
    plan_pin_swaps,
    plan_profile_swaps,
    plan_updates,
)

Numbers = np.ndarray[Any, Any]
_PREFETCH_DEPTH = 4
"""Experts that are prefetched during a pass."""


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What happens when an expert is missing: it is read, or skipped within a cap.

    ``cap`` is the largest share of a token's weight that may be skipped. With ``prefetches``,
    predicted experts of the next layer are read early; how fast that is decides what is skipped.
    """

    skips: bool = False
    cap: float = 1.0
    prefetches: bool = True


EXACT_POLICY = MissPolicy()


class ExpertCache(RoutedExperts):
    """Owner of routed experts that do not all fit; it serves one pass at a time."""

    is_whole = False

    def __init__(
        self,
        memory: ExpertMemory,
        reader: ExpertReader,
        *,
        layer_numbers: Sequence[int],
        slots: Sequence[LayerSlots],
        policy: MissPolicy = EXACT_POLICY,
        threads: int = 3,
    ) -> None:
        """Start with no expert in memory; ``layer_numbers`` are those of routed layers in the base.

        The blocks beyond all slots must hold the experts of any one layer that have no slot.
        """
        super().__init__(memory.shape, memory.places, memory.hits)
        self._memory, self._layer_numbers = memory, tuple(layer_numbers)
        self._page_cache = PageCacheExperts(memory, reader, self._layer_numbers)
        self.slots, self._policy = tuple(slots), policy
        self._requests, self._update_policy = RequestBuffer(), UpdatePolicy()
        self._transitions = TransitionModel(layers=len(self.slots), experts=memory.experts)
        self._pass_log = PassLog(self._layer_numbers, experts=memory.experts, skips=policy.skips)
        self._loader = ExpertLoader(memory, reader, self._layer_numbers, threads=threads)
        self._warmup_queue = deque[Expert]()
        """Likely experts, read as long as there are empty slots."""
        self._scores: dict[int, ExpertScores] = {}
        self._exchange_rate = 0.0
        self._has_pending_pins = False
        """Whether a pinned expert may have no slot yet."""
        self._can_evict = any(layer.capacity < layer.experts for layer in slots)
        self._swaps, self._waited_seconds = 0, 0.0
        self._missing: list[Expert] = []
        """The experts that the pass waits for."""
        self._protected = frozenset[Expert]()
        """Experts that are not evicted until all have arrived."""
        self._prediction_filter = PredictionFilter()
        self._predicted: tuple[int, Numbers] | None = None
        """The index of the next layer, and its predicted choices."""

    @classmethod
    def from_plan(
        cls,
        plan: CachePlan,
        memory: ExpertMemory,
        reader: ExpertReader,
        *,
        layer_numbers: Sequence[int],
        threads: int = 3,
    ) -> "ExpertCache":
        """Start with the slots, the pins and the miss policy of a plan."""
        slots = [
            LayerSlots(experts=plan.experts, capacity=capacity, pinned=pins)
            for capacity, pins in zip(plan.capacities, plan.pinned_by_layer, strict=True)
        ]
        policy = MissPolicy(skips=plan.miss == "skip", cap=plan.cap)
        return cls(
            memory,
            reader,
            layer_numbers=layer_numbers,
            slots=slots,
            policy=policy,
            threads=threads,
        )

    @property
    def slots_by_layer(self) -> Mapping[int, LayerSlots]:
        """The slots of each layer, by its number in the base."""
        return dict(zip(self._layer_numbers, self.slots, strict=True))

    @property
    def skips(self) -> bool:
        """Whether missing experts may be skipped."""
        return self._policy.skips

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and of the transition model."""
        return self._memory.nbytes + self._transitions.nbytes

    @property
    def counters(self) -> Counters:
        """The counters of each layer, up to date; any thread may read them."""
        return self._pass_log.counters

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        """Start to read the choices in a layer that may not be skipped; return whether to `wait`.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        if layer == 0:
            self._memory.unmap_all()  # of a pass that failed
        selected, slots = choices.selected[layer, :tokens], self.slots[layer]
        self._collect_loaded()  # first, so that experts found resident below stay
        self._pass_log.record_request(layer, selected, self._memory.resident_mask(layer))
        different = set(selected.ravel().tolist())
        self._prediction_filter.record_outcome(layer, different)
        if slots.capacity < slots.experts:
            slots.chances = self._transitions.predict(layer, selected)
            self._memory.worths[layer] = slots.worths()
        requested = [(layer, expert) for expert in sorted(different - slots.resident_set)]
        self._protected = frozenset(requested)
        self._missing = (
            self._select_required(layer, choices, tokens, requested) if requested else []
        )
        self._predicted = None
        if predicts_next and self._policy.prefetches and layer + 1 < len(self._layer_numbers):
            self._predicted = layer + 1, choices.likely[layer + 1, :tokens]
        if not self._missing:
            self._loader.drop_wrong_predictions(self._protected)
            self._finish_request()
            return False
        with self._measure_wait():
            self._assign_slots(self._loader.start_reads(self._missing, self._protected))
        self._pass_log.start_compute()
        return True

    def wait_for_some(self) -> bool:
        """Wait for some of the missing experts; return whether others are still missing.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._pass_log.start_wait()
        with self._measure_wait():
            self._assign_slots(self._loader.wait_for_some(self._missing, self._protected))
        if all(expert in self._memory for expert in self._missing):
            self._finish_request()
            return False
        self._pass_log.start_compute()
        return True

    def wait(self) -> None:
        """Wait for all of them, as `wait_for_some` does."""
        while self.wait_for_some():
            pass

    def load(self, layer: int, choices: RoutingChoices, tokens: int) -> None:
        """Request experts, and wait for all of them, as `wait_for_some` does."""
        if self.request(layer, choices, tokens):
            self.wait()

    def end_pass(self, choices: RoutingChoices, tokens: int, *, phase: Phase) -> None:
        """Learn from the choices of all layers of a pass that ended; then slots may change."""
        requested = self._pass_log.end_pass(choices, tokens)
        self._collect_loaded()
        self._memory.unmap_all()
        if requested is None:
            return  # it failed
        self._requests.append(requested)
        if self._can_evict:
            self._transitions.observe_pass(requested, tokens)
        begins = phase is Phase.PROMPT
        if begins:
            self._update_policy = UpdatePolicy()
        self._update_policy.count_tokens(tokens)
        if begins or self._update_policy.is_due():
            self._update()
        if self._has_pending_pins:
            self._assign_pinned()
        if self._warmup_queue:
            self._continue_fill(_PREFETCH_DEPTH)

    def activity(self) -> ExpertActivity:
        """Return requests and reads so far; any thread may call this."""
        loader = self._loader
        return replace(
            self._pass_log.totals,
            loads=loader.loads,
            read_ahead=loader.prefetched,
            read_bytes=loader.read_bytes,
            waited_ms=self._waited_seconds * 1e3,
            mapped=self._page_cache.mapped_requests,
            swaps=self._swaps,
        )

    def report(self) -> RoutedExpertStats:
        """Return `activity`, with how many experts can be in memory."""
        held = ExpertResidency(
            miss="skip" if self.skips else "exact",
            layers=len(self._layer_numbers),
            experts=self._memory.experts,
            slots=sum(layer.capacity for layer in self.slots) // len(self._layer_numbers),
            blocks=self._memory.blocks,
        )
        return RoutedExpertStats(held, self.activity())

    def _update(self) -> None:
        update = plan_updates(
            self.slots, self._requests, layer_budget=self._update_policy.layer_budget
        )
        for swap in update.swaps:
            if self._is_worth_loading((swap.layer, swap.add)):
                self._apply_swap(swap)
        if self._exchange_rate:
            self._swap_by_score(update)
        self._update_policy.record_update(update)

    def fill_slots(self, ranked: Sequence[Sequence[int]]) -> None:
        """Fill all empty slots with the experts ranked first, and the pool with the next ones.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        for layer, slots in enumerate(self.slots):
            wanted = [(layer, expert) for expert in slots.choose_initial_experts(ranked[layer])]
            self._load_all([e for e in wanted if e not in self._memory], frozenset(wanted))
        self._load_all(self._memory.choose_absent(ranked), frozenset())

    def schedule_fill(self, ranked: Sequence[Sequence[int]]) -> None:
        """Fill empty slots during passes, in each layer with the experts ranked first.

        Pinned experts are loaded in any case: they replace others that took the slots first.
        """
        room = [len(slots.free_slots) for slots in self.slots]
        firsts = [[(n, e) for e in order[: room[n]]] for n, order in enumerate(ranked)]
        self._warmup_queue = deque(interleave(firsts))
        self._has_pending_pins = any(slots.pinned for slots in self.slots)
        self._continue_fill(len(self._warmup_queue))

    def set_scores(self, scores: Sequence[ExpertScores], *, rate: float) -> None:
        """Let updates also swap experts for ones with higher scores; a rate of 0 ends that.

        ``rate`` is the share of all residents that an update may swap within its budget.
        """
        self._scores, self._exchange_rate = dict(enumerate(scores)), rate

    @property
    def scores(self) -> Sequence[ExpertScores]:
        """The scores of experts for swaps, by layer."""
        return [self._scores.get(layer, {}) for layer in range(len(self.slots))]

    @property
    def exchange_rate(self) -> float:
        """The share of all residents that a profile may swap in an update."""
        return self._exchange_rate

    def pin(self, experts: Sequence[frozenset[int]]) -> None:
        """Pin these experts of each layer from now on, and load absent ones."""
        for slots, pinned in zip(self.slots, experts, strict=True):
            slots.pin(pinned)
        self._has_pending_pins = True

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, notes for the user about experts that could not be read."""
        return self._loader.take_notes()

    def close(self) -> None:
        """Stop all reads."""
        self._loader.close()

    def check_integrity(self) -> None:
        """Assert the invariants between two passes."""
        kept = [(n, expert) for n, slots in enumerate(self.slots) for expert in slots.resident_ids]
        self._memory.check_integrity(coming=len(self._loader), kept=kept)
        for slots in self.slots:
            slots.check_integrity()

    def _continue_fill(self, count: int) -> None:
        """Read some queued experts; those that gave way to more urgent ones are queued again."""
        first: list[Expert] = []
        while self._warmup_queue and len(first) < count:
            expert = self._warmup_queue.popleft()
            can_come = expert not in self._memory and expert not in self._loader.unread
            if self.slots[expert[0]].free_slots and can_come:
                first.append(expert)
        self._loader.prefetch(first, frozenset())
        self._warmup_queue.extendleft(reversed(first))

    def _is_worth_loading(self, expert: Expert) -> bool:
        """Tell whether a requested expert may get a slot: not if it was read, then evicted."""
        if self.skips or expert in self._memory:
            return True
        return self._page_cache.is_cached(expert)

    def _swap_by_score(self, update: SwapUpdate) -> None:
        """Do the swaps that gain most by scores, within what is left of the budget."""
        found = plan_profile_swaps(
            dict(enumerate(self.slots)), self._scores, rate=self._exchange_rate
        )
        layers = self._update_policy.layer_budget
        for swap in limit_swaps(found, update.swaps, layer_budget=layers):
            self._apply_swap(swap)

    def _assign_pinned(self) -> None:
        """Give slots to pinned experts, as many as an update may swap, and read the next ones."""
        due = plan_pin_swaps(self.slots)
        there = [swap for swap in due if (swap.layer, swap.add) in self._memory]
        for swap in limit_swaps(there, (), layer_budget=len(self.slots)):
            self._apply_swap(swap)
        absent = [(swap.layer, swap.add) for swap in due if swap not in there]
        readable = [expert for expert in absent if expert not in self._loader.unread]
        self._has_pending_pins = bool(there or readable)
        self._loader.prefetch(readable[:_PREFETCH_DEPTH], frozenset())

    def _finish_request(self) -> None:
        """Record that all missing experts arrived, and start to prefetch."""
        self._pass_log.finish_load()
        if self._predicted is not None and not self.slots[self._predicted[0]].has_all:
            self._prefetch_next(*self._predicted, self._protected)

    def _select_required(
        self, layer: int, choices: RoutingChoices, tokens: int, asked: list[Expert]
    ) -> list[Expert]:
        """Return which of the experts without a slot must be read because they are not skipped."""
        self._memory.touch(asked)
        missing = self._page_cache.map_requested(asked)
        if missing and self._policy.skips:
            selected = choices.selected[layer, :tokens]
            there = self.hits(layer)[selected]
            over = find_tokens_over_cap(choices.weights[layer, :tokens], there, self._policy.cap)
            needed = set(_list_experts(layer, selected[over]))
            missing = [expert for expert in missing if expert in needed]
        return missing

    def _load_all(self, missing: Sequence[Expert], protected: frozenset[Expert]) -> None:
        """Read experts and wait for them; protected ones are not evicted."""
        if missing:
            with self._measure_wait():
                self._assign_slots(self._loader.start_reads(missing, protected))
                self._assign_slots(self._loader.finish_reads(missing, protected))

    @contextmanager
    def _measure_wait(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited_seconds += time.perf_counter() - start

    def _prefetch_next(self, layer: int, predicted: Numbers, protected: Iterable[Expert]) -> None:
        """Start to read the predicted choices of a layer, the likeliest first."""
        absent = self._memory.places[layer][predicted] == 0
        if absent.any():
            worth_it = self._prediction_filter.select(layer, predicted, absent)
            missing = self._page_cache.map_cached((layer, expert) for expert in worth_it)
            if missing:
                protected = frozenset(protected).union(_list_experts(layer, predicted))
                self._loader.prefetch(missing, protected, is_prediction=True)

    def _collect_loaded(self) -> None:
        """Take the experts that arrived meanwhile."""
        if len(self._loader):
            self._assign_slots(self._loader.collect())

    def _assign_slots(self, loaded: Iterable[Expert]) -> None:
        """Give each expert that arrived a slot, if its layer has an empty one."""
        for layer, name in loaded:
            slots = self.slots[layer]
            if slots.free_slots and (layer, name) in self._memory:  # it may be evicted already
                slots.assign(slot=slots.free_slots[0], expert=name)
                self._memory.assign_slot((layer, name))
            else:
                self._has_pending_pins |= name in slots.pinned

    def _apply_swap(self, swap: Swap) -> None:
        """Give a slot to another expert if it has a block; else read it for a later swap."""
        expert = (swap.layer, swap.add)
        if expert not in self._memory:
            self._loader.prefetch([expert], frozenset())
            return
        gone = self.slots[swap.layer].assign(slot=swap.slot, expert=swap.add)
        self._memory.assign_slot(expert)
        if gone is not None:
            self._memory.release_slot((swap.layer, gone))
        self._swaps += 1
        self._pass_log.count_swap(self._layer_numbers[swap.layer])


def _list_experts(layer: int, selected: Numbers) -> list[Expert]:
    """Return the experts that are selected in a layer, each once."""
    return [(layer, expert) for expert in sorted(set(selected.ravel().tolist()))]
