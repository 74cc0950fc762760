"""Bases of which some experts are in memory."""

from pathlib import Path

import pytest

from benchmarks.skipped.evaluation import BaseLoader, CacheConfiguration, make_cache_plan
from expertctl.engine.moe.layer_slots import estimate_transition_bytes


@pytest.fixture(scope="module")
def bases(base: Path) -> BaseLoader:
    return BaseLoader(base, threads=1)


@pytest.mark.parametrize(("share", "slots", "blocks"), [(1.0, 16, 32), (0.75, 8, 24), (0.1, 0, 16)])
def test_a_plan_has_no_more_blocks_than_its_share_unless_one_layer_needs_them(
    bases: BaseLoader, share: float, slots: int, blocks: int
) -> None:
    plan = make_cache_plan(bases.routed, share)
    assert (plan.slots, plan.blocks) == (slots, blocks)


def test_a_cache_begins_with_all_slots_filled(bases: BaseLoader) -> None:
    with bases.open_cache(CacheConfiguration(share=0.75)) as cache:
        followers = estimate_transition_bytes(layers=2, experts=16)
        assert cache.nbytes == 24 * cache.shape.nbytes + followers
        assert [sorted(slots.resident_ids) for slots in cache.slots] == [list(range(8))] * 2
        cache.check_integrity()
