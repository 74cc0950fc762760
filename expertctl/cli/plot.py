"""Plots of ``eval`` (one bar a score), ``bench`` (roofline) and ``bench moe`` (hit rates).

The only module, with `expertctl.cli.routing_plot`, that uses matplotlib, the extra ``plot``. The
same figures give the same bytes of SVG.
"""

import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from expertctl.cli.output import format_count, make_printable, truncate, write_file
from expertctl.errors import NotFoundError, UsageError, format_install_command
from expertctl.package.evaluation import format_correct_count
from expertctl.package.write import require_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

    from expertctl.engine.bench_result import BenchResult, BenchRow
    from expertctl.engine.evaluation_result import AccuracyScore, EvaluationResult
    from expertctl.engine.moe.bench_result import RoutedBenchResult, RoutedBenchRow


_FORMATS = (".svg", ".png")
_AXIS_END = 1.42
"""End of the axis of shares: beyond 1 there is room for the figures beside the bars."""
INK, FAINT = "#222222", "#dddddd"
_ROW, _BAR = 0.55, 0.34
_TITLE_CHARACTERS, _LABEL_CHARACTERS = 64, 30
_BASE, _EXPERT, _OTHER, _CHAIN = "#9aa0a6", "#2a6fb0", "#8fb8de", "#d9822b"


def check_plot_path(path: Path, *, example: str = "scores") -> None:
    """Raise if a plot could not be drawn or written there, before the work for it is done.

    ``example`` is a file name for the hint.

    Raises:
        UsageError: when the file has another extension, or is a directory.
        NotFoundError: when its directory or matplotlib is missing.
    """
    hint = f"--plot {example}.svg, or {example}.png"
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: unsupported plot format", hint=hint)
    require_folder(path)
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint=hint)
    if find_spec("matplotlib") is None:
        raise NotFoundError(
            "plotting needs matplotlib, which is not installed",
            hint=format_install_command("plot"),
        )


def draw_evaluation(result: "EvaluationResult", path: Path) -> None:
    """Write the plot of an evaluation, atomically."""
    write_figure(lambda: build_evaluation_figure(result), path)


def write_figure(make: Callable[[], "Figure"], path: Path) -> None:
    """Write a figure to a file, atomically."""
    import matplotlib as mpl

    kind, picture = path.suffix.lower().removeprefix("."), BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # ignore local styles: the same scores give the same picture
        mpl.rcParams["svg.hashsalt"] = "expertctl"
        warnings.simplefilter("ignore", UserWarning)  # a glyph that no font has is a box
        make().savefig(picture, format=kind, dpi=200, metadata=_build_metadata(kind))
    write_file(path, picture.getvalue())


def build_evaluation_figure(result: "EvaluationResult") -> "Figure":
    """Return the plot: shares as bars from the top, intervals over them, figures beside them."""
    from matplotlib.figure import Figure

    scores, labels = result.scores, list(map(_format_label, result.scores))
    rows = [max(_ROW, 0.2 * (label.count("\n") + 1)) for label in labels]  # in inches
    places = [sum(rows[:i]) + row / 2 for i, row in enumerate(rows)]
    figure = Figure(figsize=(7.5, 1.7 + sum(rows)), layout="constrained")
    axes = figure.add_subplot(ylim=(sum(rows), 0), xlim=(0, _AXIS_END))
    shares = [score.share for score in scores]
    below = [score.share - score.interval.low for score in scores]
    above = [score.interval.high - score.share for score in scores]
    axes.barh(places, shares, color=_choose_colours(result), height=_BAR, zorder=2)
    axes.errorbar(
        shares, places, xerr=[below, above], fmt="none", ecolor=INK, elinewidth=1.2, capsize=3.5
    )
    axes.set_yticks(places, labels, parse_math=False)
    _write_shares(axes, zip(places, scores, strict=True))
    _style_axes(axes, result)
    figure.suptitle(
        _format_title(result), x=0.01, ha="left", fontsize=12, color=INK, parse_math=False
    )
    return figure


def _write_shares(axes: "Axes", placed: Iterable[tuple[float, "AccuracyScore"]]) -> None:
    for place, score in placed:
        axes.text(
            score.interval.high + 0.015,
            place,
            format_correct_count(score.right_count, len(score.answers)),
            va="center",
            color=INK,
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )


def _style_axes(axes: "Axes", result: "EvaluationResult") -> None:
    measured = f"right answers ({result.data.metric}), with 95 % intervals"
    axes.set_xlabel(measured, color=INK, fontsize=10)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.grid(axis="x", color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(length=0, labelcolor=INK, labelsize=10)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(INK)


def _choose_colours(result: "EvaluationResult") -> list[str]:
    others = [_OTHER] * len(result.others)
    return [_BASE, _EXPERT, *others, *([_CHAIN] if result.chain else [])]


def _format_title(result: "EvaluationResult") -> str:
    shown = truncate(result.data.path.name, _TITLE_CHARACTERS)
    named = f"{result.expert.name} on {shown}, n = {len(result.data.samples)}"
    return "\n".join(textwrap.wrap(make_printable(named), _TITLE_CHARACTERS))


def _format_label(score: "AccuracyScore") -> str:
    """Format a chain with one line an expert, and a very long name on several lines."""
    joined = "\n+\N{NO-BREAK SPACE}"  # keeps the plus with its expert
    lines = score.name.replace(" + ", joined).split("\n") if score.experts else ["base alone"]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _LABEL_CHARACTERS))


def _build_metadata(kind: str) -> dict[str, str | None]:
    return {"Date": None} if kind == "svg" else {"Software": None}


_ROOFLINE_FAINT, _ROOFLINE_GREY = "#e4e4e4", "#8a8f94"
_WRITE, _READ = "#d9822b", "#2a6fb0"
_MARKS, _DASHES = "osD^vP*X", ("--", "-.", ":")
_MARGIN_FACTOR = 5.0
"""Factor of space beyond the outermost points."""


def draw_roofline(result: "BenchResult", path: Path) -> None:
    """Write the roofline plot, atomically."""
    write_figure(lambda: build_roofline_figure(result), path)


def build_roofline_figure(result: "BenchResult") -> "Figure":
    """Return the plot: a roof for each number of threads, a point for each measured case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    texts = [row for row in result.rows if row.work is not None]
    _draw_roofs(axes, result, _find_intensity_range(result, texts))
    for number, row in enumerate(texts):
        _draw_point(axes, row, _MARKS[number % len(_MARKS)])
    _style_roofline_axes(axes, result)
    return figure


def _find_intensity_range(
    result: "BenchResult", texts: Sequence["BenchRow"]
) -> tuple[float, float]:
    """Return the lowest and highest intensity of the plot, in operations per byte."""
    ridges = [result.make_roofline(threads).ridge_intensity for threads in result.threads]
    seen = [row.work.intensity for row in texts if row.work is not None] + ridges
    return min(seen) / _MARGIN_FACTOR, max(seen) * _MARGIN_FACTOR


def _draw_roofs(axes: "Axes", result: "BenchResult", span: tuple[float, float]) -> None:
    for number, threads in enumerate(result.threads):
        roof, last = result.make_roofline(threads), threads == result.threads[-1]
        intensities = [span[0], roof.ridge_intensity, span[1]]
        memory, compute = _format_number(roof.nbytes / 1e9), _format_number(roof.operations / 1e9)
        axes.plot(
            intensities,
            [roof.attainable_rate(each) / 1e9 for each in intensities],
            color=INK if last else _ROOFLINE_GREY,
            linewidth=1.8 if last else 1.2,
            linestyle="-" if last else _DASHES[number % len(_DASHES)],
            zorder=2,
            label=f"roof, {format_count(threads, 'thread')}: {memory} GB/s, {compute} GFLOP/s",
        )
    axes.set_xlim(*span)


def _draw_point(axes: "Axes", row: "BenchRow", mark: str) -> None:
    """Draw one case, with the interquartile range of its rounds."""
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
        label=_format_point_label(row),
    )


def _format_point_label(row: "BenchRow") -> str:
    assert row.reach is not None
    share, rate = 100 * row.reach.share.median, _format_number(row.rate.median)
    return (
        f"{row.case}, {format_count(row.threads, 'thread')}: {rate} {row.unit}, "
        f"{share:.0f} % of {row.reach.bound}"
    )


def _format_number(value: float) -> str:
    """Format a figure for people: ``1,370``, ``52``, ``4.7``, ``0.1``."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _style_roofline_axes(axes: "Axes", result: "BenchResult") -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _format_number(value))
    axes.set_xlabel("operations per byte read", color=INK, fontsize=10)
    axes.set_ylabel("GFLOP/s", color=INK, fontsize=10)
    axes.grid(which="major", color=_ROOFLINE_FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(which="both", length=0, labelcolor=INK, labelsize=9)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    title = make_printable(f"{result.what}, {result.dtype}\non {result.cpu}")
    axes.set_title(title, loc="left", fontsize=11, color=INK, parse_math=False)


_NEVER, _COUNTED_LINE = "#d9d9d9", "#d03b2f"
_COLOUR_MAP = "viridis"
_PANEL, _LAYER = 1.1, 0.16
"""Height of a panel without its layers, and of one layer, in inches."""
_MAX_LABELS = 8


def draw_hit_rates(result: "RoutedBenchResult", path: Path) -> None:
    """Write the plot of hit rates, atomically."""
    write_figure(lambda: build_hit_rate_figure(result), path)


def build_hit_rate_figure(result: "RoutedBenchResult") -> "Figure":
    """Return the plot, a panel for each number of resident experts: layers down, tokens right.

    Raises:
        UsageError: when no expert could be missing in what was measured.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.timeline.tokens]
    if not rows:
        raise UsageError(
            "--plot: in every case that fitted, all experts were resident",
            hint="give a larger --memory-budget, or --resident a smaller share",
        )
    height = _PANEL + _LAYER * min(result.layers, 24)
    figure = Figure(figsize=(8.0, 0.9 + height * len(rows)), layout="constrained")
    panels = list(figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0])
    meshes = [_draw_panel(axes, row) for axes, row in zip(panels, rows, strict=True)]
    scope = (
        "; the figures count only what is right of the line" if rows[0].first_counted_token else ""
    )
    panels[-1].set_xlabel(f"tokens generated{scope}", color=INK, fontsize=9)
    _draw_colour_bar(figure, panels, meshes[-1])
    title = make_printable(f"{result.what}, {result.dtype}: {result.texts}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, parse_math=False)
    return figure


def _draw_panel(axes: "Axes", row: "RoutedBenchRow") -> "QuadMesh":
    """Draw one panel; cells without a request are grey."""
    line = row.timeline
    axes.set_facecolor(_NEVER)
    mesh = axes.pcolormesh(
        [0, *line.tokens],
        np.arange(len(line.layers) + 1),
        np.ma.masked_invalid(line.rates),
        cmap=_COLOUR_MAP,
        vmin=0,
        vmax=1,
    )
    if row.first_counted_token:
        axes.axvline(row.first_counted_token, color=_COUNTED_LINE, linewidth=1.4)
    axes.invert_yaxis()
    places = _choose_label_places(len(line.layers))
    axes.set_yticks([place + 0.5 for place in places], [str(line.layers[p]) for p in places])
    axes.set_ylabel("layer", color=INK, fontsize=9)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(_format_panel_title(row), loc="left", fontsize=9.5, color=INK, parse_math=False)
    return mesh


def _format_panel_title(row: "RoutedBenchRow") -> str:
    """Return the configuration of a panel, with the figures of the rounds that count."""
    residence = row.report.residence
    title = f"{row.case.label} ({residence.slots} of {residence.experts} slots): "
    title += f"{100 * row.hit_rate:.0f} % hits, {row.decode_rate.median:.1f} tok/s"
    left_out = f", {100 * row.report.skipped_share:.1f} % left out"
    return title if row.case.miss == "exact" else f"{title}{left_out}"


def _choose_label_places(layers: int) -> list[int]:
    """Return the positions of layers that get a label: all, every second, every third and so on."""
    return list(range(0, layers, -(-layers // _MAX_LABELS) or 1))


def _draw_colour_bar(figure: "Figure", panels: list["Axes"], mesh: "QuadMesh") -> None:
    scale = figure.colorbar(mesh, ax=panels, fraction=0.04, pad=0.02, aspect=30)
    scale.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 %", "25 %", "50 %", "75 %", "100 %"])
    scale.set_label("routed slots whose expert was in memory", color=INK, fontsize=9)
    scale.ax.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    scale.outline.set_visible(False)
