"""Intervals and the test, against numbers that others published."""

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.package.evaluation import (
    mcnemar_p_value,
    paired_difference_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_shares_have_the_intervals_of_newcombe_1998(
    right: int, n: int, low: float, high: float
) -> None:
    """Table I, method 3, of Newcombe (1998), Statistics in Medicine 17:857-872."""
    interval = wilson_interval(right, n)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_a_gain_has_the_interval_of_bonett_and_price() -> None:
    """21 pairs, 1 changed one way and 7 the other (Bentur et al. 2009, a published example)."""
    interval = paired_difference_interval(1, 7, 21)
    assert (round(interval.low, 3), round(interval.high, 3)) == (-0.508, -0.013)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (9, 2, 0.06543),  # the example of R's exact2x2
        (121, 59, 4.434444e-06),  # the example of statsmodels
        (0, 0, 1.0),
        (5, 5, 1.0),
        (10, 0, 2 / 1024),
    ],
)
def test_p_is_that_of_other_implementations(gained: int, lost: int, p: float) -> None:
    assert mcnemar_p_value(gained, lost) == pytest.approx(p, rel=1e-4)
    assert mcnemar_p_value(lost, gained) == mcnemar_p_value(gained, lost)


def test_p_of_very_many_changes_is_finite() -> None:
    assert mcnemar_p_value(60_000, 40_000) == 0.0
    assert 0.9 < mcnemar_p_value(10_001, 10_000) <= 1.0


@given(st.integers(0, 60), st.integers(0, 60))
def test_p_is_the_plain_sum(gained: int, lost: int) -> None:
    n = gained + lost
    plain = sum(comb(n, k) for k in range(min(gained, lost) + 1)) / 2 ** (n - 1) if n else 1.0
    assert mcnemar_p_value(gained, lost) == pytest.approx(min(1.0, plain))


@given(st.data(), st.integers(1, 300))
def test_an_interval_holds_its_figure(data: st.DataObject, n: int) -> None:
    gained = data.draw(st.integers(0, n))
    lost = data.draw(st.integers(0, n - gained))
    share, gain = wilson_interval(gained, n), paired_difference_interval(gained, lost, n)
    assert 0.0 <= share.low <= gained / n + 1e-12
    assert gained / n - 1e-12 <= share.high <= 1.0
    assert -1.0 <= gain.low <= (gained - lost) / n <= gain.high <= 1.0
