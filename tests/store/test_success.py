"""How evidence becomes a rate, against the sums written out."""

import pytest

from expertctl.digest import Digest
from expertctl.store.success import (
    HALF_LIFE_DAYS,
    PRIOR,
    STRENGTH,
    Evidence,
    KeptEvidence,
    SuccessRates,
    fading,
)

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


def rates(*kept: KeptEvidence, now: float = 0.0) -> SuccessRates:
    return SuccessRates({str(X): kept} if kept else {}, now=now)


def test_the_prior_counts_for_some_judgements() -> None:
    assert rates().of(X) is None
    assert rates().of(X, task="a") is None
    assert rates(("a", 0.0, 0.0, 0.0, 0.0, 0.0)).of(X) == PRIOR
    one = rates(("a", 1.0, 0.0, 0.0, 0.0, 0.0))
    assert one.of(X) == pytest.approx((1 + STRENGTH * PRIOR) / (1 + STRENGTH))
    assert one.of(X, task="a") == one.of(X)


def test_a_task_begins_at_what_the_others_say() -> None:
    both = rates(("a", 0.0, 6.0, 0.0, 0.0, 0.0), ("b", 1.0, 0.0, 0.0, 0.0, 0.0))
    others = 2 / 10
    assert both.of(X, task="b") == pytest.approx((1 + 4 * others) / 5)
    assert both.of(X, task="c") == both.of(X) == pytest.approx(3 / 11)


def test_old_evidence_returns_to_the_prior() -> None:
    old = rates(("a", 0.0, 50.0, 0.0, 0.0, 0.0), now=3650 * DAY)
    assert old.of(X, task="a") == pytest.approx(PRIOR, abs=1e-6)


def test_the_form_of_answers_counts_for_four_judgements_at_most() -> None:
    often = rates(("a", 0.0, 0.0, 900.0, 100.0, 0.0))
    assert often.of(X) == pytest.approx((3.6 + 2) / 8)
    with_words = rates(("a", 0.0, 4.0, 900.0, 100.0, 0.0))
    assert with_words.of(X) == pytest.approx((3.6 + 2) / 12)
    seldom = rates(("a", 0.0, 0.0, 0.25, 0.0, 0.0))
    assert seldom.of(X) == pytest.approx(2.25 / 4.25)
