"""What a base in memory observes of its routed experts, and profiles that are applied to it.

A profile is checked as a whole in any thread, and applied between two passes: errors are reported
before anything changes. It says which experts to pin from then on, and which ones updates may swap
in; each layer keeps its number of slots. Results stay the same if no expert is skipped. It lasts as
long as the base is in memory and does not change the learnt usage.

Observed counts are an activity document, to read or to plan from. Its times are means per call, in
microseconds: *hot* is computing, *cold* is waiting for missing experts while nothing is computed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.activity import (
    ActivityDocument,
    LaneTimes,
    LayerActivity,
    activity_to_json,
)
from expertctl.engine.moe.counters import CounterSnapshot, LayerCounts
from expertctl.engine.moe.stats import ExpertResidency, RoutedExpertStats
from expertctl.engine.moe.swap_policy import ExpertScores
from expertctl.engine.moe.usage_profile import ExpertUsage, select_pinned
from expertctl.engine_config import Pins, WarmupConfig
from expertctl.errors import UsageError
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache


@dataclass(frozen=True, slots=True)
class ProfileUpdate:
    """New pins and scores of a base in memory, by layer."""

    pinned: tuple[frozenset[int], ...]
    scores: tuple[ExpertScores, ...]
    rate: float

    def apply(self, cache: "ExpertCache") -> None:
        """Apply it to a cache; between two passes."""
        cache.pin(self.pinned)
        cache.set_scores(self.scores, rate=self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How to apply a profile; None: the options of the base."""

    pins: Pins | None = None
    exchange: float | None = None

    def make_update(
        self,
        usage: ExpertUsage,
        cache: "ExpertCache",
        routed: ExpertsConfig,
        *,
        warmup: WarmupConfig,
    ) -> ProfileUpdate:
        """Return the changes of a profile that fits the base.

        Raises:
            IncompatibleError: when the profile counts no expert.
            UsageError: when that changes nothing, or a layer has fewer slots than pins.
        """
        usage.require_counts()
        pins = warmup.pins if self.pins is None else self.pins
        if pins is None and self.exchange is None and not warmup.exchange:
            raise UsageError(
                "the profile changes nothing: it neither pins experts nor swaps any",
                hint='also give "pin", such as 8 or "50%", or "exchange", such as 0.1',
            )
        return ProfileUpdate(
            tuple(
                frozenset[int]()
                if pins is None
                else select_pinned(pins, usage, number, capacity=slots.capacity)
                for number, slots in zip(routed.layers, cache.slots, strict=True)
            ),
            tuple(usage.layer_counts(number) for number in routed.layers),
            warmup.exchange if self.exchange is None else self.exchange,
        )


@dataclass(frozen=True, slots=True)
class ActiveProfile:
    """The effect of profiles on a base in memory now."""

    exchange: float
    pinned: Mapping[int, frozenset[int]]
    """By the number of the layer; only layers that have pins."""

    def to_json(self) -> JsonObject:
        """Return the ``guide`` object."""
        layers = sorted(self.pinned.items())
        return {
            "exchange": self.exchange,
            "pinned": {str(number): [*sorted(experts)] for number, experts in layers},
        }


def find_active_profile(cache: "ExpertCache", routed: ExpertsConfig) -> ActiveProfile:
    """Return the current effect of profiles; any thread may call this."""
    each = zip(routed.layers, cache.slots, strict=True)
    by_layer = {number: slots.pinned for number, slots in each if slots.pinned}
    return ActiveProfile(cache.exchange_rate, by_layer)


_US_PER_NS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of the routed experts of a base in memory, at one moment."""

    base: str
    document: ActivityDocument
    residence: ExpertResidency | None = None
    """None if it has none."""
    active_profile: ActiveProfile | None = None
    """The effect of profiles; None if no expert can be missing."""

    def to_json(self) -> JsonObject:
        """Return the document with the base and its state; only the document if the mode is off."""
        document = activity_to_json(self.document)
        if self.document.mode == "off" or self.residence is None:
            return document
        document |= {"base": self.base, "residence": self.residence.to_json()}
        return (
            document
            if self.active_profile is None
            else {**document, "guide": self.active_profile.to_json()}
        )


def make_observation(
    counters: CounterSnapshot | None,
    *,
    base: str,
    config: ModelConfig,
    report: RoutedExpertStats | None,
    cache: "ExpertCache | None",
) -> Observation:
    """Return the observation of a base; its mode is "off" if nothing was counted."""
    document, profile = ActivityDocument("off"), None
    if counters is not None and config.experts is not None:
        document = build_activity_document(counters, used=config.experts.used)
        profile = None if cache is None else find_active_profile(cache, config.experts)
    residence = None if report is None else report.residence
    return Observation(base=base, document=document, residence=residence, active_profile=profile)


def build_activity_document(counters: CounterSnapshot, *, used: int) -> ActivityDocument:
    """Return the document; ``used``: how many experts a token chooses in a layer."""
    if counters.mode == "off":
        return ActivityDocument("off")
    return ActivityDocument(
        counters.mode,
        tuple(_build_layers(counters)),
        experts=counters.expert_counts.shape[-1],
        used=used,
        updates=counters.passes,
        overflow_resets=counters.overflow_resets,
    )


def _build_layers(counters: CounterSnapshot) -> Iterator[LayerActivity]:
    for (number, counted), (hot, cold) in zip(
        counters.layers.items(), counters.expert_counts, strict=True
    ):
        yield LayerActivity(
            layer=number,
            calls=counted.calls,
            hot=_nonzero_counts(hot),
            cold=_nonzero_counts(cold),
            requests=counted.requests,
            missed_requests=counted.missed_requests,
            swaps=counted.swaps,
            times=_make_lane_times(counted),
        )


def _nonzero_counts(chosen: NDArray[np.uint64]) -> dict[int, int]:
    return {int(expert): int(chosen[expert]) for expert in np.flatnonzero(chosen)}


def _make_lane_times(counted: LayerCounts) -> LaneTimes:
    each = _US_PER_NS / counted.calls if counted.calls else 0.0
    hot, cold = counted.hot_ns * each, counted.cold_ns * each
    return LaneTimes(
        parallel_region_wall=hot + cold,
        parallel_hot_lane_wall=hot,
        parallel_cold_lane_wall=cold,
        parallel_join_wait=cold,
    )
