"""What was counted of routed experts as an activity document, to read or to plan from.

Times are means of a call, in microseconds: *hot* is computing, *cold* is waiting for missing
experts while nothing is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.activity_document import (
    ActivityDocument,
    LayerActivity,
    LayerTimes,
    activity_json,
)
from expertctl.engine.moe.adoption import Guidance, Guided, guidance_of
from expertctl.engine.moe.counters import LayerCounts, Observed
from expertctl.engine.moe.report import Residence, RoutedReport
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject

_MICROSECONDS = 1e-3
"""In a nanosecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known of the routed experts of a base in memory, at one moment."""

    base: str
    document: ActivityDocument
    residence: Residence | None = None
    """None where it has none."""
    guidance: Guidance | None = None
    """What a profile does; None where no expert could be missing."""

    def to_json(self) -> JsonObject:
        """Return the document, and what it is of; nothing else where nothing is observed."""
        told = activity_json(self.document)
        if self.document.mode == "off" or self.residence is None:
            return told
        told |= {"base": self.base, "residence": self.residence.to_json()}
        return told if self.guidance is None else {**told, "guide": self.guidance.to_json()}


def observation_of(
    seen: Observed | None,
    *,
    base: str,
    config: ModelConfig,
    report: RoutedReport | None,
    cache: Guided | None,
) -> Observation:
    """Return what was counted of a base; its mode is "off" where nothing was."""
    document, guidance = ActivityDocument("off"), None
    if seen is not None and config.experts is not None:
        document = activity_document(seen, used=config.experts.used)
        guidance = None if cache is None else guidance_of(cache, config.experts)
    residence = None if report is None else report.residence
    return Observation(base=base, document=document, residence=residence, guidance=guidance)


def activity_document(seen: Observed, *, used: int) -> ActivityDocument:
    """Return the document; ``used``: how many experts a token asks for in a layer."""
    if seen.mode == "off":
        return ActivityDocument("off")
    return ActivityDocument(
        seen.mode,
        tuple(_layers(seen)),
        experts=seen.chosen.shape[-1],
        used=used,
        updates=seen.passes,
        overflow_resets=seen.overflow_resets,
    )


def _layers(seen: Observed) -> Iterator[LayerActivity]:
    for (number, counted), (hot, cold) in zip(seen.layers.items(), seen.chosen, strict=True):
        yield LayerActivity(
            layer=number,
            calls=counted.calls,
            hot=_counts(hot),
            cold=_counts(cold),
            requests=counted.requests,
            missed_requests=counted.missed_requests,
            swaps=counted.swaps,
            times=_times(counted),
        )


def _counts(chosen: NDArray[np.uint64]) -> dict[int, int]:
    return {int(expert): int(chosen[expert]) for expert in np.flatnonzero(chosen)}


def _times(counted: LayerCounts) -> LayerTimes:
    each = _MICROSECONDS / counted.calls if counted.calls else 0.0
    hot, cold = counted.hot_ns * each, counted.cold_ns * each
    return LayerTimes(
        parallel_region_wall=hot + cold,
        parallel_hot_lane_wall=hot,
        parallel_cold_lane_wall=cold,
        parallel_join_wait=cold,
    )
