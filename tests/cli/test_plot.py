"""The picture of an evaluation: what it shows, whatever the scores and names are."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from expertctl.cli.plot import build_evaluation_figure, check_plot_path, draw_evaluation
from expertctl.digest import Digest
from expertctl.engine.evaluation_result import AccuracyScore, EvaluationResult, ScoredAnswer
from expertctl.errors import NotFoundError, UsageError, format_install_command
from expertctl.package.evaluation import EvaluationData, EvaluationSample
from expertctl.routing.plan import PlannedExpert

pytestmark = pytest.mark.all

N = 40
SAMPLES = tuple(EvaluationSample(line=i, prompt=str(i), answer="x") for i in range(1, N + 1))


def score(right: int, *names: str, weight: float = 1.0) -> AccuracyScore:
    digest = Digest.compute(b"")
    experts = tuple(
        PlannedExpert(f"{name}@1.0.0", digest, digest, "lora", 0.0, weight, "") for name in names
    )
    return AccuracyScore(
        experts, tuple(ScoredAnswer(s, "", s.line <= right, False) for s in SAMPLES)
    )


def evaluated(
    *scores: AccuracyScore, chain: AccuracyScore | None = None, name: str = "sums.jsonl"
) -> EvaluationResult:
    data = EvaluationData(Path(name), Digest.compute(b""), "exact_match", SAMPLES, ())
    base, expert, *others = scores
    return EvaluationResult(
        data=data,
        base_name="base",
        dtype="float32",
        max_tokens=1,
        base=base,
        expert=expert,
        others=tuple(others),
        chain=chain,
    )


CHAIN = evaluated(
    score(0), score(30, "acme/one"), score(20, "acme/two"),
    chain=score(N, "acme/one", "acme/two", weight=0.5),
)  # fmt: skip


def test_bars_are_the_shares_and_the_lines_their_intervals() -> None:
    figure = build_evaluation_figure(CHAIN)
    (axes,) = figure.axes
    bars, lines = axes.containers
    assert [bar.get_width() for bar in bars] == [0, 0.75, 0.5, 1]
    spans = [segment[:, 0].tolist() for segment in lines[2][0].get_segments()]
    assert spans == [[s.interval.low, s.interval.high] for s in CHAIN.scores]
    told = ["0 of 40 (0 %)", "30 of 40 (75 %)", "20 of 40 (50 %)", "40 of 40 (100 %)"]
    assert [text.get_text() for text in axes.texts] == told
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "base alone",
        "acme/one@1.0.0",
        "acme/two@1.0.0",
        "acme/one@1.0.0:0.5\n+\N{NO-BREAK SPACE}acme/two@1.0.0:0.5",
    ]
    assert figure.get_suptitle() == "acme/one@1.0.0 on sums.jsonl, n = 40"
    top, bottom = axes.get_ylim()[::-1]
    assert top < bottom, "the base stands above"


@pytest.mark.parametrize(
    "found",
    [
        CHAIN,
        evaluated(score(0), score(N, "acme/one")),
        evaluated(score(1), score(N - 1, "a/b"), name="$x^{ and $y_--->\U0001f600 \udcff\u0001"),
        evaluated(score(1), score(9, f"{'n' * 60}/{'m' * 60}"), name=f"{'data' * 50}.jsonl"),
        evaluated(score(1), score(9, "a/b"), chain=score(9, *(f"acme/e{i}" for i in range(10)))),
    ],
    ids=["chain", "extremes", "odd name", "long names", "long chain"],
)
def test_every_evaluation_can_be_drawn(found: EvaluationResult, tmp_path: Path) -> None:
    for ending in (".png", ".svg"):
        draw_evaluation(found, tmp_path / f"x{ending}")
    with Image.open(tmp_path / "x.png") as image:
        assert image.width == 1500
        assert 500 < image.height < 3000
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_the_same_scores_give_the_same_bytes_whatever_the_own_style(tmp_path: Path) -> None:
    import matplotlib as mpl

    pictures = []
    for size in (3.0, 30.0):
        with mpl.rc_context({"font.size": size}):
            for name in ("x.svg", "x.png"):
                draw_evaluation(CHAIN, tmp_path / name)
                pictures.append((tmp_path / name).read_bytes())
    assert pictures[:2] == pictures[2:]


@pytest.mark.parametrize("names", [("acme/one", "acme/two"), (f"{'n' * 64}/{'a' * 64}",)])
def test_no_names_are_cut_off(names: tuple[str, ...]) -> None:
    figure = build_evaluation_figure(
        evaluated(score(1), score(9, *names), name=f"{'data' * 60}.jsonl")
    )
    figure.draw_without_rendering()
    (axes,) = figure.axes
    width, height = figure.get_size_inches() * figure.dpi
    for text in (*axes.get_yticklabels(), *axes.texts, axes.xaxis.label, *figure.texts):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height


def test_what_cannot_be_drawn_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_plot_path(tmp_path / "x.SVG")
    for name in ("x.pdf", "x", ".svg", "x.svg.gz"):
        with pytest.raises(UsageError, match="unsupported plot format"):
            check_plot_path(tmp_path / name)
    with pytest.raises(NotFoundError, match="no such directory") as error:
        check_plot_path(tmp_path / "no where" / "x.png")
    assert error.value.hint == f"create it first: mkdir -p '{tmp_path}/no where'"
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        check_plot_path(tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NotFoundError, match="needs matplotlib") as caught:
        check_plot_path(tmp_path / "x.png")
    assert caught.value.hint == format_install_command("plot")
