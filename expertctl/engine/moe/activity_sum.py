"""Add and subtract activity documents: the usage of a base accumulates and fades.

Counts are added; times and cold slots per call are means, weighted by calls. A sum of more than
`MAX_ACTIVITY_TOKENS` tokens is halved, so old requests lose half of their weight again and again,
and experts that are no longer chosen are forgotten. Raw counts, which are not known to be hot or
cold, count as cold if the layer has hot or cold ones.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from expertctl.engine.moe.activity import (
    TIMES,
    ActivityDocument,
    LaneTimes,
    LayerActivity,
    cap_count,
)
from expertctl.errors import IncompatibleError

MAX_ACTIVITY_TOKENS = 1 << 17
"""A sum covers at most this many tokens."""
EMPTY_ACTIVITY = ActivityDocument("update")
_Key = TypeVar("_Key")
_TOTALS = ("calls", "hot1_slots", "hot2_slots", "requests", "missed_requests", "swaps", "fallbacks")


def count_tokens(document: ActivityDocument) -> int:
    """Return how many tokens, or prompts, a document covers; at least its largest count.

    Each token chooses as many experts of a layer as the document says; if it does not say, the
    largest count is a lower bound. A prompt may choose any number.
    """
    most = document.prompts
    for layer in document.layers:
        counts = layer.hits.values()
        tells = document.used and not document.prompts
        asked = -(-sum(counts) // document.used) if tells else 0
        most = max(most, asked, max(counts, default=0))
    return most


def add_activities(one: ActivityDocument, other: ActivityDocument) -> ActivityDocument:
    """Return the sum of two documents, halved until it covers at most `MAX_ACTIVITY_TOKENS`.

    Raises:
        IncompatibleError: when their numbers of experts, or of experts used, differ.
    """
    for name in ("experts", "used"):
        here, there = getattr(one, name), getattr(other, name)
        if here and there and here != there:
            raise IncompatibleError(
                f"cannot add counts of {here} and of {there} routed experts",
                hint="add counts of one base only",
            )
    layers = {layer.layer: layer for layer in one.layers}
    for layer in other.layers:
        known = layers.get(layer.layer)
        layers[layer.layer] = layer if known is None else _add_layers(known, layer)
    total = replace(
        one,
        mode="update",
        layers=tuple(layers[number] for number in sorted(layers)),
        experts=one.experts or other.experts,
        used=one.used or other.used,
        updates=cap_count(one.updates + other.updates),
        overflow_resets=cap_count(one.overflow_resets + other.overflow_resets),
        prompts=_sum_prompts(one, other),
        preset=one.preset or other.preset,
    )
    while count_tokens(total) > MAX_ACTIVITY_TOKENS:
        total = _halve(total)
    return total


def accumulate_scores(
    scores: Sequence[Mapping[int, float]], more: ActivityDocument, layer_numbers: Sequence[int]
) -> list[dict[int, float]]:
    """Add further counts to the scores of experts, by layer; they fade as sums do.

    ``layer_numbers`` are the numbers of the layers in the base.
    """
    counted = {layer.layer: layer.hits for layer in more.layers}
    total = [
        {expert: known.get(expert, 0) + asked.get(expert, 0) for expert in sorted({*known, *asked})}
        for known, asked in (
            (each, counted.get(n, {})) for each, n in zip(scores, layer_numbers, strict=True)
        )
    ]
    tokens = max((sum(layer.values()) for layer in total), default=0.0) / max(more.used, 1)
    share = 1.0
    while share * tokens > MAX_ACTIVITY_TOKENS:
        share /= 2
    return [{expert: count * share for expert, count in layer.items()} for layer in total]


def subtract_activity(now: ActivityDocument, before: ActivityDocument) -> ActivityDocument:
    """Return what the same counters counted since an earlier document.

    All of ``now`` if they overflowed in between, because then they restarted. Means are those of
    all counts in ``now``.
    """
    if now.overflow_resets != before.overflow_resets:
        return now
    earlier = {layer.layer: layer for layer in before.layers}
    pairs = [(layer, earlier.get(layer.layer)) for layer in now.layers]
    layers = tuple(layer if then is None else _subtract_layer(layer, then) for layer, then in pairs)
    updates = max(now.updates - before.updates, 0)
    return replace(now, layers=layers, updates=updates, overflow_resets=0)


def _sum_prompts(one: ActivityDocument, other: ActivityDocument) -> int:
    """Return how many prompts both cover together; 0 if both count tokens only."""
    if not (one.prompts or other.prompts):
        return 0
    return cap_count(count_tokens(one) + count_tokens(other))


def _add_layers(one: LayerActivity, other: LayerActivity) -> LayerActivity:
    calls = one.calls + other.calls
    share = one.calls / calls if calls else 0.5

    def mean(here: float, there: float) -> float:
        return share * here + (1 - share) * there

    has_lanes = bool(one.hot or one.cold or other.hot or other.cold)
    raw = _add_counts(one.raw, other.raw)
    return replace(
        one,
        hot=_add_counts(one.hot, other.hot),
        cold=_add_counts(one.cold, other.cold, raw) if has_lanes else {},
        raw={} if has_lanes else raw,
        cold_per_call=mean(_cold_per_call(one), _cold_per_call(other)),
        times=_make_times(lambda name: mean(getattr(one.times, name), getattr(other.times, name))),
        reasons=_add_counts(one.reasons, other.reasons),
        **_map_totals(lambda here, there: cap_count(here + there), one, other),
    )


def _subtract_layer(now: LayerActivity, before: LayerActivity) -> LayerActivity:
    return replace(
        now,
        hot=_subtract_counts(now.hot, before.hot),
        cold=_subtract_counts(now.cold, before.cold),
        raw=_subtract_counts(now.raw, before.raw),
        cold_per_call=_cold_per_call(now),
        times=now.times,
        reasons=_subtract_counts(now.reasons, before.reasons),
        **_map_totals(lambda after, earlier: max(after - earlier, 0), now, before),
    )


def _halve(document: ActivityDocument) -> ActivityDocument:
    layers = tuple(_halve_layer(layer) for layer in document.layers)
    return replace(document, layers=layers, prompts=document.prompts // 2)


def _halve_layer(layer: LayerActivity) -> LayerActivity:
    return replace(
        layer,
        hot=_halve_counts(layer.hot),
        cold=_halve_counts(layer.cold),
        raw=_halve_counts(layer.raw),
        cold_per_call=_cold_per_call(layer),
        times=layer.times,
        reasons=_halve_counts(layer.reasons),
        **_map_totals(lambda total: total // 2, layer),
    )


def _map_totals(change: Callable[..., int], *layers: LayerActivity) -> dict[str, int]:
    """Return the totals of a layer, each made of the same total of some layers."""
    return {name: change(*(getattr(each, name) for each in layers)) for name in _TOTALS}


def _make_times(value: Callable[[str], float]) -> LaneTimes:
    return LaneTimes(**{name: value(name) for name in TIMES})


def _cold_per_call(layer: LayerActivity) -> float:
    counted = sum(layer.cold.values()) / layer.calls if layer.calls else 0.0
    return layer.cold_per_call or counted


def _add_counts(*counts: Mapping[_Key, int]) -> dict[_Key, int]:
    total = Counter[_Key]()
    for each in counts:
        total.update(each)
    return {key: cap_count(count) for key, count in total.items()}


def _subtract_counts(now: Mapping[_Key, int], before: Mapping[_Key, int]) -> dict[_Key, int]:
    left = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in left.items() if count > 0}


def _halve_counts(counts: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: count // 2 for key, count in counts.items() if count > 1}
