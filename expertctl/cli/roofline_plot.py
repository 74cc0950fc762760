"""The roofline of a machine: what it allows work of each intensity, and what was reached."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.output import counted, printable
from expertctl.cli.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from expertctl.engine.bench_result import Measured, Row

_INK, _FAINT, _GREY = "#222222", "#e4e4e4", "#8a8f94"
_WRITE, _READ = "#d9822b", "#2a6fb0"
_MARKS, _DASHES = "osD^vP*X", ("--", "-.", ":")
_ROOM = 5.0
"""Factor of space beyond the outermost points."""


def draw_roofline(found: "Measured", path: Path) -> None:
    """Draw the roofline into a file, written atomically."""
    write_figure(lambda: roofline_figure(found), path)


def roofline_figure(found: "Measured") -> "Figure":
    """Return the picture: a roof for each number of threads, a point for each text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    texts = [row for row in found.rows if row.work is not None]
    _draw_roofs(axes, found, _span(found, texts))
    for number, row in enumerate(texts):
        _draw_point(axes, row, _MARKS[number % len(_MARKS)])
    _frame(axes, found)
    return figure


def _span(found: "Measured", texts: Sequence["Row"]) -> tuple[float, float]:
    """Return the lowest and highest intensity of the picture."""
    ridges = [found.roof(threads).ridge for threads in found.threads]
    seen = [row.work.intensity for row in texts if row.work is not None] + ridges
    return min(seen) / _ROOM, max(seen) * _ROOM


def _draw_roofs(axes: "Axes", found: "Measured", span: tuple[float, float]) -> None:
    for number, threads in enumerate(found.threads):
        roof, last = found.roof(threads), threads == found.threads[-1]
        intensities = [span[0], roof.ridge, span[1]]
        told = f"{_number(roof.nbytes / 1e9)} GB/s, {_number(roof.operations / 1e9)} GFLOP/s"
        axes.plot(
            intensities,
            [roof.at(each) / 1e9 for each in intensities],
            color=_INK if last else _GREY,
            linewidth=1.8 if last else 1.2,
            linestyle="-" if last else _DASHES[number % len(_DASHES)],
            zorder=2,
            label=f"roof, {counted(threads, 'thread')}: {told}",
        )
    axes.set_xlim(*span)


def _draw_point(axes: "Axes", row: "Row", mark: str) -> None:
    """Draw one text, with what was reached in the middle half of the rounds."""
    assert row.work is not None
    assert row.reach is not None
    share = row.reach.share
    reached = row.operations_per_s / 1e9
    below, above = 1 - share.low / share.median, share.high / share.median - 1
    colour = _WRITE if row.case.startswith("write") else _READ
    axes.errorbar(
        [row.work.intensity],
        [reached],
        yerr=[[reached * below], [reached * above]],
        fmt=mark,
        color=colour,
        markeredgecolor="white",
        markersize=9,
        capsize=3,
        linewidth=1.2,
        zorder=3,
        label=_told(row),
    )


def _told(row: "Row") -> str:
    assert row.reach is not None
    share = 100 * row.reach.share.median
    return (
        f"{row.case}, {counted(row.threads, 'thread')}: {_number(row.rate.median)} {row.unit}, "
        f"{share:.0f} % of {row.reach.bound}"
    )


def _number(value: float) -> str:
    """Write a figure for people: ``1,370``, ``52``, ``4.7``, ``0.1``."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _frame(axes: "Axes", found: "Measured") -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _number(value))
    axes.set_xlabel("operations for each byte that is read", color=_INK, fontsize=10)
    axes.set_ylabel("GFLOP/s", color=_INK, fontsize=10)
    axes.grid(which="major", color=_FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(which="both", length=0, labelcolor=_INK, labelsize=9)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    title = printable(f"{found.what}, {found.dtype}\non {found.cpu}")
    axes.set_title(title, loc="left", fontsize=11, color=_INK, parse_math=False)
