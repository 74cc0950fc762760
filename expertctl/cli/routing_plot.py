"""The plot of a routing evaluation: confusion matrix, risk-coverage curve, confidence histogram.

Experts that are confused are placed side by side. If there are more than `MAX_ROWS`, those with
the most wrong decisions have rows of their own, and one row and one column hold the others.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertctl.cli.output import format_count, make_printable, truncate
from expertctl.cli.plot import FAINT, INK
from expertctl.cli.routing_evaluation import NO_EXPERT, format_expert
from expertctl.routing.score import compute_risk_coverage

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from expertctl.routing.evaluation import EvaluatedPrompt, RoutingEvaluation


MAX_ROWS = 36
"""Most experts that have a row of their own."""

ConfusionCounts = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """Counts of decisions: row, the wanted expert; column, the one that answered."""

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    experts: int  # number of all experts
    hidden: int  # wrong decisions among the others, left out of their cell

    @property
    def row_sums(self) -> list[int]:
        """The number of prompts of each row."""
        return [sum(row) for row in self.counts]


def build_confusion_matrix(result: "RoutingEvaluation") -> ConfusionMatrix:
    """Return the matrix: confused experts side by side, then all others as one, then no expert."""
    cells = {(format_expert(w), format_expert(g)): n for (w, g), n in result.confusion.items()}
    experts = sorted({name for pair in cells for name in pair} - {NO_EXPERT})
    kept = order_by_confusion(_select_most_confused(experts, cells), cells)
    others = sorted(set(experts) - set(kept))
    names = [*kept, *([f"{len(others)} others"] if others else [])]
    names += [NO_EXPERT] if any(NO_EXPERT in pair for pair in cells) else []
    place = {name: i for i, name in enumerate(names)} | dict.fromkeys(others, len(kept))
    counts, hidden = [[0] * len(names) for _ in names], 0
    for (wanted, got), n in cells.items():
        if wanted != got and place[wanted] == place[got]:
            hidden += n
        else:
            counts[place[wanted]][place[got]] += n
    return ConfusionMatrix(tuple(names), tuple(map(tuple, counts)), len(experts), hidden)


def order_by_confusion(names: Sequence[str], cells: ConfusionCounts) -> list[str]:
    """Order names so that each is next to the one that it is confused with most.

    Next comes the expert that is confused most with the last one, else with any before, else the
    first one in ``names``.
    """
    links = _count_confusions(cells)
    rest, placed = dict.fromkeys(names), list[str]()
    while rest:
        last, ranks = placed[-1:], {name: i for i, name in enumerate(names)}
        following = min(
            rest,
            key=lambda name: (
                -_measure_confusion(name, last, links),
                -_measure_confusion(name, placed, links),
                ranks[name],
            ),
        )
        del rest[following]
        placed.append(following)
    return placed


def _select_most_confused(experts: Sequence[str], cells: ConfusionCounts) -> list[str]:
    """Return the experts with the most wrong decisions, counted as wanted and as answering."""
    errors = Counter[str]()
    for (wanted, got), n in cells.items():
        if wanted != got:
            errors.update({wanted: n, got: n})
    return sorted(experts, key=lambda name: (-errors[name], name))[:MAX_ROWS]


def _count_confusions(cells: ConfusionCounts) -> Counter[frozenset[str]]:
    links = Counter[frozenset[str]]()
    for (wanted, got), n in cells.items():
        if wanted != got:
            links[frozenset((wanted, got))] += n
    return links


def _measure_confusion(
    name: str, others: Iterable[str], links: Mapping[frozenset[str], int]
) -> int:
    return max((links.get(frozenset((name, other)), 0) for other in others), default=0)


_GREY = "#9aa0a6"
_RIGHT, _WRONG = (42, 111, 176), (217, 130, 43)
_CELL, _MIN_SIDE, _PANELS = 0.24, 4.2, 4.6  # in inches
_PER_CHARACTER = 0.075
_LABEL_CHARACTERS, _TITLE_CHARACTERS = 32, 90
_PALEST = 0.3  # keeps a single wrong decision visible
_STEPS = 20


def build_routing_figure(result: "RoutingEvaluation") -> "Figure":
    """Return the plot: the matrix on the left, the curve and the histogram on the right."""
    from matplotlib.figure import Figure

    matrix = build_confusion_matrix(result)
    labels = _format_labels(matrix)
    room = _PER_CHARACTER * max(map(len, labels))
    side = max(_MIN_SIDE, _CELL * len(labels))
    around = room + 0.2 * _format_note(matrix).count("\n") + 1.2  # around the matrix, in inches
    figure = Figure(figsize=(side + room + _PANELS + 1, side + around), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(side + room + 0.6, _PANELS), wspace=0.06)
    _draw_matrix(figure.add_subplot(grid[:, 0]), matrix, labels)
    _draw_risk(figure.add_subplot(grid[0, 1]), result)
    _draw_confidence(figure.add_subplot(grid[1, 1]), result)
    figure.suptitle(
        _format_title(result), x=0.01, ha="left", fontsize=12, color=INK, parse_math=False
    )
    return figure


def _draw_matrix(axes: "Axes", matrix: ConfusionMatrix, labels: Sequence[str]) -> None:
    axes.imshow(_compute_cell_colours(matrix), interpolation="nearest", aspect="auto")
    places = range(len(labels))
    axes.set_xticks(places, labels, rotation=90, parse_math=False)
    axes.set_yticks(places, labels, parse_math=False)
    size = 8 if len(labels) > 12 else 9
    axes.tick_params(length=0, labelcolor=INK, labelsize=size)
    for i, row in enumerate(matrix.counts):
        for j, count in enumerate(row):
            if count:
                _write_count(axes, (j, i), count, dark=i == j and 2 * count > sum(row))
    axes.set_xlabel(_format_note(matrix), color=INK, fontsize=9)
    axes.set_ylabel("wanted", color=INK, fontsize=10)
    axes.set_title("which was wanted, and which answered", loc="left", fontsize=10, color=INK)
    axes.set_xticks([place - 0.5 for place in places][1:], minor=True)
    axes.set_yticks([place - 0.5 for place in places][1:], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    _hide_frame(axes)


def _write_count(axes: "Axes", place: tuple[int, int], count: int, *, dark: bool) -> None:
    shown = str(count)
    axes.text(
        *place,
        shown,
        ha="center",
        va="center",
        fontsize=min(7, 24 / len(shown)),
        color="white" if dark else INK,
    )


def _compute_cell_colours(matrix: ConfusionMatrix) -> "NDArray[np.float64]":
    """Return the colour of each cell: blue for right, orange for wrong, paler where rarer."""
    import numpy as np

    counts = np.array(matrix.counts, dtype=np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    strength = np.where(counts > 0, np.maximum(_PALEST, shares), 0.0)[..., None]
    diagonal = np.eye(len(counts), dtype=bool)[..., None]
    ink = np.where(diagonal, np.array(_RIGHT), np.array(_WRONG)) / 255
    blank = np.where(diagonal, 0.94, 0.97)
    image: NDArray[np.float64] = blank * (1 - strength) + ink * strength  # [rows, columns, 3]
    return image


def _draw_risk(axes: "Axes", result: "RoutingEvaluation") -> None:
    points = compute_risk_coverage([decision.prediction for decision in result.decisions])
    drawn = [(p.coverage, p.risk) for p in points if p.risk is not None]
    axes.plot(
        [coverage for coverage, _ in drawn],
        [risk for _, risk in drawn],
        color=_format_rgb(_RIGHT),
        linewidth=1.6,
    )
    precision, coverage = result.precision, result.coverage
    if precision is not None:
        caption = (
            f"{100 * coverage.value:.0f} % answered\n{100 * (1 - precision.value):.1f} % wrong"
        )
        now = coverage.value, 1 - precision.value
        axes.plot(*now, "o", color=_format_rgb(_WRONG), zorder=3, clip_on=False)
        axes.annotate(
            caption, now, xytext=(-8, 8), textcoords="offset points", ha="right", fontsize=8,
            color=INK,
        )  # fmt: skip
    top = max([risk for _, risk in drawn], default=0.0)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, max(0.05, 1.15 * top))
    axes.set_xlabel("prompts that an expert answers", fontsize=9, color=INK)
    axes.set_title("wrong ones among the answered", loc="left", fontsize=10, color=INK)
    axes.xaxis.set_major_formatter(_format_percent)
    axes.yaxis.set_major_formatter(_format_percent)
    _style_axes(axes)


def _draw_confidence(axes: "Axes", result: "RoutingEvaluation") -> None:
    groups = {
        "right expert first": (
            _format_rgb(_RIGHT),
            [d for d in result.decisions if d.prediction.is_correct],
        ),
        "another first": (
            _format_rgb(_WRONG),
            [d for d in result.decisions if d.prompt.expert and not d.prediction.is_correct],
        ),
        "no expert wanted": (_GREY, [d for d in result.decisions if not d.prompt.expert]),
    }
    shown = {name: (c, _clamp_confidences(ds)) for name, (c, ds) in groups.items() if ds}
    axes.hist(
        [values for _, values in shown.values()],
        bins=[i / _STEPS for i in range(_STEPS + 1)],
        stacked=True,
        color=[colour for colour, _ in shown.values()],
        label=list(shown),
        rwidth=0.92,
    )
    axes.locator_params(axis="y", integer=True)
    axes.axvline(result.threshold, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"confidence, threshold {result.threshold:.2f}", fontsize=9, color=INK)
    axes.set_title("confidence in the first candidate", loc="left", fontsize=10, color=INK)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    _style_axes(axes)


def _clamp_confidences(decisions: Sequence["EvaluatedPrompt"]) -> list[float]:
    """Return the confidences within 0 to 1; that of a prompt without a candidate is 0."""
    return [min(1.0, max(0.0, d.confidence or 0.0)) for d in decisions]


def _style_axes(axes: "Axes") -> None:
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8)
    _hide_frame(axes)


def _hide_frame(axes: "Axes") -> None:
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _format_percent(value: float, _: object) -> str:
    return f"{100 * value:.3g} %"


def _format_rgb(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def _format_note(matrix: ConfusionMatrix) -> str:
    """Return the caption, with what is not drawn."""
    lines = ["answered"]
    others = next((name for name in matrix.names if name.endswith(" others")), "")
    if others:
        lines.append(f"the worst {MAX_ROWS} of {matrix.experts} experts; {others} together")
    if matrix.hidden:
        lines.append(f"{format_count(matrix.hidden, 'wrong decision')} among the others not drawn")
    return "\n".join(lines)


def _format_labels(matrix: ConfusionMatrix) -> list[str]:
    """Return the names, without the namespace if all experts share one."""
    spaces = {name.partition("/")[0] for name in matrix.names if "/" in name}
    shown = [n.partition("/")[2] or n if len(spaces) == 1 else n for n in matrix.names]
    return [truncate(name, _LABEL_CHARACTERS) for name in shown]


def _format_title(result: "RoutingEvaluation") -> str:
    shown, n = truncate(result.data.path.name, _TITLE_CHARACTERS), len(result.decisions)
    share = result.accuracy
    named = f"{shown}: {share.correct} of {n} decisions as wanted ({100 * share.value:.1f} %)"
    return "\n".join(textwrap.wrap(make_printable(named), _TITLE_CHARACTERS))
