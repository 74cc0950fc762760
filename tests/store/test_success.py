"""How evidence becomes a rate, against the sums written out."""

import pytest

from expertctl.reference import Digest
from expertctl.store.run_record import (
    HALF_LIFE_DAYS,
    PRIOR,
    STRENGTH,
    RunEvidence,
    StoredEvidence,
    SuccessRates,
    decay_factor,
)

X = Digest.compute(b"x")
DAY = 86_400.0


def test_evidence_fades_by_half() -> None:
    assert decay_factor(0.0, 0.0) == 1.0
    assert decay_factor(0.0, HALF_LIFE_DAYS * DAY) == 0.5
    assert decay_factor(0.0, 3 * HALF_LIFE_DAYS * DAY) == 0.125
    assert decay_factor(5.0, 0.0) == 1.0


def test_evidence_is_never_less_than_none() -> None:
    less = RunEvidence(at=0.0, good=0.5).subtract(RunEvidence(at=0.0, good=1.0, malformed=1.0))
    assert less == RunEvidence(at=0.0)
    assert not less


def rates(*kept: StoredEvidence, now: float = 0.0) -> SuccessRates:
    return SuccessRates({str(X): kept} if kept else {}, now=now)


def test_the_prior_counts_for_some_judgements() -> None:
    assert rates().find_rate(X) is None
    assert rates().find_rate(X, task="a") is None
    assert rates(("a", 0.0, 0.0, 0.0, 0.0, 0.0)).find_rate(X) == PRIOR
    one = rates(("a", 1.0, 0.0, 0.0, 0.0, 0.0))
    assert one.find_rate(X) == pytest.approx((1 + STRENGTH * PRIOR) / (1 + STRENGTH))
    assert one.find_rate(X, task="a") == one.find_rate(X)


def test_a_task_begins_at_what_the_others_say() -> None:
    both = rates(("a", 0.0, 6.0, 0.0, 0.0, 0.0), ("b", 1.0, 0.0, 0.0, 0.0, 0.0))
    others = 2 / 10
    assert both.find_rate(X, task="b") == pytest.approx((1 + 4 * others) / 5)
    assert both.find_rate(X, task="c") == both.find_rate(X) == pytest.approx(3 / 11)


def test_old_evidence_returns_to_the_prior() -> None:
    old = rates(("a", 0.0, 50.0, 0.0, 0.0, 0.0), now=3650 * DAY)
    assert old.find_rate(X, task="a") == pytest.approx(PRIOR, abs=1e-6)


def test_the_form_of_answers_counts_for_four_judgements_at_most() -> None:
    often = rates(("a", 0.0, 0.0, 900.0, 100.0, 0.0))
    assert often.find_rate(X) == pytest.approx((3.6 + 2) / 8)
    with_words = rates(("a", 0.0, 4.0, 900.0, 100.0, 0.0))
    assert with_words.find_rate(X) == pytest.approx((3.6 + 2) / 12)
    seldom = rates(("a", 0.0, 0.0, 0.25, 0.0, 0.0))
    assert seldom.find_rate(X) == pytest.approx(2.25 / 4.25)
