"""A profile for a base that runs: checked whole in any thread, taken over between two passes.

What is wrong with it is told before anything is changed. It says whom to pin from then on, and for
whom updates may exchange residents; slots stay as many as each layer has. Answers stay the same
where nothing is left out. It lasts as long as the base is in memory: habits are left as they are.
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
    """What takes a profile over: `ExpertCache`. Its own thread does so, between two passes."""

    @property
    def slots(self) -> tuple[LayerSlots, ...]:
        """Who has a slot in each layer, and who is pinned there."""

    @property
    def exchange_rate(self) -> float:
        """The share of all residents that a profile may exchange in an update."""

    def pin(self, experts: Sequence[frozenset[int]]) -> None:
        """Have these of each layer stay, and those come who are absent."""

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        """Let updates exchange experts for those that score more, too."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a base in memory is to do from now on, layer by layer."""

    pinned: tuple[frozenset[int], ...]
    scores: tuple[Scores, ...]
    rate: float

    def apply(self, cache: Guided) -> None:
        """Have it done; between two passes."""
        cache.pin(self.pinned)
        cache.guide(self.scores, rate=self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWishes:
    """What of a profile is to count; None: what was wished when the base was opened."""

    pins: Pins | None = None
    exchange: float | None = None

    def adoption(
        self, guide: Guide, cache: Guided, routed: ExpertsConfig, *, started: StartWishes
    ) -> Adoption:
        """Return what a base does by a profile that fits it.

        Raises:
            IncompatibleError: when it says nothing of anybody.
            UsageError: when that is nothing, or experts are to be pinned that have no slots.
        """
        guide.demand_counts()
        pins = started.pins if self.pins is None else self.pins
        if pins is None and self.exchange is None and not started.exchange:
            raise UsageError(
                "a profile changes nothing where nobody is pinned and nothing exchanged for it",
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
    """What a profile does to a base in memory now, for whoever asks."""

    exchange: float
    pinned: Mapping[int, frozenset[int]]
    """By the number of the layer; of layers that have pins alone."""

    def to_json(self) -> JsonObject:
        """Return the ``guide`` object."""
        layers = sorted(self.pinned.items())
        return {
            "exchange": self.exchange,
            "pinned": {str(number): [*sorted(experts)] for number, experts in layers},
        }


def guidance_of(cache: Guided, routed: ExpertsConfig) -> Guidance:
    """Return what is done now; any thread may ask."""
    each = zip(routed.layers, cache.slots, strict=True)
    by_layer = {number: slots.pinned for number, slots in each if slots.pinned}
    return Guidance(cache.exchange_rate, by_layer)
