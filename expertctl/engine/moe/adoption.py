"""A profile for a running base: checked as a whole in any thread, applied between two passes.

Errors in it are reported before anything is changed. It says which experts to pin from then on, and
for which ones updates may exchange residents; each layer keeps its number of slots. Answers stay
the same where no expert is left out. It lasts as long as the base is in memory: habits stay as is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from expertctl.engine.moe.exchanges import Scores
from expertctl.engine.moe.guide import Guide
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.pins import Pins, pinned
from expertctl.engine.moe.start import StartWishes
from expertctl.errors import UsageError
from expertctl.package.experts_config import ExpertsConfig
from expertctl.schema.strict_json import JsonObject


class Guided(Protocol):
    """What a profile is applied to: `ExpertCache`, in its own thread, between two passes."""

    @property
    def slots(self) -> tuple[LayerSlots, ...]:
        """The slots of each layer: which experts are resident and which are pinned."""

    @property
    def exchange_rate(self) -> float:
        """The share of all residents that a profile may exchange in an update."""

    def pin(self, experts: Sequence[frozenset[int]]) -> None:
        """Pin these experts of each layer, and bring those that are absent."""

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        """Let updates also exchange experts for ones with higher scores."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """The pins and scores of a base in memory from now on, layer by layer."""

    pinned: tuple[frozenset[int], ...]
    scores: tuple[Scores, ...]
    rate: float

    def apply(self, cache: Guided) -> None:
        """Apply it to a cache; between two passes."""
        cache.pin(self.pinned)
        cache.guide(self.scores, rate=self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWishes:
    """How to apply a profile; None: as wished when the base was opened."""

    pins: Pins | None = None
    exchange: float | None = None

    def adoption(
        self, guide: Guide, cache: Guided, routed: ExpertsConfig, *, started: StartWishes
    ) -> Adoption:
        """Return what a profile that fits a base makes it do.

        Raises:
            IncompatibleError: when the profile counts no expert.
            UsageError: when that changes nothing, or a layer has fewer slots than pins.
        """
        guide.demand_counts()
        pins = started.pins if self.pins is None else self.pins
        if pins is None and self.exchange is None and not started.exchange:
            raise UsageError(
                "a profile changes nothing where it neither pins experts nor exchanges any",
                hint='give "pin", such as 8 or "50%", or "exchange", such as 0.1, too',
            )
        return Adoption(
            tuple(
                frozenset[int]()
                if pins is None
                else pinned(pins, guide.usage, number, capacity=slots.capacity)
                for number, slots in zip(routed.layers, cache.slots, strict=True)
            ),
            tuple(guide.counts(number) for number in routed.layers),
            started.exchange if self.exchange is None else self.exchange,
        )


@dataclass(frozen=True, slots=True)
class Guidance:
    """What a profile does to a base in memory now."""

    exchange: float
    pinned: Mapping[int, frozenset[int]]
    """By the number of the layer; only of layers that have pins."""

    def to_json(self) -> JsonObject:
        """Return the ``guide`` object."""
        layers = sorted(self.pinned.items())
        return {
            "exchange": self.exchange,
            "pinned": {str(number): [*sorted(experts)] for number, experts in layers},
        }


def guidance_of(cache: Guided, routed: ExpertsConfig) -> Guidance:
    """Return what a profile does now; any thread may call this."""
    each = zip(routed.layers, cache.slots, strict=True)
    by_layer = {number: slots.pinned for number, slots in each if slots.pinned}
    return Guidance(cache.exchange_rate, by_layer)
