"""The cache of runs on a trace: whether experts are in memory when they are requested.

Slots and pool are divided as in runs. Experts are small and contain no weights. A missing expert is
read when it is requested, as with exact misses. Without prefetching, only experts that were
requested for an earlier token are in memory, and those read at the beginning. With prefetching, the
predictions of layers are given with the trace, and everything that the cache reads because of them
has arrived when the next layer requests it. `python -m benchmarks.routed.replay TRACE --foreseen
FORESEEN` compares the two.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cache_policies import Trace
from benchmarks.routed.decoders import BlockSplit
from benchmarks.routed.traced_base import Numbers, RoutedShape, make_shape, read_trace
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.expert_cache import ExpertCache, MissPolicy
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.routed_experts import RoutingChoices
from expertctl.store.quantised_file import always_wanted

_HIDDEN = _INTERMEDIATE = 16


@dataclass(frozen=True, slots=True)
class ReplayedTrace:
    """The hits of a trace, [tokens, layers], and the number of experts read."""

    hits: NDArray[np.int64]
    with_slot: NDArray[np.int64]
    """The hits in a slot; the others were in the pool."""
    reads: int
    split: BlockSplit


def replay(
    trace: Trace, shape: RoutedShape, *, share: float, likely: Trace | None = None
) -> ReplayedTrace:
    """Decode the tokens of a trace with blocks for a share of all experts.

    ``likely`` has the predictions of the layer before, in the trace's shape; those for layer 0 are
    ignored.
    """
    tokens, layers, used = trace.shape
    shape = replace(
        shape, layers=layers, used=used, hidden=_HIDDEN, heads=1, intermediate=_INTERMEDIATE
    )
    split = split_expert_blocks(shape, int(share * shape.experts) * layers)
    routed = shape.make_config().experts
    assert routed is not None
    room = RoutingChoices(routed, tokens=1)
    hits, with_slot = np.zeros((2, tokens, layers), np.int64)
    with closing(_make_replay_cache(shape, split, reads_ahead=likely is not None)) as cache:
        cache.fill_slots([[]] * layers)
        before = cache.activity().loads
        for number, asked in enumerate(trace):
            room.selected[:, 0] = asked
            if likely is not None:
                room.likely[:, 0] = likely[number]
            for layer, slots in enumerate(cache.slots):
                cache.take_in(layer, room.likely[layer, 0].tolist())
                hits[number, layer] = cache.hits(layer)[asked[layer]].sum()
                with_slot[number, layer] = slots.hit_mask[asked[layer]].sum()
                cache.load(layer, room, 1)
            cache.end_pass(room, 1, phase=Phase.DECODE)
        reads = cache.activity().loads - before
    return ReplayedTrace(hits, with_slot, reads, split)


def split_expert_blocks(shape: RoutedShape, blocks: int) -> BlockSplit:
    """Divide so many blocks into slots and pool, as runs do.

    The number of slots leaves a pool for the experts of a layer that have none; if even that is too
    much, all blocks belong to the pool.
    """
    able = range(shape.experts, 0, -1)
    plans = (CachePlan(layers=shape.layers, experts=shape.experts, slots=each) for each in able)
    slots = next((plan.slots for plan in plans if plan.blocks <= blocks), 0)
    return BlockSplit(slots, blocks - shape.layers * slots)


class _InstantReader:
    """A reader that takes no time."""

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Leave the block unchanged."""
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Offer no expert for computing in place."""
        return None


class _PunctualCache(ExpertCache):
    """A cache in which all predicted experts arrive in time."""

    def take_in(self, layer: int, likely: Sequence[int]) -> None:
        """Wait for those of them that are still being read."""
        wanted = [(layer, expert) for expert in likely]
        self._assign_slots(self._loader.finish_reads(wanted, wanted))


def _make_replay_cache(
    shape: RoutedShape, split: BlockSplit, *, reads_ahead: bool
) -> _PunctualCache:
    layers, experts = shape.layers, shape.experts
    memory = ExpertMemory(
        ExpertShape(Scheme.FLOAT32, _HIDDEN, _INTERMEDIATE),
        layers=layers,
        experts=experts,
        blocks=layers * split.slots + split.pool,
    )
    slots = [LayerSlots(experts=experts, capacity=split.slots) for _ in range(layers)]
    policy = MissPolicy(prefetches=reads_ahead)
    return _PunctualCache(
        memory, _InstantReader(), layer_numbers=range(layers), slots=slots, policy=policy, threads=1
    )


def main() -> None:
    """Command line: the trace of requests, and the predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="what tokens asked for, .npy")
    parser.add_argument("--foreseen", type=Path, required=True, help="what layers foresaw, .npy")
    parser.add_argument("--share", type=float, default=0.4, help="of all experts in memory")
    options = parser.parse_args()
    trace, foreseen = read_trace(options.trace), read_trace(options.foreseen)
    shape = make_shape(trace, layers=trace.shape[1])
    for name, likely in (("nothing read ahead", None), ("read ahead", foreseen)):
        found = replay(trace, shape, share=options.share, likely=likely)
        hits, tokens = found.hits.sum() / trace.size, len(trace)
        print(f"{name}: {hits:.1%} there when asked for, {found.reads / tokens:.2f} read a token")


if __name__ == "__main__":
    main()
