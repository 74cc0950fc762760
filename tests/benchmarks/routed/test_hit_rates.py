"""Rows about hits, and their picture."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.routed.hit_rates import compare_hit_rates, compute_hit_rates, draw_hit_rates
from benchmarks.routed.replay import ReplayedTrace, split_expert_blocks
from benchmarks.routed.traced_base import RoutedShape, make_trace

SHAPE = RoutedShape(layers=2)


def make_replayed(hits: np.ndarray) -> ReplayedTrace:
    return ReplayedTrace(hits, hits, 0, split_expert_blocks(SHAPE, 100))


def test_hits_are_beside_those_of_others_and_belady_asks_for_nothing() -> None:
    rows, outcome = compare_hit_rates("drawn", make_trace(SHAPE, 400), SHAPE)
    assert [row.target for row in rows] == [">= 0.95", ">= 1.1", None, None]
    assert {row.case for row in rows} == {"hits, 25 of 64 experts resident, drawn"}
    assert len({row.ours for row in rows}) == 1
    assert rows[0].ours == pytest.approx(100 * outcome.hits.sum() / (400 * 2 * 8), abs=0.05)
    assert rows[3].ratio is not None
    assert rows[3].ratio < 1


def test_rates_are_means_of_a_window_of_tokens() -> None:
    hits = np.zeros((120, 1), np.int64)
    hits[60:] = 4
    rates = compute_hit_rates(make_replayed(hits), used=8)
    assert rates.shape == (71, 1)
    assert (rates[0, 0], rates[35, 0], rates[-1, 0]) == (0, 0.25, 0.5)
    few = compute_hit_rates(make_replayed(hits[58:62]), used=8)
    assert few.tolist() == [[0.25]]


def test_a_picture_has_a_line_for_each_layer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome = make_replayed(np.ones((80, 3), np.int64))
    draw_hit_rates([("one", outcome), ("other", outcome)], tmp_path / "hits.svg", used=8)
    assert (tmp_path / "hits.svg").read_bytes().count(b'id="line2d') > 6
