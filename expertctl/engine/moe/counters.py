"""What the lanes of each layer did: calls, routed slots, requests, swaps and times.

All are unsigned numbers of 64 bits. What would go over sets all of them to zero, so that their
ratios never mix what was cut off with what was not; sums over layers saturate. The shape stays, and
how often that happened is told. An expert or a layer that does not exist is ignored: to count
wrongly is no reason to end a text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from expertctl.schema.strict_json import JsonObject

MOST = 2**64 - 1
_NANOSECONDS = 1e-6
"""In milliseconds."""
_COUNTED = ("calls", "hits", "misses", "requests", "missed_requests", "swaps", "hot_ns", "cold_ns")

Counts = NDArray[np.int64]
_Totals = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """The counters of one layer, or their sums."""

    calls: int
    hits: int
    """Routed slots whose expert was in a hot lane."""
    misses: int
    requests: int
    """Experts that were asked for, each once for a call."""
    missed_requests: int
    swaps: int
    hot_ns: int
    cold_ns: int

    @property
    def fallback_rate(self) -> float:
        """How many of the experts that calls asked for were missed, 0 to 1."""
        return self.missed_requests / self.requests if self.requests else 0.0

    @property
    def hot_slot_ratio(self) -> float:
        """How many routed slots were hot, 0 to 1."""
        slots = self.hits + self.misses
        return self.hits / slots if slots else 0.0

    def to_json(self) -> JsonObject:
        """Return them as a document, times in milliseconds."""
        return {
            "calls": self.calls,
            "hits": self.hits,
            "misses": self.misses,
            "requests": self.requests,
            "missed_requests": self.missed_requests,
            "fallback_rate": self.fallback_rate,
            "hot_slot_ratio": self.hot_slot_ratio,
            "swaps": self.swaps,
            "hot_ms": self.hot_ns * _NANOSECONDS,
            "cold_ms": self.cold_ns * _NANOSECONDS,
        }


def requested(selected: NDArray[np.integer], experts: int) -> Counts:
    """Return how often each expert was chosen, [experts]; ids that do not exist are ignored."""
    return requested_by_layer(selected[None], experts).reshape(experts)


def requested_by_layer(selected: NDArray[np.integer], experts: int) -> Counts:
    """Return the same of several layers, [layers, experts]; ``selected`` is [layers, ...]."""
    layers = len(selected)
    ids = selected.reshape(layers, -1)
    places = ids + np.arange(layers)[:, None] * experts
    chosen = np.bincount(places[(ids >= 0) & (ids < experts)], minlength=layers * experts)
    return chosen.reshape(layers, experts)


class Counters:
    """The counters of a base. One thread counts; any thread reads."""

    def __init__(self, layers: Sequence[int], *, experts: int) -> None:
        """Begin with nothing counted; ``layers``: the numbers of those with routed experts."""
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._totals: _Totals = np.zeros((len(layers), len(_COUNTED)), np.uint64)
        self._experts: _Totals = np.zeros((len(layers), 2, experts), np.uint64)
        self._overflows = 0
        self._lock = Lock()

    def count_pass(
        self,
        requests: Counts,
        lanes: Counts,
        *,
        hot_ns: Counts | int = 0,
        cold_ns: Counts | int = 0,
    ) -> None:
        """Count one call of each layer.

        ``requests``: how often each expert was chosen; ``lanes``: the number of its hot lane, or
        -1. Both are [layers, experts]; times are [layers].
        """
        self._count_calls(slice(None), requests, lanes, hot_ns, cold_ns)

    def count_call(
        self, layer: int, requests: Counts, lanes: Counts, *, hot_ns: int = 0, cold_ns: int = 0
    ) -> None:
        """Count one call of one layer; both are [experts]."""
        row = self._row(layer)
        self._count_calls(row, requests[None], lanes[None], hot_ns, cold_ns)

    def count_swaps(self, layer: int, swaps: int) -> None:
        """Count experts that took the slot of another."""
        self._add(self._row(layer), {"swaps": swaps})

    def reset(self) -> None:
        """Begin again; how often counters went over stays."""
        with self._lock:
            self._clear()

    def layer(self, layer: int) -> LayerCounts:
        """Return the counters of one layer."""
        with self._lock:
            return self._layer(self._rows[layer])

    def chosen(self, layer: int) -> tuple[_Totals, _Totals]:
        """Return how often each expert of a layer was chosen: hot, and cold, [experts] each."""
        with self._lock:
            hot, cold = self._experts[self._rows[layer]].copy()
        return hot, cold

    def snapshot(self) -> JsonObject:
        """Return all layers and their sum, as they were at one moment."""
        with self._lock:
            layers = {layer: self._layer(row) for layer, row in self._rows.items()}
            overflows = self._overflows
        return {
            "overflow_resets": overflows,
            "summary": _sum(list(layers.values())).to_json(),
            "layers": [{"layer": layer, **found.to_json()} for layer, found in layers.items()],
        }

    def check_integrity(self) -> None:
        """Assert that the counters agree with one another, where nothing went over."""
        hits, misses = (self._totals[:, _COUNTED.index(name)] for name in ("hits", "misses"))
        chosen = self._experts.sum(-1)
        assert (chosen == np.stack((hits, misses), 1)).all()

    def _row(self, layer: int) -> slice:
        """Return which rows are those of a layer; none where it does not exist."""
        row = self._rows.get(layer)
        return slice(0) if row is None else slice(row, row + 1)

    def _count_calls(
        self,
        rows: slice,
        requests: Counts,
        lanes: Counts,
        hot_ns: Counts | int,
        cold_ns: Counts | int,
    ) -> None:
        cold = np.where(lanes < 0, requests, 0)
        chosen = np.stack((requests - cold, cold), 1)
        hits, misses = chosen.sum(-1).T
        values = {
            "calls": 1,
            "hits": hits,
            "misses": misses,
            "requests": np.count_nonzero(requests, axis=-1),
            "missed_requests": np.count_nonzero(cold, axis=-1),
            "hot_ns": hot_ns,
            "cold_ns": cold_ns,
        }
        self._add(rows, values, chosen)

    def _add(
        self, rows: slice, values: Mapping[str, Counts | int], chosen: Counts | None = None
    ) -> None:
        totals = self._totals[rows]
        if not len(totals):
            return
        amounts = np.zeros_like(totals)
        for name, value in values.items():
            amounts[:, _COUNTED.index(name)] = value
        with self._lock:
            if (amounts > MOST - totals).any():
                self._overflows = min(self._overflows + 1, MOST)
                self._clear()
                return
            totals += amounts
            if chosen is not None:  # none of them is above the hits or misses of its layer
                self._experts[rows] += chosen.astype(np.uint64)

    def _clear(self) -> None:
        self._totals[...] = 0
        self._experts[...] = 0

    def _layer(self, row: int) -> LayerCounts:
        return LayerCounts(**dict(zip(_COUNTED, self._totals[row].tolist(), strict=True)))


def _sum(layers: Sequence[LayerCounts]) -> LayerCounts:
    return LayerCounts(
        **{name: min(sum(getattr(layer, name) for layer in layers), MOST) for name in _COUNTED}
    )
