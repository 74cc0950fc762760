"""Which routed slots each lane computes, and in which order.

A routed slot is one of the experts of one token; its source is ``token * used + choice``. An expert
lies in a slot of one of up to three hot lanes, or its slots go to the cold lane. Every routed slot
is in exactly one lane, once; a slot that names no expert (-1) is in none.

A lane has room for all slots. An entry that it does not fill has the source behind the last one,
the token behind the last one and no weight; in a hot lane it names the dummy, an expert of zeros
behind the last slot, so that a product over the whole lane needs no condition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
Order = Literal["token_major", "expert_major", "token_aligned"]

MOST_LANES = 3
COLD = -1
"""The lane of an expert that is in no hot one; also the place of an entry without an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneMap:
    """Where the experts of one layer lie."""

    lanes: Ids
    """[experts]: the number of a hot lane, or -1."""
    slots: Ids
    """[experts]: the slot in that lane; of no meaning for cold experts."""
    sizes: tuple[int, ...]
    """Slots of each hot lane; that number is also the place of its dummy."""

    def check_integrity(self) -> None:
        """Assert that each expert has a slot that exists, and each slot at most one expert."""
        assert len(self.sizes) <= MOST_LANES
        assert ((self.lanes >= COLD) & (self.lanes < len(self.sizes))).all()
        for lane, size in enumerate(self.sizes):
            slots = self.slots[self.lanes == lane]
            assert ((slots >= 0) & (slots < size)).all()
            assert np.unique(slots).size == slots.size


def one_lane(slots: NDArray[np.integer], size: int) -> LaneMap:
    """Return the map of one hot lane from expert to slot; -1 and the dummy's are cold."""
    ids = slots.astype(np.int64)
    return LaneMap(np.where((ids >= 0) & (ids < size), 0, COLD), ids, (size,))


def several_lanes(lanes: NDArray[np.integer]) -> LaneMap:
    """Return the map of hot lanes whose slots are filled by ascending expert id."""
    numbers = lanes.astype(np.int64)
    slots = np.full(numbers.size, COLD)
    members = [np.flatnonzero(numbers == lane) for lane in range(int(numbers.max(initial=-1)) + 1)]
    for experts in members:
        slots[experts] = np.arange(experts.size)
    return LaneMap(numbers, slots, tuple(experts.size for experts in members))


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The routed slots of one lane, and its empty entries; all arrays have an element for each."""

    places: Ids
    """Slots of a hot lane, experts in the cold one."""
    sources: Ids
    tokens: Ids
    weights: Weights
    experts: Ids
    """Experts as the model numbers them; -1 where empty."""
    count: int

    @property
    def filled(self) -> NDArray[np.bool_]:
        """Which entries are routed slots."""
        return self.sources < self.sources.size


@dataclass(frozen=True, slots=True, eq=False)
class Worklist:
    """The routed slots of some tokens in one layer, split into lanes."""

    tokens: int
    used: int
    hot: tuple[Lane, ...]
    cold: Lane

    def __iter__(self) -> Iterator[Lane]:
        """Go over the lanes, the cold one last."""
        yield from self.hot
        yield self.cold

    @property
    def capacity(self) -> int:
        """Routed slots, with those that name no expert."""
        return self.tokens * self.used

    def check_integrity(self) -> None:
        """Assert that no routed slot is there twice, and that empty entries are empty."""
        sources = np.concatenate([lane.sources[lane.filled] for lane in self])
        assert np.unique(sources).size == sources.size
        for lane in self:
            assert lane.count == lane.filled.sum()
            assert (lane.tokens == lane.sources // max(self.used, 1)).all()
            assert not lane.weights[~lane.filled].any()


def build_worklist(
    selected: NDArray[np.integer],
    weights: NDArray[np.floating],
    lane_map: LaneMap,
    order: Order,
    *,
    dummy: bool = True,
) -> Worklist:
    """Split what was routed, both [tokens, used], into lanes.

    Entries are in the order of their sources (token-major), by place and then by source
    (expert-major), or stay where their source is (token-aligned). Without a ``dummy`` the empty
    entries of hot lanes name -1, as those of the cold lane always do.
    """
    tokens, used = selected.shape
    experts = selected.reshape(-1).astype(np.int64)
    flat = weights.reshape(-1).astype(np.float32)
    lanes = np.where(experts < 0, MOST_LANES, lane_map.lanes[experts])

    def fill(lane: int, places: Ids, empty: int) -> Lane:
        sources = np.flatnonzero(lanes == lane)
        if order == "expert_major":
            sources = sources[np.argsort(places[sources], kind="stable")]
        at = sources if order == "token_aligned" else np.arange(sources.size)
        return _lane(sources, at, places, empty, experts, flat, used)

    slots = lane_map.slots[experts]
    hot = (fill(lane, slots, size if dummy else COLD) for lane, size in enumerate(lane_map.sizes))
    return Worklist(tokens, used, tuple(hot), fill(COLD, experts, COLD))


def _lane(
    sources: Ids, at: Ids, places: Ids, empty: int, experts: Ids, weights: Weights, used: int
) -> Lane:
    """Return a lane with these sources at these entries; the rest is looked up by source."""
    capacity = experts.size
    filled = np.full(capacity, capacity)
    filled[at] = sources

    def by_source(values: Ids, otherwise: int) -> Ids:
        result = np.full(capacity, otherwise)
        result[at] = values[sources]
        return result

    kept = np.zeros(capacity, np.float32)
    kept[at] = weights[sources]
    return Lane(
        places=by_source(places, empty),
        sources=filled,
        tokens=filled // max(used, 1),
        weights=kept,
        experts=by_source(experts, COLD),
        count=sources.size,
    )
