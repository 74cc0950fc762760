"""Which experts were resident and what they were worth, as JSON: a cache that begins warm.

The document is that of flash-moe, version 1; others are refused. It has no weights: those are read
from the base again, at once, and not as one token after the other asks for them. An empty slot is
written as -1. Where the number of a layer's slots has changed since, the experts that were worth
most come first.

How a base whose routed experts do not all fit begins: which come first, and which stay.

What is known of it comes from a file that the user names, else from its habits. It says which
experts to pin, how many slots each layer gets and which experts have them at first, and, where that
is wanted, which are exchanged later. It never changes an answer where nothing is left out.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.activity import MAX_JSON_INTEGER, load_document, parse_document
from expertctl.engine.moe.cache_plan import CachePlan, adapt_plan
from expertctl.engine.moe.layer_slots import EMPTY_SLOT, LayerSlots
from expertctl.engine.moe.usage_profile import ExpertUsage, Pins, TopPins, select_pinned
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.package.architectures import ExpertsConfig

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerState:
    """The slots of one layer as they were, by slot, and of each expert its count and last use."""

    cached_ids: tuple[int, ...]
    frequency: Mapping[int, float]
    last_active: Mapping[int, int]
    step: int


@dataclass(frozen=True, slots=True)
class SavedCacheState:
    """All layers of a base as they were."""

    timestamp: float
    """Seconds since 1970."""
    prompt: str
    """The prompt, or whatever else, that warmed the cache; may be empty."""
    layers: Mapping[int, LayerState]

    @property
    def capacity(self) -> int:
        """The slots of the layer that has most."""
        return max((len(layer.cached_ids) for layer in self.layers.values()), default=0)


def capture_state(
    slots: Mapping[int, LayerSlots], *, timestamp: float, prompt: str = ""
) -> SavedCacheState:
    """Return the state of all layers, by their number."""
    layers = {number: _capture_layer(layer) for number, layer in sorted(slots.items())}
    return SavedCacheState(timestamp, prompt, layers)


def restore_state(state: SavedCacheState, slots: Mapping[int, LayerSlots]) -> dict[int, list[int]]:
    """Take over counts into empty slots; return which experts to bring into each layer.

    They are in the order of free slots. A layer that was not saved begins without counts.

    Raises:
        IncompatibleError: when an expert was saved that a layer does not have.
    """
    for number, layer in slots.items():
        _check_layer(state, number, experts=layer.experts)
    return {n: _restore_layer(state.layers.get(n), layer) for n, layer in sorted(slots.items())}


def check_state(state: SavedCacheState, layers: Iterable[int], *, experts: int) -> None:
    """Demand that a state can be restored in layers that have so many experts.

    Raises:
        IncompatibleError: when a layer was saved that is none of them, or an expert that a layer
            does not have.
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
    told = parse_document(document, _StateDocument, what=what, schema="moe-state")
    if problems := list(_find_contradictions(told)):
        raise InvalidPackageError(what, problems)
    layers = {int(number): _parse_layer(record) for number, record in told.layers.items()}
    prompt = told.metadata.prompt
    return SavedCacheState(told.timestamp, prompt, dict(sorted(layers.items())))


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
    """Return the state of a layer; numbers that some readers of JSON cannot hold are capped."""
    known = [expert for expert in range(layer.experts) if layer.counts[expert]]
    return LayerState(
        cached_ids=tuple(int(expert) for expert in layer.ids),
        frequency={expert: float(layer.counts[expert]) for expert in known},
        last_active={
            expert: min(int(layer.last_used[expert]), MAX_JSON_INTEGER) for expert in known
        },
        step=min(layer.step, MAX_JSON_INTEGER),
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
    return sorted(
        bring, key=lambda expert: (expert not in residents, _resident_order(residents, expert))
    )


def _resident_order(residents: list[int], expert: int) -> int:
    """Return an expert's place among residents; for others the id, which keeps their order."""
    return residents.index(expert) if expert in residents else expert


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
    """Yield what a schema cannot say: an expert in two slots, a use after the last step."""
    for number, layer in document.layers.items():
        residents = [expert for expert in layer.cached_ids if expert != EMPTY_SLOT]
        if len(set(residents)) != len(residents):
            yield f"layers/{number}/cached_ids: an expert is there twice"
        if (last := max(layer.last_active.values(), default=0)) > layer.step:
            yield f"layers/{number}/last_active: {last} is after the last step, {layer.step}"


_Counts = NDArray[np.float64]
Warmup = Literal["none", "hybrid", "full"]
"""none: experts come when asked for; hybrid: known ones come beside the work; full: all before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """How a user wants routed experts to begin, whatever the base is."""

    profile: Path | None = None
    """The file that is used instead of habits."""
    pins: Pins | None = None
    warmup: Warmup = "hybrid"
    exchange: float = 0.0
    """The share of all residents that a profile may exchange in an update, from 0, none, to 1."""
    learns: bool = True
    """Whether habits are kept, and used."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the user gave; those that a setting may give too are not among them."""
        given = (
            ("--moe-profile", self.profile is not None),
            ("--moe-pin", self.pins is not None),
            ("--moe-exchange", self.exchange > 0),
        )
        return tuple(option for option, is_given in given if is_given)


DEFAULT_WARMUP = WarmupConfig()
COLD_START = WarmupConfig(warmup="none", learns=False)
"""For measurements: a user's habits change nothing, and nothing is learnt."""


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """How one base begins: what is wished, and what is known of it."""

    config: WarmupConfig = DEFAULT_WARMUP
    usage: ExpertUsage | None = None
    state: SavedCacheState | None = None

    def adapt_cache_plan(self, plan: CachePlan, layer_numbers: Sequence[int]) -> CachePlan:
        """Return a plan with slots and pins by what is known; ``numbers``: those of routed layers.

        Raises:
            UsageError: when more experts are to be pinned than a layer has slots.
        """
        guide, pins = self.usage, self.config.pins
        if guide is None:
            return plan
        counts = [guide.layer_counts(number) for number in layer_numbers]
        activations = _equalise_layers([_to_array(counted, plan.experts) for counted in counts])
        least = pins.count if isinstance(pins, TopPins) else 1
        plan = adapt_plan(plan, activations, minimum=min(least, plan.slots))
        if pins is None:
            return plan
        each = zip(layer_numbers, plan.capacities, strict=True)
        named = tuple(select_pinned(pins, guide, n, capacity=slots) for n, slots in each)
        return replace(plan, pinned=named)

    def rank_experts(self, slots: Mapping[int, LayerSlots]) -> list[list[int]]:
        """Return which experts to bring into each layer, in order; take over a state's counts.

        Only experts of which something is known are named.
        """
        state = self.state
        restored = {} if state is None else restore_state(state, slots)
        return [
            list(dict.fromkeys(self._rank_layer(number, restored.get(number, ()), slots[number])))
            for number in sorted(slots)
        ]

    def _rank_layer(self, number: int, restored: Sequence[int], slots: LayerSlots) -> Iterator[int]:
        """Yield pinned experts, those that had a slot, then those that were asked for most."""
        yield from sorted(slots.pinned)
        if self.state is not None and number in self.state.layers:
            had = {
                expert for expert in self.state.layers[number].cached_ids if expert != EMPTY_SLOT
            }
            yield from (expert for expert in restored if expert in had)
        if self.usage is not None:
            yield from self.usage.rank_experts(number)


def plan_cold_start(_: ExpertsConfig) -> WarmupPlan:
    """Return the start of a base of which nothing is known and nothing is wished."""
    return WarmupPlan(WarmupConfig(warmup="none", learns=False))


PlanWarmup = Callable[[ExpertsConfig], WarmupPlan]
"""Returns how a base with such experts begins; asked only where not all of them fit."""


def warm_up_cache(cache: "ExpertCache", plan: WarmupPlan, slots: Mapping[int, LayerSlots]) -> None:
    """Give empty slots of a cache their first experts; ``slots`` by the number of the layer.

    Raises:
        InvalidPackageError: when a file of the base cannot be read.
    """
    ranked = plan.rank_experts(slots)
    match plan.config.warmup:
        case "full":
            cache.fill_slots(ranked)
        case "hybrid":
            cache.schedule_fill(ranked)
        case "none":
            pass
    guide, rate = plan.usage, plan.config.exchange
    if rate > 0:  # where nothing is known yet, it may be learnt
        counts = [{} if guide is None else guide.layer_counts(number) for number in sorted(slots)]
        cache.set_scores(counts, rate=rate)


def describe_unused_option(base: str, option: str) -> str:
    """Return a warning that an option of routed experts was given for a base without any."""
    return f"{base} has no routed experts: {option} has no effect"


def check_exchange_rate(rate: float) -> float:
    """Demand a share of residents.

    Raises:
        UsageError: when it is none.
    """
    if not 0.0 <= rate <= 1.0:
        raise UsageError(
            f"--moe-exchange {rate} is not a share of the experts that have a slot",
            hint="it goes from 0, a profile exchanges none, to 1",
        )
    return rate


def _equalise_layers(counts: Sequence[_Counts]) -> list[_Counts]:
    """Scale the counts of layers as if each was asked as often as the one that was asked least.

    A prompt asks the last layer for its last token alone; a token that is generated asks all.
    """
    sums = [each.sum() for each in counts]
    least = min(sums, default=0.0)
    return [each * (least / max(total, 1.0)) for each, total in zip(counts, sums, strict=True)]


def _to_array(counts: Mapping[int, int], experts: int) -> _Counts:
    dense = np.zeros(experts)
    for expert, count in counts.items():
        dense[expert] = count
    return dense
