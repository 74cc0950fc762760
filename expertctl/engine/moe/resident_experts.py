"""Leaving out experts that are not at hand, without changing the total weight of a token.

Mass is what the router gave: the sum of the weights of a token. The experts that are there take
over the mass of those that are missed, in proportion; where all are missed nothing is left. An
expert that was not asked for never stands in. How much of its mass a token may lose to skipping is
capped: tokens above the cap are to be computed in full.

What passes asked for and which experts were in memory then, kept until it is worth counting.

Counting one pass takes about as long as counting sixteen at once, too long for a token of a small
base. Reading the counts brings them up to date.

The routed experts of a base that is whole in memory: where they are, and what is asked for.

No expert is ever missing. What passes ask for is counted all the same: a run in less memory begins
with it. It is kept until it is worth counting, as in `pass_log`. How long a layer took is unknown,
because all layers are one program.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.cpu.packed_base import PackedBase, make_expert_shape
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.counters import Counters, count_requests_by_layer
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routed_experts import NO_EXPERT, RoutingChoices
from expertctl.engine.moe.stats import ExpertActivity, ExpertResidency, RoutedExpertStats
from expertctl.engine.moe.swap_policy import ExpertScores

Numbers = np.ndarray[Any, Any]
Weights = NDArray[np.float32]
Flags = NDArray[np.bool_]


def redistribute_weights(weights: Weights, hits: NDArray[np.generic]) -> Weights:
    """Return weights [tokens, used] with the mass of what is missed given to what is hit.

    ``effective = w * h * (sum(w) / sum(w * h))``, and zeros where all is missed. Where all is hit
    the weights are unchanged, to the bit.
    """
    given, kept = _split_weights(weights, hits)
    mass, left = given.sum(-1, keepdims=True), kept.sum(-1, keepdims=True)
    return (kept * _safe_divide(mass, left)).astype(np.float32)


def compute_skipped_share(weights: Weights, hits: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return how much of each token's mass is missed: 0 to 1, [tokens]."""
    given, kept = _split_weights(weights, hits)
    return _safe_divide((given - kept).sum(-1), given.sum(-1))


def find_tokens_over_cap(weights: Weights, hits: NDArray[np.generic], max_share: float) -> Flags:
    """Tell which tokens would lose more than the cap, and must be computed in full.

    So must tokens whose weights are not numbers: skipping would hide that.
    """
    return ~(compute_skipped_share(weights, hits) <= max_share)


def sum_skips(
    requests: NDArray[np.integer],
    hits: NDArray[np.generic],
    *,
    router_weight: NDArray[np.floating],
    skipped_weight: NDArray[np.floating],
) -> ExpertActivity:
    """Return the requests, misses and weights of one pass or several.

    ``requests`` [layers, experts] says how often each expert was chosen and ``hits`` which of them
    were in memory then. ``router_weight`` and ``skipped_weight`` [layers, tokens] are the weights
    that the router gave and those that were skipped in the end: a missed expert may be read.
    """
    return ExpertActivity(
        requests=int(np.count_nonzero(requests)),
        misses=int(np.count_nonzero((requests > 0) & (hits == 0))),
        router_weight=float(router_weight.astype(np.float64).sum()),
        skipped_weight=float(skipped_weight.astype(np.float64).sum()),
    )


def _split_weights(
    weights: Weights, hits: NDArray[np.generic]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return all weights and those that are hit; in float64, as one may be tiny beside another."""
    given = weights.astype(np.float64)
    return given, given * hits.astype(np.float64)


def _safe_divide(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quotients, 0 where there is nothing to divide by."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0)


_PASSES_PER_COUNT = 16
"""Passes that are counted together."""
TOKENS_PER_COUNT = 512
"""Passes are also counted once they have read so many tokens: what is kept must not grow."""


@dataclass(slots=True)
class _PassRecord:
    """What is known of a pass, layer by layer."""

    selected: list[Numbers] = field(default_factory=list)
    """[tokens, used] of each layer; of the last it may be fewer tokens."""
    hits: list[Numbers] = field(default_factory=list)
    """Which experts were in memory then, [experts] of each layer."""
    waited_ns: list[int] = field(default_factory=list)
    """Nanoseconds that each layer waited for its experts, with nothing to compute."""
    loaded_at: list[int] = field(default_factory=list)
    """When all experts of each layer were there, and at the end when the pass was over."""
    weights: Numbers | None = None
    skipped: Numbers | None = None
    tokens: int = 0


class PassLog:
    """What one pass after the other asked for. One thread writes; any thread reads the counts."""

    def __init__(self, layer_numbers: Sequence[int], *, experts: int, skips: bool) -> None:
        """Begin without a pass; ``numbers`` are those of routed layers in the base."""
        self._layers, self._experts, self._skips = len(layer_numbers), experts, skips
        self._counters = Counters(layer_numbers, experts=experts)
        self._totals = ExpertActivity()
        self._current = _PassRecord()
        self._finished: list[_PassRecord] = []
        self._lock = threading.Lock()

    @property
    def counters(self) -> Counters:
        """The counters, up to date."""
        self.flush()
        return self._counters

    @property
    def totals(self) -> ExpertActivity:
        """What was missed and left out, up to date."""
        self.flush()
        return self._totals

    def record_request(self, layer: int, selected: Numbers, hits: Numbers) -> None:
        """Note what tokens chose in a layer, and which experts are there; layer 0 begins a pass."""
        now = self._current
        if layer != len(now.selected):  # a pass failed, here or before
            del now.selected[layer:], now.hits[layer:], now.waited_ns[layer:], now.loaded_at[layer:]
        now.selected.append(selected.copy())  # skipped experts are struck out of the original
        now.hits.append(hits.copy())
        now.waited_ns.append(-time.perf_counter_ns())

    def start_compute(self) -> None:
        """Note that missing experts are being read, and there is something to compute."""
        self._current.waited_ns[-1] += time.perf_counter_ns()

    def start_wait(self) -> None:
        """Note that there is nothing left to compute until they come."""
        self._current.waited_ns[-1] -= time.perf_counter_ns()

    def finish_load(self) -> None:
        """Note that all experts that were asked for are there."""
        now = time.perf_counter_ns()
        self._current.waited_ns[-1] += now
        self._current.loaded_at.append(now)

    def end_pass(self, choices: RoutingChoices, tokens: int) -> list[Numbers] | None:
        """Note that the pass is over; return what it asked for, None if not all layers did."""
        now, self._current = self._current, _PassRecord()
        if len(now.loaded_at) < self._layers:
            return None
        now.loaded_at.append(time.perf_counter_ns())
        now.tokens = tokens
        now.weights = choices.weights[:, :tokens].copy()
        if self._skips:
            now.skipped = choices.skipped[:, :tokens].copy()
        with self._lock:
            self._finished.append(now)
            kept = sum(each.tokens for each in self._finished)
        if len(self._finished) >= _PASSES_PER_COUNT or kept >= TOKENS_PER_COUNT:
            self.flush()
        return now.selected

    def count_swap(self, number: int) -> None:
        """Count that an expert took the slot of another, in a layer of the base."""
        self._counters.count_swaps(number, 1)

    def flush(self) -> None:
        """Count what is not counted yet."""
        with self._lock:
            over, self._finished = self._finished, []
            for _, alike in groupby(over, key=lambda each: each.tokens):
                for some in _split_passes(list(alike)):
                    self._count(some)

    def _count(self, passes: Sequence[_PassRecord]) -> None:
        """Count passes that read the same number of tokens."""
        layers = len(passes) * self._layers
        asked = [_pad_selected(ids, passes[0].tokens) for each in passes for ids in each.selected]
        requests = count_requests_by_layer(np.array(asked), self._experts)
        hits = np.array([each.hits for each in passes]).reshape(layers, -1)
        shape = (len(passes), self._layers, self._experts)
        waited = np.array([each.waited_ns for each in passes])
        computed = np.diff(np.array([each.loaded_at for each in passes]))
        computed[:, :-1] -= waited[:, 1:]
        self._counters.count_passes(
            requests.reshape(shape),
            hits.astype(np.int64).reshape(shape) - 1,
            hot_ns=computed.sum(0),
            cold_ns=waited.sum(0),
        )
        mass = np.array([each.weights for each in passes]).sum(-1).reshape(layers, -1)
        skipped = np.zeros_like(mass)
        if self._skips:
            skipped = np.array([each.skipped for each in passes]).reshape(layers, -1)
            mass = np.where(mass > 0, mass, skipped)  # experts that stay took over all the mass
        self._totals += sum_skips(requests, hits, router_weight=mass, skipped_weight=skipped)


def _pad_selected(ids: Numbers, tokens: int) -> Numbers:
    """Return what so many tokens asked for; `NO_EXPERT` for those that did not ask."""
    found = np.full(tokens * ids.shape[1], NO_EXPERT)
    found[: ids.size] = ids.ravel()
    return found


def _split_passes(passes: list[_PassRecord]) -> Iterator[list[_PassRecord]]:
    """Cut passes into groups that are each counted together in little memory."""
    some = max(1, TOKENS_PER_COUNT // passes[0].tokens)
    for first in range(0, len(passes), some):
        yield passes[first : first + some]


PASSES_PER_COUNT = 64
"""Passes that are counted together: only what they asked for is kept of them."""


class ResidentExperts:
    """All experts are in memory and stay there. One thread asks; any thread reads the counts."""

    is_whole, skips = True, False
    slots: tuple[LayerSlots, ...] = ()
    scores: Sequence[ExpertScores] = ()
    exchange_rate = 0.0

    def __init__(
        self,
        shape: ExpertShape,
        blocks: Mapping[tuple[int, int], Numbers],
        layer_numbers: Sequence[int],
    ) -> None:
        """Take the block of each expert, by layer and number, and keep it alive.

        ``numbers`` are those of routed layers in the base.
        """
        self.shape = shape
        by_layer: dict[int, list[int]] = {}
        for (layer, _), block in sorted(blocks.items(), key=lambda item: item[0]):
            by_layer.setdefault(layer, []).append(block.ctypes.data)
        self._kept, self._places = blocks, np.array(list(by_layer.values()), np.int64)
        self._hits = np.ones(self._places.shape, np.float32)
        self._counters = Counters(layer_numbers, experts=self._places.shape[1])
        self._uncounted: list[Numbers] = []
        """What passes asked for that is not counted yet, [layers, tokens, used] each."""
        self._tokens = 0
        self._lock = threading.Lock()

    @property
    def counters(self) -> Counters:
        """What its layers were asked for until now, up to date."""
        self._flush()
        return self._counters

    def report(self) -> RoutedExpertStats:
        """Return what was asked for until now."""
        layers, experts = self._places.shape
        residence = ExpertResidency(
            layers=layers, experts=experts, slots=experts, blocks=layers * experts
        )
        activity = ExpertActivity(requests=self.counters.cumulative_snapshot().summary.requests)
        return RoutedExpertStats(residence, activity)

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, int64 [experts]."""
        row: Numbers = self._places[layer]
        return row

    def hits(self, layer: int) -> Numbers:
        """Return ones, float32 [experts]."""
        row: Numbers = self._hits[layer]
        return row

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        """Return False: all are there."""
        return False

    def wait_for_some(self) -> bool:
        """Return False: all are there."""
        return False

    def end_pass(self, choices: RoutingChoices, tokens: int, *, phase: Phase) -> None:
        """Note what was chosen in all layers of a pass that is over."""
        with self._lock:
            self._uncounted.append(choices.selected[:, :tokens].copy())
            self._tokens += tokens
        if len(self._uncounted) >= PASSES_PER_COUNT or self._tokens >= TOKENS_PER_COUNT:
            self._flush()

    def set_scores(self, scores: Sequence[ExpertScores], *, rate: float) -> None:
        """Do nothing: no expert has to go for another."""

    def take_notes(self) -> tuple[str, ...]:
        """Return nothing: no expert is to come."""
        return ()

    def _flush(self) -> None:
        with self._lock:
            over, self._uncounted, self._tokens = self._uncounted, [], 0
            for _, alike in groupby(over, key=lambda asked: asked.shape):
                self._count(np.stack(list(alike)))

    def _count(self, asked: Numbers) -> None:
        """Count passes that read the same number of tokens, [passes, layers, tokens, used]."""
        passes, layers, tokens, used = asked.shape
        experts = self._places.shape[1]
        if tokens == 1:  # which asks for each expert once
            ids = asked.transpose(1, 0, 2, 3).reshape(layers, passes * used)
            chosen = count_requests_by_layer(ids, experts)
            different = chosen.sum(-1)
        else:
            each = count_requests_by_layer(asked.reshape(passes * layers, tokens * used), experts)
            by_pass = each.reshape(passes, layers, experts)
            chosen, different = by_pass.sum(0), np.count_nonzero(by_pass, axis=-1).sum(0)
        self._counters.count_hits(chosen, calls=passes, requests=different)


def make_resident_experts(base: PackedBase) -> ResidentExperts | None:
    """Return the experts of a base that holds all of them, if it has any."""
    routed = base.config.experts
    if routed is None:
        return None
    return ResidentExperts(make_expert_shape(base.config, base.scheme), base.experts, routed.layers)
