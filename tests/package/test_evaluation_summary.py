"""Evaluations in words: counts, shares, and an interval that shows how little few answers prove."""

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


def test_a_table_has_the_interval_of_the_expert_only_where_answers_were_counted() -> None:
    counted = summarise_evaluation(entry(n=5, base=0, expert=1))
    assert (counted.base, counted.expert) == ("0 of 5 (0 %)", "5 of 5 (100 %)")
    assert counted.interval == "57 to 100 %"
    nearly = summarise_evaluation(entry(n=300, base=0.0033, expert=0.9967))
    assert (nearly.base, nearly.expert) == ("1 of 300 (1 %)", "299 of 300 (99 %)")
    assert summarise_evaluation(entry(n=20, base=0.1, expert=0.35, metric="bleu")).interval == ""
