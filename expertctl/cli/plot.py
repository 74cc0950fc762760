"""The picture of an evaluation: one bar a score, with its interval.

The only module that imports matplotlib, which is the extra ``plot``. The same figures give the same
bytes of SVG.
"""

import textwrap
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.named_file import write_file
from expertctl.cli.output import printable
from expertctl.errors import NotFoundError, UsageError
from expertctl.package.evaluation_summary import count_text
from expertctl.package.write import demand_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from expertctl.engine.evaluation_result import Evaluated, Score

_FORMATS = (".svg", ".png")
_WIDEST = 1.42
"""Where the axis of shares ends: beyond 1 there is room for the figures beside the bars."""
_INK, _FAINT = "#222222", "#dddddd"
_ROW, _BAR = 0.55, 0.34
_TITLE_CHARACTERS, _LABEL_CHARACTERS = 64, 30
_BASE, _EXPERT, _OTHER, _CHAIN = "#9aa0a6", "#2a6fb0", "#8fb8de", "#d9822b"


def check_picture(path: Path, *, example: str = "scores") -> None:
    """Refuse a picture that could not be drawn or written, before the work for it is done.

    ``example`` is how a person may call it.

    Raises:
        UsageError: when its name has another ending, or is that of a directory.
        NotFoundError: when its directory or matplotlib is missing.
    """
    hint = f"--plot {example}.svg, or {example}.png"
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: no picture ends so", hint=hint)
    demand_folder(path)
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint=hint)
    if find_spec("matplotlib") is None:
        raise NotFoundError(
            "drawing needs matplotlib, which is not installed", hint="pip install 'expertctl[plot]'"
        )


def draw(found: "Evaluated", path: Path) -> None:
    """Draw the scores into a file, written atomically."""
    write_figure(lambda: figure_of(found), path)


def write_figure(make: Callable[[], "Figure"], path: Path) -> None:
    """Draw a figure into a file, written atomically."""
    import matplotlib as mpl

    kind, picture = path.suffix.lower().removeprefix("."), BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # ignore local styles: the same scores give the same picture
        mpl.rcParams["svg.hashsalt"] = "expertctl"
        warnings.simplefilter("ignore", UserWarning)  # a glyph that no font has is a box
        make().savefig(picture, format=kind, dpi=200, metadata=_metadata(kind))
    write_file(path, picture.getvalue())


def figure_of(found: "Evaluated") -> "Figure":
    """Return the picture: shares as bars from above, intervals over them, figures beside them."""
    from matplotlib.figure import Figure

    scores, labels = found.scores, list(map(_label, found.scores))
    rows = [max(_ROW, 0.2 * (label.count("\n") + 1)) for label in labels]  # in inches
    places = [sum(rows[:i]) + row / 2 for i, row in enumerate(rows)]
    figure = Figure(figsize=(7.5, 1.7 + sum(rows)), layout="constrained")
    axes = figure.add_subplot(ylim=(sum(rows), 0), xlim=(0, _WIDEST))
    shares = [score.share for score in scores]
    below = [score.share - score.interval.low for score in scores]
    above = [score.interval.high - score.share for score in scores]
    axes.barh(places, shares, color=_colours(found), height=_BAR, zorder=2)
    axes.errorbar(
        shares, places, xerr=[below, above], fmt="none", ecolor=_INK, elinewidth=1.2, capsize=3.5
    )
    axes.set_yticks(places, labels, parse_math=False)
    _write_shares(axes, zip(places, scores, strict=True))
    _frame(axes, found)
    figure.suptitle(_title(found), x=0.01, ha="left", fontsize=12, color=_INK, parse_math=False)
    return figure


def _write_shares(axes: "Axes", placed: Iterable[tuple[float, "Score"]]) -> None:
    for place, score in placed:
        axes.text(
            score.interval.high + 0.015,
            place,
            count_text(score.right, len(score.answers)),
            va="center",
            color=_INK,
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )


def _frame(axes: "Axes", found: "Evaluated") -> None:
    measured = f"right answers ({found.data.metric}), with 95 % intervals"
    axes.set_xlabel(measured, color=_INK, fontsize=10)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.grid(axis="x", color=_FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(length=0, labelcolor=_INK, labelsize=10)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(_INK)


def _colours(found: "Evaluated") -> list[str]:
    others = [_OTHER] * len(found.others)
    return [_BASE, _EXPERT, *others, *([_CHAIN] if found.chain else [])]


def _title(found: "Evaluated") -> str:
    data = found.data.path.name
    shown = data if len(data) <= _TITLE_CHARACTERS else f"{data[: _TITLE_CHARACTERS - 1]}…"
    named = f"{found.expert.name} on {shown}, n = {len(found.data.samples)}"
    return "\n".join(textwrap.wrap(printable(named), _TITLE_CHARACTERS))


def _label(score: "Score") -> str:
    """Write a chain with one line for each expert, and a very long name on several."""
    joined = "\n+\N{NO-BREAK SPACE}"  # keeps the plus with its expert
    lines = score.name.replace(" + ", joined).split("\n") if score.experts else ["base alone"]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _LABEL_CHARACTERS))


def _metadata(kind: str) -> dict[str, str | None]:
    return {"Date": None} if kind == "svg" else {"Software": None}
