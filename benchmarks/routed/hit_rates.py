"""The share of requests that find their expert in memory, ours and other policies, on one trace.

All have the same memory: the others keep the same number of experts in each layer, ours has slots
and a pool for all layers, as in a run (`replay`). Nothing is prefetched.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.cache_policies import Trace, belady, best_static, lru, lru_by_token
from benchmarks.harness import Row, judge
from benchmarks.routed.replay import ReplayedTrace, replay
from benchmarks.routed.traced_base import RoutedShape
from expertctl.cli.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.4
_LRU_BY_TOKEN = "an LRU that takes in what a token asks for at once"
_WINDOW = 50
"""Number of tokens over which a point of the plot is averaged."""


def compare_hit_rates(
    name: str, trace: Trace, shape: RoutedShape
) -> tuple[list[Row], ReplayedTrace]:
    """Compare our hits with those of the best static set, of an LRU and of Belady's rule."""
    slots = int(SHARE * shape.experts)
    found = replay(trace, shape, share=SHARE)
    case = f"hits, {slots} of {shape.experts} experts resident, {name}"
    mine = float(found.hits.sum() / trace.size)
    rivals = (
        ("the best that never change", best_static(trace, slots), ">= 0.95"),
        ("an LRU", lru(trace, slots), ">= 1.1"),
        (
            _LRU_BY_TOKEN,
            lru_by_token(trace, slots),
            None,
        ),
        ("Belady's rule", belady(trace, slots), None),
    )
    rows = [_make_row(case, mine, rival, n / trace.size, target) for rival, n, target in rivals]
    return [replace(rows[0], note=_describe_replay(found, trace)), *rows[1:]], found


def draw_hit_rates(found: Sequence[tuple[str, ReplayedTrace]], path: Path, *, used: int) -> None:
    """Plot the hits of each layer over time, one plot for each trace, side by side."""
    write_figure(lambda: _make_figure(found, used), path)


def compute_hit_rates(
    outcome: ReplayedTrace, *, used: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Return the share of requests that hit, as moving means, [tokens, layers]."""
    hits = np.cumsum(np.pad(outcome.hits, ((1, 0), (0, 0))), axis=0)
    window = min(_WINDOW, len(outcome.hits))
    rates: NDArray[np.float64] = (hits[window:] - hits[:-window]) / (window * used)
    return rates


def _make_row(case: str, mine: float, rival: str, theirs: float, target: str | None) -> Row:
    ratio = round(mine / theirs, 3)
    row = Row(case, round(100 * mine, 1), rival, round(100 * theirs, 1), "%", "higher", ratio, None)
    return judge(row, target) if target else row


def _describe_replay(found: ReplayedTrace, trace: Trace) -> str:
    tokens, layers, _ = trace.shape
    share, reads, split = found.with_slot.sum() / trace.size, found.reads / tokens, found.split
    return (
        f"{layers} layers, {tokens} tokens; {split.slots} slots a layer, which serve {share:.1%} "
        f"of requests, and a pool of {split.pool}; {reads:.1f} experts are read a token"
    )


def _make_figure(found: Sequence[tuple[str, ReplayedTrace]], used: int) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 3.5), layout="constrained")
    for number, (name, outcome) in enumerate(found):
        axes = figure.add_subplot(1, len(found), number + 1, ylim=(0, 1))
        rates = compute_hit_rates(outcome, used=used)
        for layer, line in enumerate(rates.T):
            axes.plot(np.arange(len(line)) + len(outcome.hits) - len(line), line, label=f"{layer}")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("token")
        axes.set_ylabel(f"hits of {_WINDOW} tokens")
        axes.legend(title="layer", fontsize=8)
    return figure
