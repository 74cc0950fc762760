"""How evidence becomes a rate, against the sums written out."""

from dataclasses import replace

import pytest

from expertctl.digest import Digest
from expertctl.store.success import HALF_LIFE_DAYS, PRIOR, STRENGTH, Evidence, SuccessRates, fading

X = Digest.of(b"x")
DAY = 86_400.0


def test_evidence_fades_by_half() -> None:
    assert fading(0.0, 0.0) == 1.0
    assert fading(0.0, HALF_LIFE_DAYS * DAY) == 0.5
    assert fading(0.0, 3 * HALF_LIFE_DAYS * DAY) == 0.125
    assert fading(5.0, 0.0) == 1.0


def test_evidence_is_never_less_than_none() -> None:
    less = Evidence(at=0.0, good=0.5).minus(Evidence(at=0.0, good=1.0, malformed=1.0))
    assert less == Evidence(at=0.0)
    assert not less


def test_the_prior_counts_for_some_judgements() -> None:
    none = SuccessRates.weigh([], now=0.0)
    assert none.of(X) is None
    [seen] = [SuccessRates.weigh([(X, "a", Evidence(at=0.0, good=0.0, bad=0.0))], now=0.0)]
    assert seen.of(X) == PRIOR
    one = SuccessRates.weigh([(X, "a", Evidence(at=0.0, good=1.0, bad=0.0))], now=0.0)
    assert one.of(X) == pytest.approx((1 + STRENGTH * PRIOR) / (1 + STRENGTH))
    assert one.of(X, task="a") == one.of(X)


def test_a_task_begins_at_what_the_others_say() -> None:
    rates = SuccessRates.weigh(
        [
            (X, "a", Evidence(at=0.0, good=0.0, bad=6.0)),
            (X, "b", Evidence(at=0.0, good=1.0, bad=0.0)),
        ],
        now=0.0,
    )
    others = 2 / 10
    assert rates.of(X, task="b") == pytest.approx((1 + 4 * others) / 5)
    assert rates.of(X, task="c") == rates.of(X) == pytest.approx(3 / 11)


def test_old_evidence_returns_to_the_prior() -> None:
    old = SuccessRates.weigh([(X, "a", Evidence(at=0.0, good=0.0, bad=50.0))], now=3650 * DAY)
    assert old.of(X, task="a") == pytest.approx(PRIOR, abs=1e-6)


def test_the_form_of_answers_counts_for_four_judgements_at_most() -> None:
    often = Evidence(at=0.0, well_formed=900.0, malformed=100.0)
    rates = SuccessRates.weigh([(X, "a", often)], now=0.0)
    assert rates.of(X) == pytest.approx((3.6 + 2) / 8)
    words = replace(often, bad=4.0)
    assert SuccessRates.weigh([(X, "a", words)], now=0.0).of(X) == pytest.approx((3.6 + 2) / 12)
    seldom = Evidence(at=0.0, well_formed=0.25)
    assert SuccessRates.weigh([(X, "a", seldom)], now=0.0).of(X) == pytest.approx(2.25 / 4.25)
