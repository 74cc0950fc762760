"""What is known of the routed experts of a base, as time series: a label for each layer.

Layers are counted since the last reset, and not at all while counting is off (`/moe`); what belongs
to the whole base is counted since the base was loaded.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from expertctl.engine.moe.counters import LayerCounts, Observed
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.serving.snapshot import Snapshot

Family = CounterMetricFamily | GaugeMetricFamily
_LAYER = "expertctl_moe_layer"
_SECONDS = 1e-9
"""Seconds of a nanosecond."""
_COUNTED: tuple[tuple[str, str, Callable[[LayerCounts], int]], ...] = (
    ("calls", "Passes over a layer of routed experts.", lambda layer: layer.calls),
    ("hits", "Choices of tokens whose routed expert was in memory.", lambda layer: layer.hits),
    (
        "misses",
        "Choices of tokens whose routed expert was not in memory.",
        lambda layer: layer.misses,
    ),
    ("requests", "Routed experts asked for, each once a pass.", lambda layer: layer.requests),
    (
        "missed_requests",
        "Routed experts asked for that were not in memory, each once a pass.",
        lambda layer: layer.missed_requests,
    ),
    ("swaps", "Routed experts that got the slot of another.", lambda layer: layer.swaps),
)
_RATES: tuple[tuple[str, str, Callable[[LayerCounts], float]], ...] = (
    (
        "fallback_rate",
        "The share of requests for routed experts that missed.",
        lambda layer: layer.fallback_rate,
    ),
    (
        "hot_slot_ratio",
        "The share of choices whose routed expert was in memory.",
        lambda layer: layer.hot_slot_ratio,
    ),
)


def routed_families(now: Snapshot) -> Iterator[Family]:
    """Yield the time series; none if the base has no routed experts."""
    if now.routed is not None:
        yield from _whole(now.routed)
    if now.observed is not None and now.observed.mode != "off":
        yield from _by_layer(now.observed)


def _whole(report: RoutedReport) -> Iterator[Family]:
    residence, did = report.residence, report.activity
    yield GaugeMetricFamily(
        "expertctl_moe_experts",
        "Routed experts of the base.",
        value=residence.layers * residence.experts,
    )
    yield GaugeMetricFamily(
        "expertctl_moe_experts_in_memory",
        "Routed experts that memory has room for.",
        value=residence.blocks,
    )
    for name, text, value in (
        ("loads", "Routed experts that were read from files.", did.loads),
        ("read_bytes", "Bytes of files that were read for routed experts.", did.read_bytes),
        ("waited_seconds", "How long passes waited for routed experts.", did.waited_ms / 1e3),
        ("mass", "The weights that routers gave to experts.", did.mass),
        ("skipped_mass", "The weights of routers whose experts were left out.", did.skipped),
    ):
        yield CounterMetricFamily(f"expertctl_moe_{name}", text, value=value)


def _by_layer(seen: Observed) -> Iterator[Family]:
    for name, text, count in _COUNTED:
        counter = CounterMetricFamily(f"{_LAYER}_{name}", text, labels=["layer"])
        for number, layer in seen.layers.items():
            counter.add_metric([str(number)], count(layer))
        yield counter
    for name, text, rate in _RATES:
        gauge = GaugeMetricFamily(f"{_LAYER}_{name}", text, labels=["layer"])
        for number, layer in seen.layers.items():
            gauge.add_metric([str(number)], rate(layer))
        yield gauge
    yield _seconds(seen)
    yield CounterMetricFamily(
        "expertctl_moe_overflow_resets",
        "How often a counter of routed experts was full, and all began again.",
        value=seen.overflow_resets,
    )


def _seconds(seen: Observed) -> Family:
    family = CounterMetricFamily(
        f"{_LAYER}_seconds",
        "Time of computing, and of waiting for, routed experts.",
        labels=["layer", "lane"],
    )
    for number, layer in seen.layers.items():
        family.add_metric([str(number), "compute"], layer.hot_ns * _SECONDS)
        family.add_metric([str(number), "wait"], layer.cold_ns * _SECONDS)
    return family
