"""Rows about what skipping costs."""

from pathlib import Path

from benchmarks.__main__ import benchmark_names
from benchmarks.moe_skip import CAPS, LATE_CAPS, holdings, rows, trained
from benchmarks.skipped.readings import Found, Part

WHOLE = Found(Part(2.0, 0.0, 0.0), Part(1.2, 0.0, 0.0), 0.9, 900.0)
LESS = Found(Part(2.5, 0.1, 0.3), Part(1.5, 0.2, 0.4), 0.6, 500.0)


def test_it_is_among_the_benchmarks() -> None:
    assert "moe_skip" in benchmark_names()


def test_exact_is_compared_with_the_whole_base_and_skipping_with_exact_at_equal_memory() -> None:
    results = {each: LESS if each.policy.skips else WHOLE for each in holdings((0.5, 0.3))}
    made = rows(WHOLE, results)
    exact, text, answers = made[:3]
    assert len(made) == 2 * (1 + 2 * len(CAPS + LATE_CAPS))
    assert (exact.ratio, exact.target, exact.ok) == (1.0, "<= 1.00001", True)
    assert (text.rival, text.ratio, text.ok) == ("exact", 1.25, None)
    assert "10.0% of weights left out" in str(text.note)
    assert (answers.ours, answers.theirs, answers.better) == (60.0, 90.0, "higher")


def test_who_answers_nothing_rightly_has_no_ratio() -> None:
    nothing = Found(WHOLE.text, WHOLE.answers, 0.0, 1.0)
    results = dict.fromkeys(holdings((0.5,)), nothing)
    assert rows(nothing, results)[2].ratio is None


def test_a_base_that_is_named_is_not_trained(tmp_path: Path) -> None:
    assert trained(tmp_path) == tmp_path
