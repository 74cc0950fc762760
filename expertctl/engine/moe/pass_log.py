"""What passes asked for and which experts were in memory then, kept until it is worth counting.

Counting one pass takes about as long as counting sixteen at once, too long for a token of a small
base. Reading the counts brings them up to date.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from expertctl.engine.moe.choices import NO_EXPERT, Choices
from expertctl.engine.moe.counters import Counters, requested_by_layer
from expertctl.engine.moe.skipping import SkipTotals, skip_totals

Numbers = np.ndarray[Any, Any]
_AT_ONCE = 16
"""Passes that are counted together."""
_TOKENS_AT_ONCE = 512
"""Passes are also counted once they have read so many tokens: what is kept must not grow."""


@dataclass(slots=True)
class _Pass:
    """What is known of a pass, layer by layer."""

    asked: list[Numbers] = field(default_factory=list)
    """[tokens, used] of each layer; of the last it may be fewer tokens."""
    hits: list[Numbers] = field(default_factory=list)
    """Which experts were in memory then, [experts] of each layer."""
    waited: list[int] = field(default_factory=list)
    """Nanoseconds that each layer waited for its experts, with nothing to compute."""
    brought: list[int] = field(default_factory=list)
    """When all experts of each layer were there, and at the end when the pass was over."""
    weights: Numbers | None = None
    skipped: Numbers | None = None
    tokens: int = 0


class PassLog:
    """What one pass after the other asked for. One thread writes; any thread reads the counts."""

    def __init__(self, numbers: Sequence[int], *, experts: int, skips: bool) -> None:
        """Begin without a pass; ``numbers`` are those of routed layers in the base."""
        self._layers, self._experts, self._skips = len(numbers), experts, skips
        self._counters = Counters(numbers, experts=experts)
        self._totals = SkipTotals()
        self._now = _Pass()
        self._over: list[_Pass] = []
        self._lock = threading.Lock()

    @property
    def counters(self) -> Counters:
        """The counters, up to date."""
        self.flush()
        return self._counters

    @property
    def totals(self) -> SkipTotals:
        """What was missed and left out, up to date."""
        self.flush()
        return self._totals

    def ask(self, layer: int, selected: Numbers, hits: Numbers) -> None:
        """Note what tokens chose in a layer, and which experts are there; layer 0 begins a pass."""
        now = self._now
        if layer != len(now.asked):  # a pass failed, here or before
            del now.asked[layer:], now.hits[layer:], now.waited[layer:], now.brought[layer:]
        now.asked.append(selected.copy())  # skipped experts are struck out of the original
        now.hits.append(hits.copy())
        now.waited.append(-time.perf_counter_ns())

    def began(self) -> None:
        """Note that missing experts are being read, and there is something to compute."""
        self._now.waited[-1] += time.perf_counter_ns()

    def waits(self) -> None:
        """Note that there is nothing left to compute until they come."""
        self._now.waited[-1] -= time.perf_counter_ns()

    def brought(self) -> None:
        """Note that all experts that were asked for are there."""
        now = time.perf_counter_ns()
        self._now.waited[-1] += now
        self._now.brought.append(now)

    def passed(self, room: Choices, tokens: int) -> list[Numbers] | None:
        """Note that the pass is over; return what it asked for, None if not all layers did."""
        now, self._now = self._now, _Pass()
        if len(now.brought) < self._layers:
            return None
        now.brought.append(time.perf_counter_ns())
        now.tokens = tokens
        now.weights = room.weights[:, :tokens].copy()
        if self._skips:
            now.skipped = room.skipped[:, :tokens].copy()
        with self._lock:
            self._over.append(now)
            kept = sum(each.tokens for each in self._over)
        if len(self._over) >= _AT_ONCE or kept >= _TOKENS_AT_ONCE:
            self.flush()
        return now.asked

    def count_swap(self, number: int) -> None:
        """Count that an expert took the slot of another, in a layer of the base."""
        self._counters.count_swaps(number, 1)

    def flush(self) -> None:
        """Count what is not counted yet."""
        with self._lock:
            over, self._over = self._over, []
            for _, alike in groupby(over, key=lambda each: each.tokens):
                for some in _parts(list(alike)):
                    self._count(some)

    def _count(self, passes: Sequence[_Pass]) -> None:
        """Count passes that read the same number of tokens."""
        layers = len(passes) * self._layers
        asked = [_flat(ids, passes[0].tokens) for each in passes for ids in each.asked]
        requests = requested_by_layer(np.array(asked), self._experts)
        hits = np.array([each.hits for each in passes]).reshape(layers, -1)
        shape = (len(passes), self._layers, self._experts)
        waited = np.array([each.waited for each in passes])
        computed = np.diff(np.array([each.brought for each in passes]))
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
        self._totals += skip_totals(requests, hits, mass=mass, skipped=skipped)


def _flat(ids: Numbers, tokens: int) -> Numbers:
    """Return what so many tokens asked for; `NO_EXPERT` for those that did not ask."""
    found = np.full(tokens * ids.shape[1], NO_EXPERT)
    found[: ids.size] = ids.ravel()
    return found


def _parts(passes: list[_Pass]) -> Iterator[list[_Pass]]:
    """Cut passes into groups that are each counted together in little memory."""
    some = max(1, _TOKENS_AT_ONCE // passes[0].tokens)
    for first in range(0, len(passes), some):
        yield passes[first : first + some]
