"""The transcripts of the first hour are what a terminal shows now.

If one differs and the change is wanted, run ``python -m scripts.first_hour`` and read it.
"""

import shutil

import pytest

from scripts.first_hour import TRANSCRIPTS, WIDTHS, normalise, record

pytestmark = pytest.mark.all


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_hour_reads_as_its_transcript(width: int) -> None:
    assert shutil.which("tmux"), "apt-get install tmux"
    assert shutil.which("curl"), "apt-get install curl"
    path = TRANSCRIPTS / f"first-hour-{width}.txt"
    assert record(width=width).splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_only_what_differs_from_run_to_run_is_replaced() -> None:
    figures = "320 tokens/s, first\n    after 41 ms, 97 ms in all"
    assert normalise(figures) == "200 tokens/s, first after 100 ms, 200 ms in all"
    assert normalise(f"me  sha256:{'f' * 64}") == f"me  sha256:{'0123456789abcdef' * 4}"
    for kept in ("1 of 1 (100 %)", "starter/sql  1.0.0  289.4 kB", "deadbeef is a name", "added"):
        assert normalise(kept) == kept
