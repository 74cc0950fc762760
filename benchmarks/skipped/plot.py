"""The plot of the cost of skipping: against the share of experts in memory, a line for each cap."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.skipped.evaluation import CacheConfiguration, SkippingResult
from expertctl.cli.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[CacheConfiguration, SkippingResult]
_INK, _FAINT = "#222222", "#dddddd"
_COLOURS = ("#9ecae1", "#4292c6", "#08519c", "#d9822b")
"""Colours of caps, the smallest first."""
_SMALL = 0.1
"""Up to this percentage the axis is linear, beyond it logarithmic."""


@dataclass(frozen=True, slots=True)
class _PlotLine:
    label: str
    holdings: Sequence[CacheConfiguration]
    colour: str
    style: str


def draw_skipping(results: Results, path: Path) -> None:
    """Plot perplexity, right answers, and what was left out, side by side."""
    write_figure(lambda: _make_figure(results), path)


def _make_figure(results: Results) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    exact = [holding for holding in results if not holding.policy.skips]
    there = {each.share: results[each].text.perplexity for each in exact}
    figure = Figure(figsize=(11, 4.1), layout="constrained")
    axes = figure.subplots(1, 3)
    lines = _make_lines(results)
    for place, title, value in (
        (
            axes[0],
            "perplexity of text above exact, %",
            lambda h: _relative_perplexity(results[h], there[h.share]),
        ),
        (axes[1], "right answers, %", lambda h: 100 * results[h].accuracy),
        (axes[2], "weights left out of text, %", lambda h: 100 * results[h].text.skipped),
    ):
        _draw_panel(place, title, lines, value)
    axes[0].set_yscale("symlog", linthresh=_SMALL)
    axes[0].yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes[0].set_ylim(bottom=-_SMALL)
    axes[1].set_ylim(bottom=0)
    axes[1].axhline(100 * results[exact[0]].accuracy, color=_INK, linewidth=1, linestyle=":")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _relative_perplexity(mine: SkippingResult, exact: float) -> float:
    return 100 * (mine.text.perplexity / exact - 1)


def _make_lines(results: Results) -> list[_PlotLine]:
    skipping = [holding for holding in results if holding.policy.skips]
    kinds = sorted({(not h.policy.prefetches, h.policy.cap) for h in skipping})
    caps = sorted({cap for _, cap in kinds})
    return [
        _PlotLine(
            label=f"cap {cap:.0%} of a token" + (", nothing read ahead" if late else ""),
            holdings=[h for h in skipping if _describe_kind(h) == (late, cap)],
            colour=_COLOURS[caps.index(cap) % len(_COLOURS)],
            style="--" if late else "-",
        )
        for late, cap in kinds
    ]


def _describe_kind(holding: CacheConfiguration) -> tuple[bool, float]:
    return not holding.policy.prefetches, holding.policy.cap


def _draw_panel(
    axes: "Axes",
    title: str,
    lines: Sequence[_PlotLine],
    value: Callable[[CacheConfiguration], float],
) -> None:
    for line in lines:
        axes.plot(
            [100 * holding.share for holding in line.holdings],
            [value(holding) for holding in line.holdings],
            line.style, color=line.colour, label=line.label, marker="o", markersize=3.5,
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("experts in memory, %", fontsize=9, color=_INK)
    axes.invert_xaxis()
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.tick_params(length=0, labelcolor=_INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
