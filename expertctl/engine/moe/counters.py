"""Counters of each routed layer, and the statistics of routed experts in a result.

`Counters` counts calls, routed slots, requests, swaps and times by layer. All are unsigned 64-bit
integers. An overflow resets all of them, so their ratios never mix counters that were reset with
others; sums over layers saturate. The number of overflows is reported. Experts and layers that do
not exist are ignored: a wrong count is no reason to fail a request.

There are two independent views. The *observed* counts start at the last reset, in the requested
mode, which may be off. The *cumulative* counts, from which the usage profile is learnt, never fall,
unless a counter overflowed.

`RoutedExpertStats` is the ``moe`` object of a result: how many experts can be in memory, and what
was requested and read during the request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import Lock
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expertctl.engine_config import MoeCold, MoeMiss
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject

MAX_COUNTER = 2**64 - 1
_MS_PER_NS = 1e-6
_COUNTER_NAMES = (
    "calls",
    "hits",
    "misses",
    "requests",
    "missed_requests",
    "swaps",
    "hot_ns",
    "cold_ns",
)

CounterMode = Literal["full", "update", "off"]
"""Which counters to report: all, those that swapping experts needs, or none."""
Counts = NDArray[np.int64]
_Totals = NDArray[np.uint64]


class Phase(StrEnum):
    """Whether a pass reads a prompt or generates; also for each part of a prompt that is cut."""

    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """The counters of one layer, or their sums."""

    calls: int
    hits: int
    """Routed slots whose expert was in memory, in a hot lane."""
    misses: int
    """Routed slots whose expert was not: it was read, mapped or skipped."""
    requests: int
    """Experts that were chosen, each counted once per call."""
    missed_requests: int
    swaps: int
    hot_ns: int
    """Time to compute the experts, and everything until those of the next layer are chosen."""
    cold_ns: int
    """Time spent waiting for missing experts."""

    @property
    def fallback_rate(self) -> float:
        """The share of requests that were missed, 0 to 1."""
        return _divide(self.missed_requests, self.requests)

    @property
    def hot_slot_ratio(self) -> float:
        """The share of routed slots that were hot, 0 to 1."""
        return _divide(self.hits, self.hits + self.misses)

    def since(self, before: "LayerCounts") -> "LayerCounts":
        """Return the difference to an earlier state."""
        return LayerCounts(
            **{name: getattr(self, name) - getattr(before, name) for name in _COUNTER_NAMES}
        )

    def to_json(self) -> JsonObject:
        """Return the counters as a JSON object, times in milliseconds."""
        return {
            "calls": self.calls,
            "hits": self.hits,
            "misses": self.misses,
            "requests": self.requests,
            "missed_requests": self.missed_requests,
            "fallback_rate": self.fallback_rate,
            "hot_slot_ratio": self.hot_slot_ratio,
            "swaps": self.swaps,
            "hot_ms": self.hot_ns * _MS_PER_NS,
            "cold_ms": self.cold_ns * _MS_PER_NS,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CounterSnapshot:
    """A consistent copy of all counters."""

    mode: CounterMode
    passes: int
    """Number of passes that were counted."""
    overflow_resets: int
    """How often a counter overflowed, which resets all of them."""
    layers: Mapping[int, LayerCounts]
    """By the number of the layer in the base."""
    expert_counts: NDArray[np.uint64]
    """How often each expert was chosen, [layers, 2, experts]: hot, and cold."""

    @property
    def summary(self) -> LayerCounts:
        """The sums over layers, which saturate."""
        layers = self.layers.values()
        return LayerCounts(
            **{
                name: min(sum(getattr(layer, name) for layer in layers), MAX_COUNTER)
                for name in _COUNTER_NAMES
            }
        )


def count_requests_by_layer(selected: NDArray[np.integer], experts: int) -> Counts:
    """Return how often each expert was chosen, int64 [layers, experts].

    ``selected`` is [layers, ...]; ids that do not exist are ignored.
    """
    layers = len(selected)
    ids = selected.reshape(layers, -1)
    places = ids + np.arange(layers)[:, None] * experts
    chosen = np.bincount(places[(ids >= 0) & (ids < experts)], minlength=layers * experts)
    return chosen.reshape(layers, experts)


@dataclass(slots=True)
class _CounterArrays:
    """Counters [layers, counters], and counts of experts [layers, 2, experts]: hot, and cold."""

    totals: _Totals
    experts: _Totals
    passes: int = 0

    @classmethod
    def zeros(cls, layers: int, experts: int) -> "_CounterArrays":
        counters = np.zeros((layers, len(_COUNTER_NAMES)), np.uint64)
        return cls(counters, np.zeros((layers, 2, experts), np.uint64))

    def copy(self) -> "_CounterArrays":
        return replace(self, totals=self.totals.copy(), experts=self.experts.copy())

    def since(self, before: "_CounterArrays") -> "_CounterArrays":
        return _CounterArrays(
            self.totals - before.totals, self.experts - before.experts, self.passes - before.passes
        )

    def clear(self) -> None:
        self.totals[...] = 0
        self.experts[...] = 0
        self.passes = 0


class Counters:
    """The counters of a base. One thread counts; any thread reads."""

    def __init__(self, layers: Sequence[int], *, experts: int) -> None:
        """Create counters for the routed layers with these numbers."""
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._cumulative = _CounterArrays.zeros(len(layers), experts)
        self._baseline = self._cumulative.copy()
        """The cumulative counts at the last reset of the observed ones."""
        self._overflows = 0
        self._mode: CounterMode = "full"
        self._lock = Lock()

    def count_passes(
        self,
        requests: Counts,
        lanes: Counts,
        *,
        hot_ns: Counts | int = 0,
        cold_ns: Counts | int = 0,
    ) -> None:
        """Count one call of each layer in each of several passes.

        ``requests`` says how often each expert was chosen, ``lanes`` the number of its hot lane, or
        -1; both are [passes, layers, experts]. Times are sums, [layers].
        """
        cold = np.where(lanes < 0, requests, 0)
        missed = cold.sum(0)
        chosen = requests.sum(0) - missed, missed
        hits, misses = (each.sum(-1) for each in chosen)
        values = {
            "calls": len(requests),
            "hits": hits,
            "misses": misses,
            "requests": np.count_nonzero(requests, axis=-1).sum(0),
            "missed_requests": np.count_nonzero(cold, axis=-1).sum(0),
            "hot_ns": hot_ns,
            "cold_ns": cold_ns,
        }
        self._add(slice(None), values, chosen, passes=len(requests))

    def count_hits(self, chosen: Counts, *, calls: int, requests: Counts) -> None:
        """Count several calls of each layer in which no expert was missing.

        ``chosen`` says how often each expert was chosen, [layers, experts]; ``requests`` is the
        number of different experts of each call, summed, [layers].
        """
        values = {"calls": calls, "hits": chosen.sum(-1), "requests": requests}
        self._add(slice(None), values, (chosen, 0), passes=calls)

    def count_swaps(self, layer: int, swaps: int) -> None:
        """Count experts of a layer that took the slot of another; unknown layers are ignored."""
        row = self._rows.get(layer)
        if row is not None:
            self._add(slice(row, row + 1), {"swaps": swaps})

    def reset(self) -> None:
        """Reset the observed counts; the number of overflows stays."""
        self.configure(reset=True)

    def configure(self, *, mode: CounterMode | None = None, reset: bool = False) -> CounterSnapshot:
        """Set the mode, or reset the observed counts; return them.

        Changing the mode also resets; setting the current mode does not.
        """
        with self._lock:
            if reset or mode not in {None, self._mode}:
                self._baseline = self._cumulative.copy()
            self._mode = mode or self._mode
            return self._make_snapshot(self._since_baseline(), self._mode)

    def observed_snapshot(self) -> CounterSnapshot:
        """Return the counts since the last reset."""
        with self._lock:
            return self._make_snapshot(self._since_baseline(), self._mode)

    def cumulative_snapshot(self) -> CounterSnapshot:
        """Return the counts since the start, whatever the mode.

        If ``overflow_resets`` has grown, they are the counts since the last overflow.
        """
        with self._lock:
            return self._make_snapshot(self._cumulative.copy(), "full")

    def check_integrity(self) -> None:
        """Assert that the counters agree with one another, if nothing overflowed."""
        for tally in (self._cumulative, self._baseline):
            hits, misses = (
                tally.totals[:, _COUNTER_NAMES.index(name)] for name in ("hits", "misses")
            )
            assert (tally.experts.sum(-1) == np.stack((hits, misses), 1)).all()
        assert (self._baseline.totals <= self._cumulative.totals).all()
        assert (self._baseline.experts <= self._cumulative.experts).all()

    def _add(
        self,
        rows: slice,
        values: Mapping[str, Counts | int],
        chosen: tuple[Counts, Counts | int] | None = None,
        *,
        passes: int = 0,
    ) -> None:
        totals = self._cumulative.totals[rows]
        amounts = np.zeros_like(totals)
        for name, value in values.items():
            amounts[:, _COUNTER_NAMES.index(name)] = value
        with self._lock:
            if (amounts > MAX_COUNTER - totals).any():
                self._overflows = min(self._overflows + 1, MAX_COUNTER)
                self._cumulative.clear()
                self._baseline.clear()
                return
            totals += amounts
            if chosen is not None:  # none of them is above the hits or misses of its layer
                for lane, counts in enumerate(chosen):
                    self._cumulative.experts[rows, lane] += np.asarray(counts).astype(np.uint64)
            self._cumulative.passes = min(self._cumulative.passes + passes, MAX_COUNTER)

    def _since_baseline(self) -> _CounterArrays:
        """Return the observed counts; zeros while the mode is off."""
        return self._cumulative.since(self._cumulative if self._mode == "off" else self._baseline)

    def _make_snapshot(self, tally: _CounterArrays, mode: CounterMode) -> CounterSnapshot:
        return CounterSnapshot(
            mode=mode,
            passes=tally.passes,
            overflow_resets=self._overflows,
            layers={layer: _layer_counts(tally, row) for layer, row in self._rows.items()},
            expert_counts=tally.experts,
        )


def _layer_counts(tally: _CounterArrays, row: int) -> LayerCounts:
    return LayerCounts(**dict(zip(_COUNTER_NAMES, tally.totals[row].tolist(), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertResidency:
    """How many routed experts a base has, and how many can be in memory."""

    miss: MoeMiss = "exact"
    layers: int
    experts: int
    """Of each layer."""
    slots: int
    """Of each layer: how many are kept; the mean if layers differ."""
    blocks: int
    """How many experts can be in memory, in all layers."""
    cold: MoeCold = "read"
    """How the other experts are read from disk."""

    @classmethod
    def whole(cls, layers: int, experts: int) -> "ExpertResidency":
        """Return the residency of a base whose routed experts are all in memory."""
        return cls(layers=layers, experts=experts, slots=experts, blocks=layers * experts)

    @property
    def total(self) -> int:
        """The number of experts in all layers."""
        return self.layers * self.experts

    @property
    def is_whole(self) -> bool:
        """Whether each expert has a slot; if not, one may be missing even if all fit."""
        return self.slots >= self.experts

    def to_json(self) -> JsonObject:
        """Return the fields of the ``moe`` object."""
        return {
            "miss": self.miss,
            "layers": self.layers,
            "experts": self.experts,
            "slots": self.slots,
            "in_memory": self.blocks,
            "cold": self.cold,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivity:
    """Requests and reads since a model was loaded; all values only grow."""

    requests: int = 0
    """Experts that passes chose, each once per pass and layer."""
    misses: int = 0
    """Requests whose expert was not in memory."""
    loads: int = 0
    """Experts that were read from files."""
    read_ahead: int = 0
    """Loads that started before the expert was chosen."""
    read_bytes: int = 0
    waited_ms: float = 0.0
    """How long passes waited for experts."""
    mapped: int = 0
    """Experts that were chosen and computed in the page cache of their copy."""
    swaps: int = 0
    """Slots that were given to another expert."""
    router_weight: float = 0.0
    """Sum of the weights that routers gave."""
    skipped_weight: float = 0.0
    """The part of it that was skipped."""

    def __add__(self, other: "ExpertActivity") -> "ExpertActivity":
        """Return the sums."""
        names = self.__dataclass_fields__
        return ExpertActivity(
            **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    def since(self, before: "ExpertActivity") -> "ExpertActivity":
        """Return the difference to an earlier state."""
        names = self.__dataclass_fields__
        return ExpertActivity(
            **{name: getattr(self, name) - getattr(before, name) for name in names}
        )


@dataclass(frozen=True, slots=True)
class RoutedExpertStats:
    """Residency and activity for one request."""

    residence: ExpertResidency
    activity: ExpertActivity

    @property
    def fallback_rate(self) -> float:
        """Misses by requests; 0 without requests."""
        return _divide(self.activity.misses, self.activity.requests)

    @property
    def skipped_share(self) -> float:
        """The share of router weight that was skipped, 0 to 1."""
        return _divide(self.activity.skipped_weight, self.activity.router_weight)

    def combine(self, later: "RoutedExpertStats") -> "RoutedExpertStats":
        """Return the activity of both, with the later residency."""
        return RoutedExpertStats(later.residence, self.activity + later.activity)

    def since(self, before: "RoutedExpertStats") -> "RoutedExpertStats":
        """Return the activity since an earlier report."""
        return RoutedExpertStats(self.residence, self.activity.since(before.activity))

    def to_json(self) -> JsonObject:
        """Return the ``moe`` object; shares are 0 without requests."""
        activity = self.activity
        return {
            **self.residence.to_json(),
            "requests": activity.requests,
            "misses": activity.misses,
            "fallback_rate": round(self.fallback_rate, 6),
            "skipped_mass": round(self.skipped_share, 6),
            "loads": activity.loads,
            "read_ahead": activity.read_ahead,
            "bytes_read": activity.read_bytes,
            "waited_ms": round(activity.waited_ms, 3),
            "swaps": activity.swaps,
            "lent": activity.mapped,
        }


NO_ACTIVITY = ExpertActivity()


def make_resident_stats(config: ModelConfig) -> RoutedExpertStats | None:
    """Return the statistics of a base in memory as a whole; None without routed experts."""
    routed = config.experts
    if routed is None:
        return None
    residency = ExpertResidency.whole(len(routed.layers), routed.count)
    return RoutedExpertStats(residency, NO_ACTIVITY)


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
