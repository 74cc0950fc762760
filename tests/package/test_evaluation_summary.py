"""Evaluations in words: counts, shares, and an interval that shows how little few answers prove."""

from dataclasses import astuple

import pytest

from expertctl.package.evaluation import describe_evaluation, summarise_evaluation
from expertctl.schema.manifest import Evaluation


def entry(*, n: int, base: float, expert: float, metric: str = "exact_match") -> Evaluation:
    return Evaluation("sums", "0" * 64, n, metric, base=base, expert=expert, date="2026-01-01")


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        # intervals worked out by hand with Wilson's formula (1927)
        (
            entry(n=5, base=0, expert=1),
            "5 of 5 right (100 %, 95 % interval 57 to 100 %); base alone 0 of 5",
        ),
        (
            entry(n=200, base=0.06, expert=0.91),
            "182 of 200 right (91 %, 95 % interval 86 to 94 %); base alone 12 of 200",
        ),
        (
            entry(n=3, base=0.3333, expert=0.6667, metric="json"),
            "2 of 3 right (67 %, 95 % interval 21 to 94 %); base alone 1 of 3",
        ),
        (
            entry(n=2000, base=0.5, expert=0.9995, metric="contains"),
            "1999 of 2000 right (99.9 %, 95 % interval 99.7 to 100.0 %); base alone 1000 of 2000",
        ),
        (
            entry(n=300, base=0.0033, expert=0.9967),
            "299 of 300 right (99 %, 95 % interval 98 to 100 %); base alone 1 of 300",
        ),
        (entry(n=20, base=0.1, expert=0.35, metric="bleu"), "0.35; base alone 0.1 (bleu, n = 20)"),
        (entry(n=20, base=31.5, expert=-2), "-2; base alone 31.5 (exact_match, n = 20)"),
        (entry(n=7, base=0, expert=0.9), "0.9; base alone 0 (exact_match, n = 7)"),
        (entry(n=7, base=float("inf"), expert=1), "1; base alone inf (exact_match, n = 7)"),
    ],
)
def test_an_evaluation_is_told_in_counts_where_it_counts(measured: Evaluation, text: str) -> None:
    assert describe_evaluation(measured) == text


@pytest.mark.parametrize(
    ("measured", "cells"),
    [
        (
            entry(n=200, base=0.06, expert=0.91),
            ("6 %", "91 %", "+85 points", "12 of 200", "182 of 200", "86 to 94 %", True, False),
        ),
        (
            entry(n=200, base=0.91, expert=0.06),
            (
                "91 %",
                "6 %",
                "\N{MINUS SIGN}85 points",
                "182 of 200",
                "12 of 200",
                "3 to 10 %",
                False,
                True,
            ),
        ),
        (
            entry(n=1500, base=0.5, expert=0.5),
            (
                *("50.0 %", "50.0 %", "+0.0 points", "750 of 1,500", "750 of 1,500"),
                *("47.5 to 52.5 %", False, False),
            ),
        ),
        (
            entry(n=300, base=0.0033, expert=0.9967),
            ("1 %", "99 %", "+99 points", "1 of 300", "299 of 300", "98 to 100 %", True, False),
        ),
        (
            entry(n=64, base=2.4, expert=2.1, metric="nll"),
            ("2.4", "2.1", "\N{MINUS SIGN}0.3", "", "", "", False, False),
        ),
    ],
)
def test_a_table_has_percentages_and_intervals_only_where_answers_were_counted(
    measured: Evaluation, cells: tuple[str | bool, ...]
) -> None:
    assert astuple(summarise_evaluation(measured)) == cells


def test_the_table_and_the_line_state_the_same() -> None:
    measured = entry(n=200, base=0.06, expert=0.91)
    text, row = describe_evaluation(measured), summarise_evaluation(measured)
    for part in (row.expert, row.expert_count, row.base_count, row.interval):
        assert part in text


@pytest.mark.parametrize(
    ("n", "base", "expert", "gain"),
    [
        (300, 0.5, 0.4967, "\N{MINUS SIGN}0.3 points"),
        (300, 0.5, 0.5, "+0 points"),
        (300, 0.5, 0.51, "+1 points"),
        (5000, 0.5, 0.4998, "\N{MINUS SIGN}0.02 points"),
        (5000, 0.5, 0.5006, "+0.06 points"),
    ],
)
def test_a_small_gain_is_not_shown_as_none(n: int, base: float, expert: float, gain: str) -> None:
    assert summarise_evaluation(entry(n=n, base=base, expert=expert)).gain == gain
