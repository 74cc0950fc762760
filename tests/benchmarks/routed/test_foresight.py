"""How much of what is foreseen is made wrong."""

from contextlib import closing

import numpy as np

from benchmarks.routed.expert_sources import RIGHT_SHARE, ImperfectPrefetchCache, MemoryExperts
from expertctl.engine.cpu.base_loader import create_random_base
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.routed_experts import RoutingChoices
from tests.benchmarks.routed.conftest import SHAPE


def test_as_much_is_wrong_as_is_said_and_what_was_chosen_stays() -> None:
    config = SHAPE.make_config()
    base = create_random_base(config, Scheme.BFLOAT16)
    shape = make_expert_shape(config, Scheme.BFLOAT16)
    memory = ExpertMemory(shape, layers=2, experts=8, blocks=16)
    slots = [LayerSlots(experts=8, capacity=8) for _ in range(2)]
    room = RoutingChoices(config.experts, tokens=1)
    room.selected[...] = 5
    changed = []
    with closing(
        ImperfectPrefetchCache(
            memory, MemoryExperts(base.experts), layer_numbers=(0, 1), slots=slots
        )
    ) as cache:
        cache.fill_slots([[], []])
        for _ in range(4000):
            room.likely[...] = 3
            for layer in range(2):
                cache.load(layer, room, 1)
            changed.append(float(np.mean(room.likely[1] != 3)))
    assert abs(np.mean(changed) - (1 - RIGHT_SHARE) * 7 / 8) < 0.02, (
        "one of eight is right by chance"
    )
    assert (room.selected == 5).all()
    assert (room.likely[0] == 3).all(), "nobody foresees the first layer"
