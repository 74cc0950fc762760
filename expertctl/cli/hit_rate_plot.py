"""Plot of the hit rate of each layer, over the tokens that were written."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from expertctl.cli.output import printable
from expertctl.cli.plot import write_figure
from expertctl.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

    from expertctl.engine.routed_bench_result import RoutedMeasured, RoutedRow

_INK, _NEVER, _LINE = "#222222", "#d9d9d9", "#d03b2f"
_COLOURS = "viridis"
_PANEL, _LAYER = 1.1, 0.16
"""Height of a panel without its layers, and of one layer, in inches."""
_MOST_LABELS = 8


def draw_hit_rates(found: "RoutedMeasured", path: Path) -> None:
    """Draw the hit rates into a file, written atomically."""
    write_figure(lambda: hit_rate_figure(found), path)


def hit_rate_figure(found: "RoutedMeasured") -> "Figure":
    """Return a figure, a panel for each way to hold experts: layers downwards, tokens rightwards.

    Raises:
        UsageError: when no expert could be missing in what was measured.
    """
    from matplotlib.figure import Figure

    rows = [row for row in found.rows if row.timeline.tokens]
    if not rows:
        raise UsageError(
            "--plot: nothing fitted in which an expert can be missing",
            hint="give a larger --memory-budget, or --resident a smaller share",
        )
    height = _PANEL + _LAYER * min(found.layers, 24)
    figure = Figure(figsize=(8.0, 0.9 + height * len(rows)), layout="constrained")
    panels = list(figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0])
    meshes = [_draw_panel(axes, row) for axes, row in zip(panels, rows, strict=True)]
    told = "; the figures are of what lies right of the line" if rows[0].counted_from else ""
    panels[-1].set_xlabel(f"tokens written{told}", color=_INK, fontsize=9)
    _draw_scale(figure, panels, meshes[-1])
    title = printable(f"{found.what}, {found.dtype}: {found.texts}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK, parse_math=False)
    return figure


def _draw_panel(axes: "Axes", row: "RoutedRow") -> "QuadMesh":
    """Draw one panel; cells without a request are grey."""
    line = row.timeline
    axes.set_facecolor(_NEVER)
    mesh = axes.pcolormesh(
        [0, *line.tokens],
        np.arange(len(line.layers) + 1),
        np.ma.masked_invalid(line.rates),
        cmap=_COLOURS,
        vmin=0,
        vmax=1,
    )
    if row.counted_from:
        axes.axvline(row.counted_from, color=_LINE, linewidth=1.4)
    axes.invert_yaxis()
    places = _some(len(line.layers))
    axes.set_yticks([place + 0.5 for place in places], [str(line.layers[p]) for p in places])
    axes.set_ylabel("layer", color=_INK, fontsize=9)
    axes.tick_params(length=0, labelcolor=_INK, labelsize=8.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(_told(row), loc="left", fontsize=9.5, color=_INK, parse_math=False)
    return mesh


def _told(row: "RoutedRow") -> str:
    """Name the way to hold the experts, with the figures of the rounds that count."""
    residence = row.report.residence
    told = f"{row.holding.case} ({residence.slots} of {residence.experts} slots): "
    told += f"{100 * row.hit_rate:.0f} % hits, {row.rate.median:.1f} tok/s"
    left_out = f", {100 * row.report.skipped_mass:.1f} % left out"
    return told if row.holding.miss == "exact" else f"{told}{left_out}"


def _some(layers: int) -> list[int]:
    """Return the places of layers that get a label: all, every second, every third or so."""
    return list(range(0, layers, -(-layers // _MOST_LABELS) or 1))


def _draw_scale(figure: "Figure", panels: list["Axes"], mesh: "QuadMesh") -> None:
    scale = figure.colorbar(mesh, ax=panels, fraction=0.04, pad=0.02, aspect=30)
    scale.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 %", "25 %", "50 %", "75 %", "100 %"])
    scale.set_label("routed slots whose expert was in memory", color=_INK, fontsize=9)
    scale.ax.tick_params(length=0, labelcolor=_INK, labelsize=8.5)
    scale.outline.set_visible(False)
