"""How a base whose routed experts do not all fit begins: which come first, and which stay.

What is known of it comes from a file that the user names, else from its habits. It says which
experts to pin, how many slots each layer gets and which experts have them at first, and, where that
is wanted, which are exchanged later. It never changes an answer where nothing is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.cache_plan import CachePlan, adapted
from expertctl.engine.moe.guide import Guide
from expertctl.engine.moe.layer_slots import EMPTY, LayerSlots
from expertctl.engine.moe.pins import Pins, TopPins, pinned
from expertctl.engine.moe.saved_state import SavedState, restore
from expertctl.errors import UsageError
from expertctl.package.experts_config import ExpertsConfig

_Counts = NDArray[np.float64]
Warmup = Literal["none", "hybrid", "full"]
"""none: experts come when asked for; hybrid: known ones come beside the work; full: all before."""
WARMUPS: tuple[Warmup, ...] = get_args(Warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWishes:
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


USUAL = StartWishes()
UNKNOWN = StartWishes(warmup="none", learns=False)
"""For measurements: a user's habits change nothing, and nothing is learnt."""


@dataclass(frozen=True, slots=True)
class Start:
    """How one base begins: what is wished, and what is known of it."""

    wishes: StartWishes = USUAL
    guide: Guide | None = None
    state: SavedState | None = None

    def planned(self, plan: CachePlan, numbers: Sequence[int]) -> CachePlan:
        """Return a plan with slots and pins by what is known; ``numbers``: those of routed layers.

        Raises:
            UsageError: when more experts are to be pinned than a layer has slots.
        """
        guide, pins = self.guide, self.wishes.pins
        if guide is None:
            return plan
        counts = [guide.counts(number) for number in numbers]
        activations = _alike([_dense(counted, plan.experts) for counted in counts])
        least = pins.count if isinstance(pins, TopPins) else 1
        plan = adapted(plan, activations, least=min(least, plan.slots))
        if pins is None:
            return plan
        each = zip(numbers, plan.capacities, strict=True)
        named = tuple(pinned(pins, guide.usage, n, capacity=slots) for n, slots in each)
        return replace(plan, pinned=named)

    def ranked(self, slots: Mapping[int, LayerSlots]) -> list[list[int]]:
        """Return which experts to bring into each layer, in order; take over a state's counts.

        Only experts of which something is known are named.
        """
        state = self.state
        restored = {} if state is None else restore(state, slots)
        return [
            list(dict.fromkeys(self._known(number, restored.get(number, ()), slots[number])))
            for number in sorted(slots)
        ]

    def _known(self, number: int, restored: Sequence[int], slots: LayerSlots) -> Iterator[int]:
        """Yield pinned experts, those that had a slot, then those that were asked for most."""
        yield from sorted(slots.pinned)
        if self.state is not None and number in self.state.layers:
            had = {expert for expert in self.state.layers[number].cached_ids if expert != EMPTY}
            yield from (expert for expert in restored if expert in had)
        if self.guide is not None:
            yield from self.guide.usage.ranked(number)


def nowhere(_: ExpertsConfig) -> Start:
    """Return the start of a base of which nothing is known and nothing is wished."""
    return Start(StartWishes(warmup="none", learns=False))


StartOf = Callable[[ExpertsConfig], Start]
"""Returns how a base with such experts begins; asked only where not all of them fit."""


class Cache(Protocol):
    """What is filled: `ExpertCache`."""

    def fill(self, ranked: Sequence[Sequence[int]]) -> None:
        """Bring experts into all empty slots."""

    def expect(self, ranked: Sequence[Sequence[int]]) -> None:
        """Have experts come into empty slots while passes go on."""

    def guide(self, scores: Sequence[Mapping[int, int]], *, rate: float) -> None:
        """Let updates exchange experts for those that score more, too."""


def begin(cache: Cache, start: Start, slots: Mapping[int, LayerSlots]) -> None:
    """Give empty slots of a cache their first experts; ``slots`` by the number of the layer.

    Raises:
        InvalidPackageError: when a file of the base cannot be read.
    """
    ranked = start.ranked(slots)
    match start.wishes.warmup:
        case "full":
            cache.fill(ranked)
        case "hybrid":
            cache.expect(ranked)
        case "none":
            pass
    guide, rate = start.guide, start.wishes.exchange
    if rate > 0:  # where nothing is known yet, it may be learnt
        counts = [{} if guide is None else guide.counts(number) for number in sorted(slots)]
        cache.guide(counts, rate=rate)


def without_effect(base: str, option: str) -> str:
    """Return a warning that an option of routed experts was given for a base without any."""
    return f"{base} has no routed experts: {option} has no effect"


def parse_rate(rate: float) -> float:
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


def _alike(counts: Sequence[_Counts]) -> list[_Counts]:
    """Scale the counts of layers as if each was asked as often as the one that was asked least.

    A prompt asks the last layer for its last token alone; a token that is generated asks all.
    """
    sums = [each.sum() for each in counts]
    least = min(sums, default=0.0)
    return [each * (least / max(total, 1.0)) for each, total in zip(counts, sums, strict=True)]


def _dense(counts: Mapping[int, int], experts: int) -> _Counts:
    dense = np.zeros(experts)
    for expert, count in counts.items():
        dense[expert] = count
    return dense
