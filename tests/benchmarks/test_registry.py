"""What a comparison of times is as a rate: the inverse, with the spread turned round."""

from benchmarks.harness import Row
from benchmarks.registry import _to_rate_row

TIMES = Row("a case", 20.0, "a rival", 50.0, "ms", "lower", 0.4, (0.25, 0.5), "<= 1.0", True)


def test_a_rate_is_the_amount_by_seconds_and_more_is_better() -> None:
    row = _to_rate_row(TIMES, 10.0, "MB/s", None)
    assert (row.ours, row.theirs, row.unit, row.better) == (500.0, 200.0, "MB/s", "higher")
    assert (row.ratio, row.spread) == (2.5, (2.0, 4.0))


def test_the_target_is_one_of_rates() -> None:
    for target, met in ((">= 2.5", True), (">= 2.6", False)):
        row = _to_rate_row(TIMES, 10.0, "MB/s", target)
        assert (row.target, row.ok) == (target, met)
