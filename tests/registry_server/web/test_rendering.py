"""How results of evaluations are written."""

from dataclasses import replace

import pytest

from expertctl.package.evaluation import describe_evaluation
from expertctl.schema.manifest import Evaluation
from registry_server.web.rendering import EvaluationRow

ENTRY = Evaluation(
    task="sql",
    dataset_sha256="0" * 64,
    n=200,
    metric="exact_match",
    base=0.06,
    expert=0.91,
    date="2026-11-20",
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("6 %", "91 %", "+85 points", "12 of 200", "182 of 200", "86 to 94 %", "gain")),
        (
            {"base": 0.91, "expert": 0.06},
            (
                "91 %",
                "6 %",
                "\N{MINUS SIGN}85 points",
                "182 of 200",
                "12 of 200",
                "3 to 10 %",
                "loss",
            ),
        ),
        (
            {"n": 1500, "base": 0.5, "expert": 0.5},
            *[
                (
                    "50.0 %",
                    "50.0 %",
                    "+0.0 points",
                    "750 of 1,500",
                    "750 of 1,500",
                    "47.5 to 52.5 %",
                    "",
                )
            ],
        ),
        (
            {"metric": "nll", "base": 2.4, "expert": 2.1},
            ("2.4", "2.1", "\N{MINUS SIGN}0.3", "", "", "", ""),
        ),
        ({"n": 7, "base": 0.5, "expert": 0.6}, ("0.5", "0.6", "+0.1", "", "", "", "")),
    ],
)
def test_a_result_is_a_percentage_with_an_interval_if_it_counts_answers(
    changes: dict[str, object], expected: tuple[str, ...]
) -> None:
    row = EvaluationRow.from_entry(replace(ENTRY, **changes))  # type: ignore[arg-type]
    shown = (row.base, row.expert, row.gain, row.base_count, row.expert_count, row.interval)
    assert (*shown, row.tone) == expected


def test_the_page_and_the_command_state_the_same() -> None:
    text, row = describe_evaluation(ENTRY), EvaluationRow.from_entry(ENTRY)
    for part in (row.expert, row.expert_count, row.base_count, row.interval):
        assert part in text
