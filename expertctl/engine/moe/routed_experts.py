"""The routed experts of a base as a decoder sees them, and the choices of its passes.

`RoutedExperts` owns the experts of all layers; `ExpertCache` is the one where some may be missing.
`RoutingChoices` holds the choices of the tokens of one pass, layer by layer.

`redistribute_weights` and its neighbours skip missing experts without changing the total weight of
a token: the experts that are in memory take over the weight of the missing ones, in proportion; if
all are missing nothing is left. An expert that was not chosen never stands in. The share of weight
that a token may lose is capped: tokens above the cap are computed in full.

`PassLog` keeps the choices of passes, and which experts were in memory, until it is worth counting
them: counting one pass takes about as long as counting sixteen at once, too long for a token of a
small base. Reading the counts flushes them.

`ResidentExperts` serves a base without missing experts. Its choices are counted all the same,
because a run in less memory starts with them. The time of a layer is unknown, because all layers
are one program.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.cpu.packed_base import PackedBase, make_expert_shape
from expertctl.engine.kernels.moe_layer import NO_EXPERT
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.counters import (
    Counters,
    ExpertActivity,
    ExpertResidency,
    Phase,
    RoutedExpertStats,
    count_requests_by_layer,
)
from expertctl.package.architectures import ExpertsConfig

Numbers = np.ndarray[Any, Any]
Weights = NDArray[np.float32]
Flags = NDArray[np.bool_]


class RoutingChoices:
    """The choices of the tokens of one pass; layers are routed ones, counted from 0.

    They stay until the next pass, so that they can be counted.
    """

    def __init__(self, routed: ExpertsConfig, *, tokens: int) -> None:
        """Allocate host memory for ``tokens`` tokens."""
        shape = len(routed.layers), tokens, routed.used
        self.tokens = tokens
        self.selected = aligned_zeros(shape, np.int64)
        """The experts of each token, int64 [layers, tokens, used]; `NO_EXPERT` if it chose none."""
        self.weights = aligned_zeros(shape, np.float32)
        """Their weights, float32 [layers, tokens, used]."""
        self.skipped = aligned_zeros(shape[:2], np.float32)
        """The weight of a token that was skipped, float32 [layers, tokens]."""
        self.likely = aligned_zeros(shape, np.int64)
        """Choices of a layer as predicted by the one before it; unused for the first."""

    def mask_last_layer(self, first: int, tokens: int) -> None:
        """Remove the choices of tokens from ``first`` up to ``tokens`` in the last layer."""
        self.selected[-1, first:tokens] = NO_EXPERT
        self.weights[-1, first:tokens] = 0
        self.skipped[-1, first:tokens] = 0


class RoutedExperts:
    """The experts of all layers as programs see them; in this class none is ever missing.

    One pass at a time uses it. Programs read the tables at each run, so their addresses never
    change.
    """

    is_whole = True
    """Whether no expert is ever missing."""

    def __init__(self, shape: ExpertShape, places: Numbers, hits: Numbers) -> None:
        """Keep the tables [layers, experts]: addresses int64, and float32 1 for residents."""
        self.shape = shape
        """The contents of the block of an expert."""
        self._places, self._hits = places, hits

    @property
    def skips(self) -> bool:
        """Whether missing experts may be skipped."""
        return False

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, int64 [experts]; 0 if missing."""
        row: Numbers = self._places[layer]
        return row

    def hits(self, layer: int) -> Numbers:
        """Return float32 [experts], 1 for resident experts and 0 for missing ones."""
        row: Numbers = self._hits[layer]
        return row

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        """Request the choices of tokens in a layer; return whether to wait for experts.

        Meanwhile those that have an address may be computed. ``predicts_next``: the choices have a
        prediction for the next layer. The last layer may be requested for fewer tokens than others.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        return False

    def wait_for_some(self) -> bool:
        """Wait for some of the requested experts; return whether others are still missing.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        return False

    def end_pass(self, choices: RoutingChoices, tokens: int, *, phase: Phase) -> None:
        """Learn from the choices of all layers of a pass that ended; here, do nothing."""


def redistribute_weights(weights: Weights, hits: NDArray[np.generic]) -> Weights:
    """Return weights [tokens, used] with the weight of misses given to the hits.

    ``effective = w * h * (sum(w) / sum(w * h))``, and zeros if all are missed. If all are hits, the
    result is bit-identical to ``weights``.
    """
    given, kept = _split_weights(weights, hits)
    total, left = given.sum(-1, keepdims=True), kept.sum(-1, keepdims=True)
    return (kept * _safe_divide(total, left)).astype(np.float32)


def compute_skipped_share(weights: Weights, hits: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the share of each token's weight that is missed: 0 to 1, [tokens]."""
    given, kept = _split_weights(weights, hits)
    return _safe_divide((given - kept).sum(-1), given.sum(-1))


def find_tokens_over_cap(weights: Weights, hits: NDArray[np.generic], max_share: float) -> Flags:
    """Return a mask of tokens that would lose more than the cap: they are computed in full.

    So are tokens whose weights are not numbers, which skipping would hide.
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
    """Return all weights and those of hits, in float64, because weights may differ widely."""
    given = weights.astype(np.float64)
    return given, given * hits.astype(np.float64)


def _safe_divide(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quotients, 0 where the divisor is 0."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0)


_PASSES_PER_FLUSH = 16
"""Passes that `PassLog` counts together."""
TOKENS_PER_COUNT = 512
"""Passes are also counted after this many tokens, to bound what is kept."""


@dataclass(slots=True)
class _PassRecord:
    """What is known of a pass, by layer."""

    selected: list[Numbers] = field(default_factory=list)
    """[tokens, used] of each layer; the last may have fewer tokens."""
    hits: list[Numbers] = field(default_factory=list)
    """Which experts were in memory then, [experts] of each layer."""
    waited_ns: list[int] = field(default_factory=list)
    """Nanoseconds that each layer waited for its experts, with nothing to compute."""
    loaded_at: list[int] = field(default_factory=list)
    """When all experts of each layer were in memory, and finally when the pass ended."""
    weights: Numbers | None = None
    skipped: Numbers | None = None
    tokens: int = 0


class PassLog:
    """The choices of one pass after the other. One thread writes; any thread reads the counts."""

    def __init__(self, layer_numbers: Sequence[int], *, experts: int, skips: bool) -> None:
        """Start without a pass; ``layer_numbers`` are those of routed layers in the base."""
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
        """Misses and skipped weights, up to date."""
        self.flush()
        return self._totals

    def record_request(self, layer: int, selected: Numbers, hits: Numbers) -> None:
        """Record the choices in a layer, and the experts in memory; layer 0 starts a pass."""
        now = self._current
        if layer != len(now.selected):  # a pass failed, here or before
            del now.selected[layer:], now.hits[layer:], now.waited_ns[layer:], now.loaded_at[layer:]
        now.selected.append(selected.copy())  # skipped experts are removed from the original
        now.hits.append(hits.copy())
        now.waited_ns.append(-time.perf_counter_ns())

    def start_compute(self) -> None:
        """Record that missing experts are being read while others are computed."""
        self._current.waited_ns[-1] += time.perf_counter_ns()

    def start_wait(self) -> None:
        """Record that there is nothing left to compute until they arrive."""
        self._current.waited_ns[-1] -= time.perf_counter_ns()

    def finish_load(self) -> None:
        """Record that all chosen experts are in memory."""
        now = time.perf_counter_ns()
        self._current.waited_ns[-1] += now
        self._current.loaded_at.append(now)

    def end_pass(self, choices: RoutingChoices, tokens: int) -> list[Numbers] | None:
        """Record the end of the pass; return its choices, None unless all layers made some."""
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
        if len(self._finished) >= _PASSES_PER_FLUSH or kept >= TOKENS_PER_COUNT:
            self.flush()
        return now.selected

    def count_swap(self, number: int) -> None:
        """Count that an expert took the slot of another, in a layer of the base."""
        self._counters.count_swaps(number, 1)

    def flush(self) -> None:
        """Count the passes that are not counted yet."""
        with self._lock:
            over, self._finished = self._finished, []
            for _, alike in groupby(over, key=lambda each: each.tokens):
                for some in _split_passes(list(alike)):
                    self._count(some)

    def _count(self, passes: Sequence[_PassRecord]) -> None:
        """Count passes that read the same number of tokens."""
        layers = len(passes) * self._layers
        padded = [_pad_selected(ids, passes[0].tokens) for each in passes for ids in each.selected]
        requests = count_requests_by_layer(np.array(padded), self._experts)
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
        total = np.array([each.weights for each in passes]).sum(-1).reshape(layers, -1)
        skipped = np.zeros_like(total)
        if self._skips:
            skipped = np.array([each.skipped for each in passes]).reshape(layers, -1)
            total = np.where(total > 0, total, skipped)  # other experts took over the whole weight
        self._totals += sum_skips(requests, hits, router_weight=total, skipped_weight=skipped)


def _pad_selected(ids: Numbers, tokens: int) -> Numbers:
    """Return the choices of ``tokens`` tokens, flat; `NO_EXPERT` for tokens without any."""
    found = np.full(tokens * ids.shape[1], NO_EXPERT)
    found[: ids.size] = ids.ravel()
    return found


def _split_passes(passes: list[_PassRecord]) -> Iterator[list[_PassRecord]]:
    """Split passes into groups that are each counted together in little memory."""
    some = max(1, TOKENS_PER_COUNT // passes[0].tokens)
    for first in range(0, len(passes), some):
        yield passes[first : first + some]


PASSES_PER_COUNT = 64
"""Passes that `ResidentExperts` counts together: only their choices are kept."""


class ResidentExperts(RoutedExperts):
    """All experts of a base, in memory. One thread uses it; any thread reads the counts."""

    def __init__(
        self,
        shape: ExpertShape,
        blocks: Mapping[tuple[int, int], Numbers],
        layer_numbers: Sequence[int],
    ) -> None:
        """Keep the block of each expert, by layer and number, alive.

        ``layer_numbers`` are the numbers of routed layers in the base.
        """
        by_layer: dict[int, list[int]] = {}
        for (layer, _), block in sorted(blocks.items(), key=lambda item: item[0]):
            by_layer.setdefault(layer, []).append(block.ctypes.data)
        places = np.array(list(by_layer.values()), np.int64)
        super().__init__(shape, places, np.ones(places.shape, np.float32))
        self._kept = blocks
        self._counters = Counters(layer_numbers, experts=self._places.shape[1])
        self._uncounted: list[Numbers] = []
        """Choices of passes that are not counted yet, [layers, tokens, used] each."""
        self._tokens = 0
        self._lock = threading.Lock()

    @property
    def counters(self) -> Counters:
        """The counters, up to date."""
        self._flush()
        return self._counters

    def report(self) -> RoutedExpertStats:
        """Return the requests so far."""
        requests = self.counters.cumulative_snapshot().summary.requests
        residency = ExpertResidency.whole(*self._places.shape)
        return RoutedExpertStats(residency, ExpertActivity(requests=requests))

    def end_pass(self, choices: RoutingChoices, tokens: int, *, phase: Phase) -> None:
        """Record the choices of all layers of a pass that ended."""
        with self._lock:
            self._uncounted.append(choices.selected[:, :tokens].copy())
            self._tokens += tokens
        if len(self._uncounted) >= PASSES_PER_COUNT or self._tokens >= TOKENS_PER_COUNT:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            over, self._uncounted, self._tokens = self._uncounted, [], 0
            for _, alike in groupby(over, key=lambda asked: asked.shape):
                self._count(np.stack(list(alike)))

    def _count(self, asked: Numbers) -> None:
        """Count passes with the same number of tokens, [passes, layers, tokens, used]."""
        passes, layers, tokens, used = asked.shape
        experts = self._places.shape[1]
        if tokens == 1:  # which chooses each expert once
            ids = asked.transpose(1, 0, 2, 3).reshape(layers, passes * used)
            chosen = count_requests_by_layer(ids, experts)
            different = chosen.sum(-1)
        else:
            each = count_requests_by_layer(asked.reshape(passes * layers, tokens * used), experts)
            by_pass = each.reshape(passes, layers, experts)
            chosen, different = by_pass.sum(0), np.count_nonzero(by_pass, axis=-1).sum(0)
        self._counters.count_hits(chosen, calls=passes, requests=different)


def make_resident_experts(base: PackedBase) -> ResidentExperts | None:
    """Return the routed experts of a base that is in memory as a whole, if it has any."""
    routed = base.config.experts
    if routed is None:
        return None
    return ResidentExperts(make_expert_shape(base.config, base.scheme), base.experts, routed.layers)
