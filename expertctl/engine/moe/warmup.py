"""How a base whose routed experts do not all fit starts: slots of layers, first residents, pins.

`WarmupPlan` combines the user's options with the usage of the base, from a file that the user
names, else from the learnt usage. It says which experts to pin, how many slots each layer gets,
which experts fill them first and, if requested, which are swapped in later. It never changes a
result if nothing is skipped.

A profile can also be applied to a base in memory. It is checked as a whole in any thread, and
applied between two passes: errors are reported before anything changes. It says which experts to
pin from then on, and which ones updates may swap in; each layer keeps its number of slots. It lasts
as long as the base is in memory and does not change the learnt usage.

`SavedCacheState` records which experts were resident and what they were worth, as JSON in the
format of flash-moe, version 1; other versions are refused. It has no weights: those are read from
the base again, all at once, instead of one token after the other. An empty slot is written as -1.
If the number of a layer's slots has changed since, the experts that were worth most come first.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.cache_plan import CachePlan, adapt_plan, select_pinned
from expertctl.engine.moe.layer_slots import EMPTY_SLOT, LayerSlots
from expertctl.engine.moe.profile_codecs import load_document, parse_document
from expertctl.engine.moe.usage_profile import UsageProfile, cap_count
from expertctl.engine_config import COLD_START, DEFAULT_WARMUP, Pins, TopPins, WarmupConfig
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.package.architectures import ExpertsConfig
from expertctl.schema.strict_json import JsonObject

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache
    from expertctl.engine.moe.swap_policy import ExpertScores

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerState:
    """The saved slots of one layer, and the count and last use of each expert."""

    cached_ids: tuple[int, ...]
    frequency: Mapping[int, float]
    last_active: Mapping[int, int]
    step: int


@dataclass(frozen=True, slots=True)
class SavedCacheState:
    """The saved state of all layers of a base."""

    timestamp: float
    """Seconds since 1970."""
    prompt: str
    """The prompt, or anything else, that warmed the cache; may be empty."""
    layers: Mapping[int, LayerState]

    @property
    def capacity(self) -> int:
        """The largest number of slots of a layer."""
        return max((len(layer.cached_ids) for layer in self.layers.values()), default=0)


def capture_state(
    slots: Mapping[int, LayerSlots], *, timestamp: float, prompt: str = ""
) -> SavedCacheState:
    """Return the state of all layers, by their number."""
    layers = {number: _capture_layer(layer) for number, layer in sorted(slots.items())}
    return SavedCacheState(timestamp, prompt, layers)


def restore_state(state: SavedCacheState, slots: Mapping[int, LayerSlots]) -> dict[int, list[int]]:
    """Restore counts into empty slots; return which experts to load into each layer.

    They are in the order of free slots. A layer that was not saved starts without counts.

    Raises:
        IncompatibleError: when an expert was saved that a layer does not have.
    """
    for number, layer in slots.items():
        _check_layer(state, number, experts=layer.experts)
    return {n: _restore_layer(state.layers.get(n), layer) for n, layer in sorted(slots.items())}


def check_state(state: SavedCacheState, layers: Iterable[int], *, experts: int) -> None:
    """Check that a state can be restored in layers with ``experts`` experts.

    Raises:
        IncompatibleError: when a saved layer is none of them, or has an expert that they do not.
    """
    known = set(layers)
    if unknown := sorted(state.layers.keys() - known):
        raise IncompatibleError(
            f"the saved state has layer {unknown[0]}, which has no routed experts",
            hint="delete it; it is of another base",
        )
    for number in known:
        _check_layer(state, number, experts=experts)


def read_state(data: bytes, *, what: str) -> SavedCacheState:
    """Read a state.

    Raises:
        InvalidPackageError: when it is of another version, malformed or too large.
    """
    document = load_document(data, what=what)
    fields = parse_document(document, _StateDocument, what=what, schema="moe-state")
    if problems := list(_find_contradictions(fields)):
        raise InvalidPackageError(what, problems)
    layers = {int(number): _parse_layer(record) for number, record in fields.layers.items()}
    prompt = fields.metadata.prompt
    return SavedCacheState(fields.timestamp, prompt, dict(sorted(layers.items())))


def write_state(state: SavedCacheState) -> bytes:
    """Return a state as JSON."""
    document = {
        "version": STATE_VERSION,
        "capacity": state.capacity,
        "timestamp": state.timestamp,
        "metadata": {"prompt": state.prompt, "capacity": state.capacity},
        "layers": {
            str(number): {
                "cached_ids": layer.cached_ids,
                "frequency": {str(expert): count for expert, count in layer.frequency.items()},
                "last_active": {str(expert): at for expert, at in layer.last_active.items()},
                "step": layer.step,
                "all_seen": sorted(layer.frequency),
            }
            for number, layer in state.layers.items()
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


class _StateMetadata(msgspec.Struct):
    prompt: str = ""


class _StateLayer(msgspec.Struct):
    cached_ids: list[int]
    frequency: dict[str, float]
    last_active: dict[str, int]
    step: int


class _StateDocument(msgspec.Struct):
    layers: dict[str, _StateLayer]
    timestamp: float = 0.0
    metadata: _StateMetadata = msgspec.field(default_factory=_StateMetadata)


def _check_layer(state: SavedCacheState, number: int, *, experts: int) -> None:
    saved = state.layers.get(number)
    if saved and (highest := max(_list_referenced(saved), default=0)) >= experts:
        raise IncompatibleError(
            f"the saved state has expert {highest} in layer {number}, where there are {experts}",
            hint="delete it; it is of another base",
        )


def _capture_layer(layer: LayerSlots) -> LayerState:
    """Return the state of a layer; numbers that some JSON readers cannot represent are capped."""
    known = [expert for expert in range(layer.experts) if layer.counts[expert]]
    return LayerState(
        cached_ids=tuple(int(expert) for expert in layer.ids),
        frequency={expert: float(layer.counts[expert]) for expert in known},
        last_active={expert: cap_count(int(layer.last_used[expert])) for expert in known},
        step=cap_count(layer.step),
    )


def _restore_layer(saved: LayerState | None, layer: LayerSlots) -> list[int]:
    if saved is None:
        return layer.choose_initial_experts()
    layer.step = saved.step
    for expert, count in saved.frequency.items():
        layer.counts[expert] = count
        layer.last_used[expert] = saved.last_active.get(expert, 0)
    residents = [expert for expert in saved.cached_ids if expert != EMPTY_SLOT]
    worth = layer.priorities()
    best = sorted(residents, key=lambda expert: (-worth[expert], expert))
    bring = layer.choose_initial_experts(best)
    saved_slots = {expert: slot for slot, expert in enumerate(residents)}
    return sorted(bring, key=lambda e: (e not in saved_slots, saved_slots.get(e, e)))


def _parse_layer(record: _StateLayer) -> LayerState:
    return LayerState(
        cached_ids=tuple(record.cached_ids),
        frequency={int(e): count for e, count in record.frequency.items()},
        last_active={int(e): at for e, at in record.last_active.items()},
        step=record.step,
    )


def _list_referenced(saved: LayerState) -> set[int]:
    return {*saved.cached_ids, *saved.frequency, *saved.last_active}


def _find_contradictions(document: _StateDocument) -> Iterable[str]:
    """Yield what a schema cannot check: an expert in two slots, a use after the last step."""
    for number, layer in document.layers.items():
        residents = [expert for expert in layer.cached_ids if expert != EMPTY_SLOT]
        if len(set(residents)) != len(residents):
            yield f"layers/{number}/cached_ids: an expert appears twice"
        if (last := max(layer.last_active.values(), default=0)) > layer.step:
            yield f"layers/{number}/last_active: {last} is after the last step, {layer.step}"


_Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """How one base starts: the options, and its usage if known."""

    config: WarmupConfig = DEFAULT_WARMUP
    usage: UsageProfile | None = None
    state: SavedCacheState | None = None

    def adapt_cache_plan(self, plan: CachePlan, layer_numbers: Sequence[int]) -> CachePlan:
        """Return a plan with slots and pins by usage; ``layer_numbers`` are those of routed layers.

        Raises:
            UsageError: when more experts are to be pinned than a layer has slots.
        """
        usage, pins = self.usage, self.config.pins
        if usage is None:
            return plan
        counts = [usage.layer_counts(number) for number in layer_numbers]
        activations = _equalise_layers([_to_array(counted, plan.experts) for counted in counts])
        minimum = pins.count if isinstance(pins, TopPins) else 1
        plan = adapt_plan(plan, activations, minimum=min(minimum, plan.slots))
        if pins is None:
            return plan
        each = zip(layer_numbers, plan.capacities, strict=True)
        pinned = tuple(select_pinned(pins, usage, n, capacity=slots) for n, slots in each)
        return replace(plan, pinned=pinned)

    def rank_experts(self, slots: Mapping[int, LayerSlots]) -> list[list[int]]:
        """Return which experts to load into each layer, in order; restore the counts of a state.

        Only experts with known usage are listed.
        """
        state = self.state
        restored = {} if state is None else restore_state(state, slots)
        return [
            list(dict.fromkeys(self._rank_layer(number, restored.get(number, ()), slots[number])))
            for number in sorted(slots)
        ]

    def _rank_layer(self, number: int, restored: Sequence[int], slots: LayerSlots) -> Iterator[int]:
        """Yield pinned experts, then those that had a slot, then the most frequent."""
        yield from sorted(slots.pinned)
        if self.state is not None and number in self.state.layers:
            had = {
                expert for expert in self.state.layers[number].cached_ids if expert != EMPTY_SLOT
            }
            yield from (expert for expert in restored if expert in had)
        if self.usage is not None:
            yield from self.usage.rank_experts(number)


def plan_cold_start(_: ExpertsConfig) -> WarmupPlan:
    """Return the plan of a base without usage and without options."""
    return WarmupPlan(COLD_START)


PlanWarmup = Callable[[ExpertsConfig], WarmupPlan]
"""Returns how a base with such experts starts; called only if not all of them fit."""


def warm_up_cache(cache: "ExpertCache", plan: WarmupPlan) -> None:
    """Fill the empty slots of a cache.

    Raises:
        InvalidPackageError: when a file of the base cannot be read.
    """
    slots = cache.slots_by_layer
    ranked = plan.rank_experts(slots)
    match plan.config.warmup:
        case "full":
            cache.fill_slots(ranked)
        case "hybrid":
            cache.schedule_fill(ranked)
        case "none":
            pass
    usage, rate = plan.usage, plan.config.exchange
    if rate > 0:  # unknown usage may be learnt
        counts = [{} if usage is None else usage.layer_counts(number) for number in sorted(slots)]
        cache.set_scores(counts, rate=rate)


@dataclass(frozen=True, slots=True)
class ProfileUpdate:
    """New pins and scores of a base in memory, by layer."""

    pinned: tuple[frozenset[int], ...]
    scores: "tuple[ExpertScores, ...]"
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
        profile: UsageProfile,
        cache: "ExpertCache",
        *,
        warmup: WarmupConfig,
    ) -> ProfileUpdate:
        """Return the changes of a profile that fits the base.

        Raises:
            IncompatibleError: when the profile counts no expert.
            UsageError: when that changes nothing, or a layer has fewer slots than pins.
        """
        profile.require_counts()
        pins = warmup.pins if self.pins is None else self.pins
        if pins is None and self.exchange is None and not warmup.exchange:
            raise UsageError(
                "the profile changes nothing: it neither pins experts nor swaps any",
                hint='also give "pin", such as 8 or "50%", or "exchange", such as 0.1',
            )
        layers = cache.slots_by_layer
        return ProfileUpdate(
            tuple(
                frozenset[int]()
                if pins is None
                else select_pinned(pins, profile, number, capacity=slots.capacity)
                for number, slots in layers.items()
            ),
            tuple(profile.layer_counts(number) for number in layers),
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


def find_active_profile(cache: "ExpertCache") -> ActiveProfile:
    """Return the current effect of profiles; any thread may call this."""
    each = cache.slots_by_layer.items()
    by_layer = {number: slots.pinned for number, slots in each if slots.pinned}
    return ActiveProfile(cache.exchange_rate, by_layer)


def describe_unused_option(base: str, option: str, *, what: str = "routed experts") -> str:
    """Return a warning that an option of routed experts has no effect on a base without any."""
    return f"{base} has no {what}: {option} has no effect"


def _equalise_layers(counts: Sequence[_Counts]) -> list[_Counts]:
    """Scale the counts of layers to the total of the layer with the fewest.

    A prompt runs the last layer for its last token only; a generated token runs all.
    """
    sums = [each.sum() for each in counts]
    minimum = min(sums, default=0.0)
    return [each * (minimum / max(total, 1.0)) for each, total in zip(counts, sums, strict=True)]


def _to_array(counts: Mapping[int, int], experts: int) -> _Counts:
    dense = np.zeros(experts)
    for expert, count in counts.items():
        dense[expert] = count
    return dense
