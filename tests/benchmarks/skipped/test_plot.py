"""The picture of what skipping costs."""

from pathlib import Path

import pytest

from benchmarks.moe_skip import list_configurations
from benchmarks.skipped.evaluation import PartResult, SkippingResult
from benchmarks.skipped.plot import draw_skipping


def test_a_picture_names_each_cap_once_and_says_who_reads_nothing_ahead(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    part = PartResult(2.0, 0.1, 0.3)
    results = {
        holding: SkippingResult(part, part, 0.5, 100.0)
        for holding in list_configurations((0.8, 0.4))
    }
    draw_skipping(results, tmp_path / "skip.svg")
    text = (tmp_path / "skip.svg").read_text(encoding="utf-8")
    assert text.count("<!-- cap 100% of a token -->") == 1
    assert text.count("<!-- cap 100% of a token, nothing read ahead -->") == 1
    assert text.count("<!-- cap 10% of a token -->") == 1
