"""The cache of runs on a trace that somebody wrote."""

import numpy as np
import pytest

from benchmarks.cache_policies import belady, best_static, lru, make_drifting_trace
from benchmarks.routed.decoders import BlockSplit
from benchmarks.routed.replay import replay, split_expert_blocks
from benchmarks.routed.traced_base import RoutedShape


def test_slots_and_pool_take_the_blocks_that_others_have() -> None:
    many = split_expert_blocks(RoutedShape(layers=16), 25 * 16)
    assert 16 * many.slots + many.pool == 25 * 16
    assert many.pool >= 64 - many.slots > many.pool - 16, "one slot more would not fit"
    assert split_expert_blocks(RoutedShape(layers=2), 128) == BlockSplit(64, 0)
    assert split_expert_blocks(RoutedShape(layers=2), 50) == BlockSplit(0, 50)


def test_who_is_asked_for_again_is_there_and_is_read_once() -> None:
    trace = np.tile([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (20, 1, 1))
    found = replay(trace, RoutedShape(layers=2, experts=16, used=2), share=0.75)
    assert found.hits[2:].sum() == 4 * 38, "at first nobody is there of those with high numbers"
    assert found.reads == trace[:2].size - found.hits[:2].sum()
    assert found.with_slot.sum() <= found.hits.sum()


@pytest.mark.parametrize("every", [0, 750], ids=["favourites stay", "favourites drift"])
def test_hits_meet_their_targets_at_40_percent_of_64_experts(every: int) -> None:
    trace = make_drifting_trace(1500, layers=4, experts=64, used=8, skew=1.0, every=every, seed=1)
    found = replay(trace, RoutedShape(layers=4), share=0.4)
    hits = found.hits.sum()
    assert hits >= 0.95 * best_static(trace, 25)
    assert hits >= 1.1 * lru(trace, 25)
    assert hits <= belady(trace, 25) + 100
    assert found.reads == trace.size - hits, "each that was missing was read once"


def test_who_is_foreseen_is_there_when_his_layer_asks() -> None:
    trace = make_drifting_trace(300, layers=3, experts=64, used=8, skew=1.0, every=0, seed=1)
    found = replay(trace, RoutedShape(layers=3), share=0.4, likely=trace)
    assert (found.hits[:, 1:] == 8).all()
    assert found.hits[:, 0].sum() < 8 * 300, "nobody foresees the first layer"


def test_nothing_is_prefetched_any_more_where_all_predictions_are_wrong() -> None:
    trace = make_drifting_trace(300, layers=3, experts=32, used=4, skew=1.0, every=0, seed=1)
    wrong = trace + 32
    shape = RoutedShape(layers=3, used=4)
    without, found = (replay(trace, shape, share=0.4, likely=each) for each in (None, wrong))
    guessed = found.reads - (trace.size - found.hits.sum())
    assert 0 < guessed <= 35 * 4 * 2, "of each rank of two layers 35"
    assert found.hits.sum() >= 0.98 * without.hits.sum()
