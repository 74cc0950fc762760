"""Bars and sparklines, character by character."""

import io
import sys

import pytest

from expertctl.cli.stats import TerminalCanvas

BLOCKS, PLAIN = TerminalCanvas(80, has_blocks=True), TerminalCanvas(80, has_blocks=False)


@pytest.mark.parametrize(
    ("share", "blocks", "plain"),
    [
        (0.0, "", ""),
        (0.001, "▏", "#"),
        (0.25, "██", "##"),
        (0.3, "██▍", "##"),
        (1.0, "████████", "########"),
        (7.0, "████████", "########"),
        (-1.0, "", ""),
    ],
)
def test_a_bar_is_as_long_as_its_share(share: float, blocks: str, plain: str) -> None:
    assert BLOCKS.draw_bar(share, 8) == blocks
    assert PLAIN.draw_bar(share, 8) == plain


def test_a_sparkline_has_a_character_for_each_value() -> None:
    values = [None, 0.0, 1.0, 3.5, 7.0, 9.0]
    assert BLOCKS.draw_sparkline(values, maximum=7.0) == "·▁▂▅██"
    assert PLAIN.draw_sparkline(values, maximum=7.0) == " _.=##"


@pytest.mark.parametrize(
    ("encoding", "blocks"), [("utf-8", True), ("ascii", False), ("latin-1", False)]
)
def test_what_the_stream_cannot_say_is_drawn_in_ascii(
    encoding: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert TerminalCanvas.for_stdout().has_blocks is blocks


def test_a_pipe_gets_drawings_of_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "41")
    assert TerminalCanvas.for_stdout().columns == 80
    monkeypatch.setattr(shown, "isatty", lambda: True)
    assert TerminalCanvas.for_stdout().columns == 41
