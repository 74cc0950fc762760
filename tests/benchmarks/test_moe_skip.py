"""Rows about what skipping costs."""

from pathlib import Path

from benchmarks.__main__ import benchmark_names
from benchmarks.moe_skip import CAPS, LATE_CAPS, find_trained_base, list_configurations, make_rows
from benchmarks.skipped.evaluation import PartResult, SkippingResult

WHOLE = SkippingResult(PartResult(2.0, 0.0, 0.0), PartResult(1.2, 0.0, 0.0), 0.9, 900.0)
LESS = SkippingResult(PartResult(2.5, 0.1, 0.3), PartResult(1.5, 0.2, 0.4), 0.6, 500.0)


def test_it_is_among_the_benchmarks() -> None:
    assert "moe_skip" in benchmark_names()


def test_exact_is_compared_with_the_whole_base_and_skipping_with_exact_at_equal_memory() -> None:
    results = {
        each: LESS if each.policy.skips else WHOLE for each in list_configurations((0.5, 0.3))
    }
    made = make_rows(WHOLE, results)
    exact, text, answers = made[:3]
    assert len(made) == 2 * (1 + 2 * len(CAPS + LATE_CAPS))
    assert (exact.ratio, exact.target, exact.ok) == (1.0, "<= 1.00001", True)
    assert (text.rival, text.ratio, text.ok) == ("exact", 1.25, None)
    assert "10.0% of weights left out" in str(text.note)
    assert (answers.ours, answers.theirs, answers.better) == (60.0, 90.0, "higher")


def test_who_answers_nothing_rightly_has_no_ratio() -> None:
    nothing = SkippingResult(WHOLE.text, WHOLE.answers, 0.0, 1.0)
    results = dict.fromkeys(list_configurations((0.5,)), nothing)
    assert make_rows(nothing, results)[2].ratio is None


def test_a_base_that_is_named_is_not_trained(tmp_path: Path) -> None:
    assert find_trained_base(tmp_path) == tmp_path
