"""What is set aside for what is known of routed experts is what it takes, of two large bases."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.cache_plan import (
    estimate_cache_metadata_bytes,
    estimate_resident_bookkeeping_bytes,
)
from expertctl.engine.moe.counters import Counters, Phase
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ExpertMemory, Numbers
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.routed_experts import ResidentExperts, RoutingChoices
from expertctl.engine.moe.usage_profile import (
    UsageProfile,
    build_counted_profile,
)
from expertctl.package.architectures import ExpertsConfig
from expertctl.store.quantised_file import always_wanted

pytestmark = pytest.mark.all

PROMPT = 512
SHAPE = ExpertShape(Scheme.FLOAT32, 16, 16)


class Blank:
    """Reads experts that are nothing."""

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> None:
        return None


@pytest.fixture(params=[(48, 128), (16, 64)], ids=["48 x 128", "16 x 64"])
def routed(request: pytest.FixtureRequest) -> ExpertsConfig:
    layers, experts = request.param
    return ExpertsConfig(
        count=experts, used=8, intermediate_size=16, layers=tuple(range(layers)),
        scoring="softmax", normalised=True, choice_bias=False, scale=1.0, shared_size=0,
        shared_gate=False,
    )  # fmt: skip


def choices(routed: ExpertsConfig) -> RoutingChoices:
    """What a prompt asks for, the first experts more often."""
    drawn = np.random.default_rng(7)
    room = RoutingChoices(routed, tokens=PROMPT)
    likely = 1.0 / np.arange(1, routed.count + 1)
    for layer in room.selected:
        ranks = drawn.random((PROMPT, routed.count)) ** (1 / likely)
        layer[:] = ranks.argpartition(-routed.used)[:, -routed.used :]
    room.weights[:] = 1 / routed.used
    return room


@contextmanager
def most_is(bound: int) -> Iterator[None]:
    """Demand that what is taken meanwhile, at its most, is within a bound and no small part."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bound // 2 < most <= bound


def test_what_is_known_where_experts_are_missing_is_set_aside(routed: ExpertsConfig) -> None:
    room, slots = choices(routed), routed.count * 2 // 5
    layers = len(routed.layers)
    with most_is(estimate_cache_metadata_bytes(routed)):
        memory = ExpertMemory(
            SHAPE, layers=layers, experts=routed.count, blocks=layers * slots + routed.count - slots
        )
        of_each = [LayerSlots(experts=routed.count, capacity=slots) for _ in routed.layers]
        with closing(
            ExpertCache(memory, Blank(), layer_numbers=routed.layers, slots=of_each)
        ) as cache:
            for tokens, phase in (
                (PROMPT, Phase.PROMPT),
                (16, Phase.DECODE),
                (PROMPT, Phase.PROMPT),
            ):
                for _ in range(1 if tokens == PROMPT else 17):
                    for layer in range(layers):
                        cache.load(layer, room, tokens)
                    cache.end_pass(room, tokens, phase=phase)
            guide, *_ = learnt(cache.counters, routed)
            cache.set_scores([guide.layer_counts(number) for number in routed.layers], rate=0.1)


def test_what_is_known_where_all_are_in_memory_is_set_aside(routed: ExpertsConfig) -> None:
    room, block = choices(routed), np.zeros(1, np.uint8)
    blocks = {(n, e): block for n in routed.layers for e in range(routed.count)}
    with most_is(estimate_resident_bookkeeping_bytes(routed)):
        whole = ResidentExperts(SHAPE, blocks, routed.layers)
        for tokens, phase in ((PROMPT, Phase.PROMPT), (16, Phase.DECODE)):
            for _ in range(80):
                whole.end_pass(room, tokens, phase=phase)
        assert learnt(whole.counters, routed)


def learnt(counters: Counters, routed: ExpertsConfig) -> tuple[UsageProfile, UsageProfile]:
    """What is kept by whoever learns: what was counted before, which is a guide, and now."""
    before, now = (
        build_counted_profile(counters.cumulative_snapshot(), used=routed.used) for _ in range(2)
    )
    before.check_fits(routed)
    return before, now
