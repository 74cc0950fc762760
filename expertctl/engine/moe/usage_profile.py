"""`UsageProfile`: how often each routed expert of a base was chosen, and what that took.

A profile is what is learnt of a base, what a user gives to start it with, and what a base in memory
reports of itself; `profile_codecs` reads and writes it in two formats. A *hot* choice found its
expert in memory, a *cold* one did not; counts not known to be either are *raw*. An expert is
*universal* if at least a share of all prompts, the threshold, activate it.

Profiles are added and subtracted: the usage of a base accumulates and fades. Counts are added;
times and cold slots per call are means, weighted by calls. A sum of more than `MAX_PROFILE_TOKENS`
tokens is halved, so old requests lose half of their weight again and again, and experts that are no
longer chosen are forgotten. Raw counts count as cold if the layer has hot or cold ones.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.counters import CounterMode, CounterSnapshot, LayerCounts
from expertctl.errors import IncompatibleError
from expertctl.package.architectures import ExpertsConfig

MAX_JSON_INTEGER = 2**53 - 1
"""Largest integer that every JSON reader represents exactly; larger counts are written as this."""
MAX_PROFILE_TOKENS = 1 << 17
"""A sum covers at most this many tokens."""
TOKENS_PRESET = "tokens"
"""The prompt preset of a profile that counts tokens."""
Counts = Mapping[int, int]
"""How often each expert was chosen; never 0."""
_Key = TypeVar("_Key")
_TOTALS = ("calls", "hot1_slots", "hot2_slots", "requests", "missed_requests", "swaps", "fallbacks")
_US_PER_NS = 1e-3


def cap_count(count: int) -> int:
    """Return a count that every JSON reader represents exactly."""
    return min(count, MAX_JSON_INTEGER)


def make_time_key(name: str) -> str:
    """Return the JSON key of a time."""
    return f"{name}_time_per_call_us"


class LaneTimes(msgspec.Struct, frozen=True, rename=make_time_key):
    """Microseconds per call of a layer; 0 if not measured."""

    total_moe: float = 0.0
    routing: float = 0.0
    worklist: float = 0.0
    merge: float = 0.0
    hot_gate: float = 0.0
    hot_up: float = 0.0
    hot_down: float = 0.0
    cold_gate: float = 0.0
    cold_up: float = 0.0
    cold_down: float = 0.0
    parallel_region_wall: float = 0.0
    parallel_hot_lane_wall: float = 0.0
    parallel_cold_lane_wall: float = 0.0
    parallel_join_wait: float = 0.0


TIMES = LaneTimes.__struct_fields__


@dataclass(frozen=True, slots=True)
class LayerUsage:
    """The choices of one layer, and what they took.

    ``raw`` holds counts not known to be hot or cold: empty if ``hot`` or ``cold`` is not.
    """

    layer: int
    calls: int = 0
    hot: Counts = field(default_factory=dict)
    cold: Counts = field(default_factory=dict)
    raw: Counts = field(default_factory=dict)
    cold_per_call: float = 0.0
    hot1_slots: int = 0
    hot2_slots: int = 0
    """Hot slots that the second and the third lane computed; ``hot`` includes them."""
    requests: int = 0
    """Experts that calls chose, each counted once per call."""
    missed_requests: int = 0
    """Those of them that were not hot."""
    swaps: int = 0
    """How often an expert took the slot of another."""
    times: LaneTimes = field(default_factory=LaneTimes)
    fallbacks: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> dict[int, int]:
        """How often each expert was chosen, hot or not."""
        if not (self.hot or self.cold):
            return dict(self.raw)
        experts = sorted({*self.hot, *self.cold})
        return {expert: self.hot.get(expert, 0) + self.cold.get(expert, 0) for expert in experts}

    @property
    def pressure(self) -> float:
        """How much a call suffers from cold experts.

        The first of these that is above zero: the wait of the call, how much longer its cold lane
        takes than its hot one, its cold slots.
        """
        times = self.times
        behind = times.parallel_cold_lane_wall - times.parallel_hot_lane_wall
        return next((p for p in (times.parallel_join_wait, behind, self.cold_per_call) if p > 0), 0)


@dataclass(frozen=True)
class UsageProfile:
    """The usage of the routed experts of a base."""

    mode: CounterMode
    layers: tuple[LayerUsage, ...] = ()
    experts: int = 0
    """Of each layer; 0 if the profile does not say."""
    used: int = 0
    """How many experts of a layer a token chooses; 0 if the profile does not say."""
    updates: int = 0
    overflow_resets: int = 0
    prompts: int = 0
    """Prompts that were counted, with the tokens of added profiles; 0 if only tokens."""
    preset: str = ""
    """Which prompts these were."""
    source: str = field(default="", compare=False)
    """Where the counts come from, for a person to read."""

    @property
    def is_usable(self) -> bool:
        """Whether an expert was chosen at all, so that a placement can be planned from it."""
        return any(layer.hits for layer in self.layers)

    @cached_property
    def counts(self) -> Mapping[int, Counts]:
        """The counts of each layer, by expert."""
        return {each.layer: dict(sorted(each.hits.items())) for each in self.layers}

    @cached_property
    def tokens(self) -> int:
        """How many tokens, or prompts, are covered; at least the largest count.

        Each token chooses as many experts of a layer as ``used`` says; if it does not say, the
        largest count is a lower bound. A prompt may choose any number.
        """
        most = self.prompts
        for counts in self.counts.values():
            tells = self.used and not self.prompts
            covered = -(-sum(counts.values()) // self.used) if tells else 0
            most = max(most, covered, max(counts.values(), default=0))
        return most

    @property
    def counted_preset(self) -> str:
        """The prompts that were counted; `TOKENS_PRESET` where tokens were."""
        return self.preset if self.prompts else TOKENS_PRESET

    def layer_counts(self, layer: int) -> Counts:
        """Return how often each expert of a layer was chosen; never 0."""
        return self.counts.get(layer, {})

    def rank_experts(self, layer: int) -> list[int]:
        """Return the experts of a layer that were chosen, the most frequent first."""
        counts = self.layer_counts(layer)
        return sorted(counts, key=lambda expert: (-counts[expert], expert))

    def list_universal(self, layer: int, share: float) -> list[int]:
        """Return the experts that at least this share of the prompts or tokens of a layer chose.

        A prompt runs the last layer for its last token only, so fewer tokens may count there.
        """
        counts, asking = self.layer_counts(layer), self.tokens
        if self.used and not self.prompts:
            asking = -(-sum(counts.values()) // self.used)
        return [expert for expert, count in counts.items() if count >= share * asking]

    def require_counts(self) -> None:
        """Check that some expert is counted: none is when counting was off.

        Raises:
            IncompatibleError: when none is.
        """
        if not self.is_usable:
            raise IncompatibleError(
                f"{self.source} counts no expert that was chosen",
                hint="use a profile that was recorded while requests were answered",
            )

    def check_fits(self, routed: ExpertsConfig) -> None:
        """Check that the counts can be of a base with these experts.

        Raises:
            IncompatibleError: when they are of other experts, or of layers that have none.
        """
        if fact := next(self._find_misfits(routed), None):
            raise IncompatibleError(f"{self.source} {fact}", hint="use a profile of this base")

    def _find_misfits(self, routed: ExpertsConfig) -> Iterator[str]:
        count = routed.count
        if self.experts not in (0, count):
            yield f"has {self.experts} routed experts in a layer, the base has {count}"
        if self.used not in (0, routed.used):
            yield f"has {self.used} experts per token, the base has {routed.used}"
        highest = max((max(counts, default=0) for counts in self.counts.values()), default=0)
        if highest >= count:
            yield f"counts expert {highest}, the base has {count} in a layer"
        if unknown := sorted(self.counts.keys() - set(routed.layers)):
            yield f"has layer {unknown[0]}, which has no routed experts"


EMPTY_PROFILE = UsageProfile("update")


def build_prompt_profile(
    layers: Mapping[int, Counts], *, experts: int, prompts: int, preset: str = ""
) -> UsageProfile:
    """Return the profile of counts of prompts, which are not known to be hot or cold."""
    return UsageProfile(
        "update",
        tuple(LayerUsage(layer, raw=counts) for layer, counts in sorted(layers.items())),
        experts=experts,
        prompts=prompts,
        preset=preset,
    )


def build_counted_profile(counters: CounterSnapshot, *, used: int) -> UsageProfile:
    """Return the profile of counters; a token chooses ``used`` experts of a layer.

    Its times are means per call, in microseconds: *hot* is computing, *cold* is waiting for missing
    experts while nothing is computed.
    """
    if counters.mode == "off":
        return UsageProfile("off")
    return UsageProfile(
        counters.mode,
        tuple(_build_layers(counters)),
        experts=counters.expert_counts.shape[-1],
        used=used,
        updates=counters.passes,
        overflow_resets=counters.overflow_resets,
    )


def _build_layers(counters: CounterSnapshot) -> Iterator[LayerUsage]:
    for (number, counted), (hot, cold) in zip(
        counters.layers.items(), counters.expert_counts, strict=True
    ):
        yield LayerUsage(
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


def add_profiles(one: UsageProfile, other: UsageProfile) -> UsageProfile:
    """Return the sum of two profiles, halved until it covers at most `MAX_PROFILE_TOKENS`.

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
    while total.tokens > MAX_PROFILE_TOKENS:
        total = _halve(total)
    return total


def accumulate_scores(
    scores: Sequence[Mapping[int, float]], more: UsageProfile, layer_numbers: Sequence[int]
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
    while share * tokens > MAX_PROFILE_TOKENS:
        share /= 2
    return [{expert: count * share for expert, count in layer.items()} for layer in total]


def subtract_profile(now: UsageProfile, before: UsageProfile) -> UsageProfile:
    """Return what the same counters counted since an earlier profile.

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


def _sum_prompts(one: UsageProfile, other: UsageProfile) -> int:
    """Return how many prompts both cover together; 0 if both count tokens only."""
    if not (one.prompts or other.prompts):
        return 0
    return cap_count(one.tokens + other.tokens)


def _add_layers(one: LayerUsage, other: LayerUsage) -> LayerUsage:
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


def _subtract_layer(now: LayerUsage, before: LayerUsage) -> LayerUsage:
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


def _halve(profile: UsageProfile) -> UsageProfile:
    layers = tuple(_halve_layer(layer) for layer in profile.layers)
    return replace(profile, layers=layers, prompts=profile.prompts // 2)


def _halve_layer(layer: LayerUsage) -> LayerUsage:
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


def _map_totals(change: Callable[..., int], *layers: LayerUsage) -> dict[str, int]:
    """Return the totals of a layer, each made of the same total of some layers."""
    return {name: change(*(getattr(each, name) for each in layers)) for name in _TOTALS}


def _make_times(value: Callable[[str], float]) -> LaneTimes:
    return LaneTimes(**{name: value(name) for name in TIMES})


def _cold_per_call(layer: LayerUsage) -> float:
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
