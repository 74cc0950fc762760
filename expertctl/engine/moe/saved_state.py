"""Which experts were resident and what they were worth, as JSON: a cache that begins warm.

The document is that of flash-moe, version 1; others are refused. It has no weights: those are read
from the base again, at once, and not as one token after the other asks for them. An empty slot is
written as -1. Where the number of a layer's slots has changed since, the experts that were worth
most come first.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from expertctl.engine.moe.activity_document import MOST
from expertctl.engine.moe.large_document import checked, load_document
from expertctl.engine.moe.layer_slots import EMPTY, LayerSlots
from expertctl.errors import IncompatibleError, InvalidPackageError

VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerState:
    """The slots of one layer as they were, by slot, and of each expert its count and last use."""

    cached_ids: tuple[int, ...]
    frequency: Mapping[int, float]
    last_active: Mapping[int, int]
    step: int


@dataclass(frozen=True, slots=True)
class SavedState:
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


def state_of(slots: Mapping[int, LayerSlots], *, timestamp: float, prompt: str = "") -> SavedState:
    """Return the state of all layers, by their number."""
    layers = {number: _saved(layer) for number, layer in sorted(slots.items())}
    return SavedState(timestamp, prompt, layers)


def restore(state: SavedState, slots: Mapping[int, LayerSlots]) -> dict[int, list[int]]:
    """Take over counts into empty slots; return which experts to bring into each layer.

    They are in the order of free slots. A layer that was not saved begins without counts.

    Raises:
        IncompatibleError: when an expert was saved that a layer does not have.
    """
    for number, layer in slots.items():
        _check_layer(state, number, experts=layer.experts)
    return {n: _restored(state.layers.get(n), layer) for n, layer in sorted(slots.items())}


def check_state(state: SavedState, layers: Iterable[int], *, experts: int) -> None:
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


def read_state(data: bytes, *, what: str) -> SavedState:
    """Read a state.

    Raises:
        InvalidPackageError: when it is of another version, malformed or too large.
    """
    document = load_document(data, what=what)
    told = checked(document, _Document, what=what, schema="moe-state")
    if problems := list(_contradictions(told)):
        raise InvalidPackageError(what, problems)
    layers = {int(number): _layer(record) for number, record in told.layers.items()}
    prompt = told.metadata.prompt
    return SavedState(told.timestamp, prompt, dict(sorted(layers.items())))


def write_state(state: SavedState) -> bytes:
    """Return a state as JSON."""
    document = {
        "version": VERSION,
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


class _Metadata(msgspec.Struct):
    prompt: str = ""


class _Layer(msgspec.Struct):
    cached_ids: list[int]
    frequency: dict[str, float]
    last_active: dict[str, int]
    step: int


class _Document(msgspec.Struct):
    layers: dict[str, _Layer]
    timestamp: float = 0.0
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


def _check_layer(state: SavedState, number: int, *, experts: int) -> None:
    saved = state.layers.get(number)
    if saved and (highest := max(_named(saved), default=0)) >= experts:
        raise IncompatibleError(
            f"the saved state has expert {highest} in layer {number}, where there are {experts}",
            hint="delete it; it is of another base",
        )


def _saved(layer: LayerSlots) -> LayerState:
    """Return the state of a layer; numbers that some readers of JSON cannot hold are capped."""
    known = [expert for expert in range(layer.experts) if layer.counts[expert]]
    return LayerState(
        cached_ids=tuple(int(expert) for expert in layer.ids),
        frequency={expert: float(layer.counts[expert]) for expert in known},
        last_active={expert: min(int(layer.last_used[expert]), MOST) for expert in known},
        step=min(layer.step, MOST),
    )


def _restored(saved: LayerState | None, layer: LayerSlots) -> list[int]:
    if saved is None:
        return layer.first_residents()
    layer.step = saved.step
    for expert, count in saved.frequency.items():
        layer.counts[expert] = count
        layer.last_used[expert] = saved.last_active.get(expert, 0)
    residents = [expert for expert in saved.cached_ids if expert != EMPTY]
    worth = layer.priorities()
    best = sorted(residents, key=lambda expert: (-worth[expert], expert))
    bring = layer.first_residents(best)
    return sorted(bring, key=lambda expert: (expert not in residents, _at(residents, expert)))


def _at(residents: list[int], expert: int) -> int:
    """Return an expert's place among residents; for others the id, which keeps their order."""
    return residents.index(expert) if expert in residents else expert


def _layer(record: _Layer) -> LayerState:
    return LayerState(
        cached_ids=tuple(record.cached_ids),
        frequency={int(e): count for e, count in record.frequency.items()},
        last_active={int(e): at for e, at in record.last_active.items()},
        step=record.step,
    )


def _named(saved: LayerState) -> set[int]:
    return {*saved.cached_ids, *saved.frequency, *saved.last_active}


def _contradictions(document: _Document) -> Iterable[str]:
    """Yield what a schema cannot say: an expert in two slots, a use after the last step."""
    for number, layer in document.layers.items():
        residents = [expert for expert in layer.cached_ids if expert != EMPTY]
        if len(set(residents)) != len(residents):
            yield f"layers/{number}/cached_ids: an expert is there twice"
        if (last := max(layer.last_active.values(), default=0)) > layer.step:
            yield f"layers/{number}/last_active: {last} is after the last step, {layer.step}"
