"""The picture of an evaluation of routing: what it shows, from one expert to hundreds."""

import random
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from expertctl.cli.plot import write_figure
from expertctl.cli.routing_plot import MAX_ROWS, build_routing_figure
from expertctl.routing.evaluation import RoutingEvaluation
from tests.routing.evaluations import Row, make_evaluation

pytestmark = pytest.mark.all

ANSWERED: list[Row] = [("a", "a", 0.9), ("a", "b", 0.8), ("b", "b", 0.9)]
HAND = make_evaluation([*ANSWERED, ("b", "b", 0.1), (None, "a", 0.3), (None, None, None)])


def many(experts: int, *, prompts: int = 4) -> RoutingEvaluation:
    """Each expert is confused with the next one now and then."""
    chance = random.Random(experts)
    rows: list[Row] = [(None, "e0", chance.random() / 2) for _ in range(experts)]
    for i in range(experts):
        for _ in range(prompts):
            first = i if chance.random() < 0.9 else (i + 1) % experts
            rows.append((f"e{i}", f"e{first}", chance.random()))
    return make_evaluation(rows)


def test_the_matrix_shows_the_counts_and_the_names_without_their_one_namespace() -> None:
    matrix = build_routing_figure(HAND).axes[0]
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["b", "a", "none"]
    shown = {text.get_position(): text.get_text() for text in matrix.texts}
    assert shown == {(0, 0): "1", (2, 0): "1", (1, 1): "1", (0, 1): "1", (2, 2): "2"}


def test_right_cells_are_blue_and_wrong_ones_orange() -> None:
    (image,) = build_routing_figure(HAND).axes[0].images
    pixels = np.asarray(image.get_array())
    blue, orange, blank = pixels[0, 0], pixels[1, 0], pixels[2, 0]
    assert blue[2] > blue[0]
    assert orange[0] > orange[2]
    assert blank.min() > 0.9


def test_experts_of_several_namespaces_keep_them() -> None:
    figure = build_routing_figure(make_evaluation([("x/a", "x/a", 0.9), ("y/a", "x/a", 0.9)]))
    assert {t.get_text() for t in figure.axes[0].get_yticklabels()} == {"x/a", "y/a"}


def test_the_curve_runs_to_all_answered_and_the_point_is_where_we_are() -> None:
    risk = build_routing_figure(HAND).axes[1]
    line, point = risk.lines
    assert line.get_xdata()[-1] == 5 / 6  # type: ignore[index]  # a list
    assert (point.get_xdata(), point.get_ydata()) == ([0.5], [pytest.approx(1 / 3)])
    assert [text.get_text() for text in risk.texts] == ["50 % answered\n33.3 % wrong"]


def test_the_histogram_holds_every_prompt_and_the_threshold() -> None:
    histogram = build_routing_figure(HAND).axes[2]
    heights = [
        sum(bar.get_height() for bar in group)  # type: ignore[attr-defined]  # a bar container
        for group in histogram.containers
    ]
    assert heights == [3, 1, 2]
    (threshold,) = histogram.lines
    assert threshold.get_xdata() == [0.5, 0.5]
    assert [text.get_text() for text in histogram.get_legend().get_texts()] == [
        "right expert first",
        "another first",
        "no expert wanted",
    ]


@pytest.mark.parametrize("experts", [1, 9, MAX_ROWS, MAX_ROWS + 1, 150])
def test_names_can_be_read_however_many_experts_there_are(experts: int) -> None:
    figure = build_routing_figure(many(experts))
    rows = len(figure.axes[0].get_yticklabels())
    assert rows == min(experts, MAX_ROWS) + (experts > MAX_ROWS) + 1
    assert figure.get_figheight() / rows > 0.2, "a row has a fifth of an inch and more"
    note = figure.axes[0].get_xlabel()
    assert (f"the worst {MAX_ROWS} of {experts} experts" in note) == (experts > MAX_ROWS)


def test_nothing_sticks_out_of_the_picture() -> None:
    for found in (many(2), many(9), many(50)):
        figure = build_routing_figure(found)
        figure.draw_without_rendering()
        whole = figure.bbox
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert box is not None
            assert box.x0 >= whole.x0 - 1
            assert box.y0 >= whole.y0 - 1
            assert box.x1 <= whole.x1 + 1
            assert box.y1 <= whole.y1 + 1


@pytest.mark.parametrize(
    "found",
    [
        HAND,
        make_evaluation([("a", None, None)]),
        make_evaluation([(None, None, None)]),
        make_evaluation([("a", "a", 1.7), ("a", "a", -0.3)]),
        make_evaluation([("a", "b", 0.9)] * 12_345),
        make_evaluation([(f"{'n' * 60}/{'m' * 60}", None, None)], name=f"{'data' * 60}.jsonl"),
        make_evaluation([("a", "a", 0.9)], name="$x^{ and $y_--->\U0001f600 \udcff\u0001"),
    ],
    ids=["hand", "nobody", "only none", "beyond", "large counts", "long names", "odd name"],
)
def test_every_evaluation_can_be_drawn(found: RoutingEvaluation, tmp_path: Path) -> None:
    for ending in (".png", ".svg"):
        write_figure(lambda: build_routing_figure(found), tmp_path / f"routing{ending}")
    with Image.open(tmp_path / "routing.png") as picture:
        assert picture.width > 1000
    assert ElementTree.parse(tmp_path / "routing.svg").getroot().tag.endswith("svg")


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        write_figure(lambda: build_routing_figure(many(9)), path)
    assert one.read_bytes() == two.read_bytes()
