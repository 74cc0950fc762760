"""A base of routed experts of which only some are in memory, held as runs hold it.

A share counts blocks: the slots of all layers, and the pool that all layers have together, which
holds as many as a layer has beyond its slots. So not every share can be had.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.miss_policy import EXACT, MissPolicy
from expertctl.engine.packed_base import expert_shape
from expertctl.engine.packed_load import load_packed_base
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import read_config
from expertctl.store.copy_file import always

Numbers = np.ndarray[Any, Any]
SCHEME = Scheme.FLOAT32
"""What bases are held in, so that the cost of skipping is not mixed with that of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The share of experts that is in memory, and what becomes of the others."""

    share: float
    policy: MissPolicy = EXACT


def plan_of(routed: ExpertsConfig, share: float) -> CachePlan:
    """Return the largest plan whose blocks are no more than a share of all experts."""
    layers, count = len(routed.layers), routed.count
    slots = int((share * layers * count - count) / (layers - 1) + 1e-9)
    return CachePlan(layers=layers, experts=count, slots=min(max(slots, 0), count))


class PackedExperts:
    """Copies experts from memory that is not counted, where they lie packed as in a copy of a base.

    That takes 10 microseconds, a quarter of what a layer takes to compute; reading one of these
    small experts from files and packing it takes 240, six layers.
    """

    def __init__(self, blocks: Mapping[tuple[int, int], Numbers]) -> None:
        """Copy from these, by layer and number."""
        self._blocks = blocks

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return its bytes."""
        np.copyto(block, self._blocks[layer, expert])
        return block.nbytes

    def lend(self, layer: int, expert: int) -> int | None:
        """Return None: an expert that is not resident is missing."""
        return None


class HeldBases:
    """One base in a directory, as several decoders would hold it, one after the other."""

    def __init__(self, directory: Path, *, threads: int) -> None:
        """Read all but the experts once."""
        self.config = read_config(directory)
        self.crew = Crew(threads)
        self.trunk = load_packed_base(directory, self.config, SCHEME, experts=False)
        self.whole = load_packed_base(directory, self.config, SCHEME)

    @property
    def routed(self) -> ExpertsConfig:
        """What its routed experts are."""
        assert self.config.experts is not None, "a base of routed experts"
        return self.config.experts

    @contextmanager
    def cache(self, holding: Holding) -> Iterator[ExpertCache]:
        """Hold some experts, for a while; slots begin with those of the lowest numbers."""
        routed, plan = self.routed, plan_of(self.routed, holding.share)
        memory = ExpertMemory(
            expert_shape(self.config, SCHEME),
            layers=plan.layers,
            experts=plan.experts,
            blocks=plan.blocks,
        )
        reader = PackedExperts(self.whole.experts)
        slots = [LayerSlots(experts=plan.experts, capacity=plan.slots) for _ in routed.layers]
        cache = ExpertCache(
            memory, reader, numbers=routed.layers, slots=slots, policy=holding.policy
        )
        try:
            cache.fill([[]] * plan.layers)
            yield cache
        finally:
            cache.close()
