"""What a document and a person are told of an evaluation of routing."""

import json

import pytest

from expertctl.cli import output
from expertctl.cli.routing_evaluation import (
    build_routing_document,
    describe_accuracy_shortfall,
    format_routing_evaluation,
)
from expertctl.schema.validation import find_problems
from tests.routing.evaluations import Row, make_evaluation

HAND: list[Row] = [
    ("sorting", "sorting", 0.9),
    ("sorting", "dates", 0.8),
    ("sorting", "sorting", 0.4),
    ("dates", "dates", 0.5),
    (None, "dates", 0.7),
    (None, None, None),
]

TEXT = """\
held-out.jsonl: n = 6, 3 experts installed, encoder lexical, threshold 0.50, base tiny-base

                                prompts  share  95 % interval
decided as wanted               3 of 6   0.500  0.188 to 0.812
in scope: by the right expert   2 of 4   0.500  0.150 to 0.850
in scope: left to the base      1 of 4   0.250  0.046 to 0.699
out of scope: left to the base  1 of 2   0.500  0.095 to 0.905
answered by an expert           4 of 6   0.667  0.300 to 0.903
answered: by the right expert   2 of 4   0.500  0.150 to 0.850

TIMES  WANTED        GOT
1      acme/sorting  acme/dates
1      acme/sorting  none
1      none          acme/dates

ANSWERED  WRONG   THRESHOLD
83 %      40.0 %  0.40
50 %      66.7 %  0.70
these prompts would be decided best with threshold 0.40: 0.667 as wanted

MS A PROMPT  MEDIAN  95 %
encode       1.00    1.00
plan         2.00    2.00

wrong decisions, 2 of 3:
  line 2
    prompt  "prompt 2"
    wanted  acme/sorting
    got     acme/dates: reason 2
  line 3
    prompt  "prompt 3"
    wanted  acme/sorting
    got     none; first was acme/sorting: reason 3"""


def test_a_person_is_told_the_figures_in_this_order() -> None:
    assert format_routing_evaluation(make_evaluation(HAND), show=2) == TEXT


def test_the_document_counts_each_expert() -> None:
    told = build_routing_document(make_evaluation(HAND), show=1, min_accuracy=None)
    assert told["per_expert"] == [
        {
            "expert": "acme/sorting",
            "wanted": 3,
            "right": 1,
            "abstained": 1,
            "answered": 1,
            "recall": 0.333333,
            "precision": 1.0,
        },
        {
            "expert": "acme/dates",
            "wanted": 1,
            "right": 1,
            "abstained": 0,
            "answered": 3,
            "recall": 1.0,
            "precision": 0.333333,
        },
    ]
    assert told["accuracy"] == {"right": 3, "n": 6, "share": 0.5, "low": 0.187616, "high": 0.812384}


def test_the_document_holds_the_whole_confusion_matrix() -> None:
    told = build_routing_document(make_evaluation(HAND), show=0, min_accuracy=None)
    assert told["confusion"] == [
        {"wanted": "acme/dates", "got": "acme/dates", "n": 1},
        {"wanted": "acme/sorting", "got": "acme/dates", "n": 1},
        {"wanted": "acme/sorting", "got": "acme/sorting", "n": 1},
        {"wanted": "acme/sorting", "got": None, "n": 1},
        {"wanted": None, "got": "acme/dates", "n": 1},
        {"wanted": None, "got": None, "n": 1},
    ]
    assert told["wrong"] == []


def test_the_document_tells_what_is_needed_to_look_a_wrong_decision_up() -> None:
    told = build_routing_document(make_evaluation(HAND), show=1, min_accuracy=None)
    assert told["wrong"] == [
        {
            "line": 2,
            "id": None,
            "prompt": "prompt 2",
            "wanted": "acme/sorting",
            "got": "acme/dates",
            "first": "acme/dates",
            "confidence": 0.8,
            "reason": "reason 2",
        }
    ]


def test_a_long_curve_has_about_a_hundred_points_in_the_document() -> None:
    told = build_routing_document(
        make_evaluation([("a", "a", i / 1000) for i in range(1000)]), show=0, min_accuracy=None
    )
    points = json.loads(json.dumps(told["risk_coverage"]))["points"]
    assert (len(points), points[0]["threshold"], points[-1]["coverage"]) == (102, None, 1.0)


@pytest.mark.parametrize(
    "rows",
    [
        HAND,
        [(None, None, None)],
        [("a", None, None)],
        [("a", "a", 0.9)],
        [("a", "b", 0.9)] * 200,
        [(f"e{i}", f"e{i + 1}", i / 300) for i in range(300)],
    ],
    ids=["hand", "none", "nobody", "right", "wrong", "many"],
)
def test_every_evaluation_has_a_document_and_a_text(rows: list[Row]) -> None:
    found = make_evaluation(rows)
    told = json.loads(
        json.dumps(build_routing_document(found, show=2, min_accuracy=0.5), allow_nan=False)
    )
    assert find_problems(told, "eval-routing") == []
    assert sum(cell["n"] for cell in told["confusion"]) == told["n"] == len(rows)
    assert told["passed"] == (describe_accuracy_shortfall(found, 0.5) == "")
    assert format_routing_evaluation(found, show=2).startswith("held-out.jsonl: n = ")


def test_only_the_commonest_confusions_are_shown_to_a_person() -> None:
    found = make_evaluation([(f"e{i:02}", "x", 0.9) for i in range(12) for _ in range(i + 1)])
    shown = format_routing_evaluation(found, show=0)
    assert shown.index("12     acme/e11  acme/x") < shown.index("11     acme/e10  acme/x")
    assert "acme/e01" not in shown
    assert "… and 2 more pairs; --json has all" in shown


def test_the_curve_is_told_at_a_few_coverages() -> None:
    shown = format_routing_evaluation(
        make_evaluation([("a", "a", i / 100) for i in range(100)]), show=0
    )
    assert "ANSWERED  WRONG  THRESHOLD\n100 %     0.0 %  0.00\n90 %      0.0 %  0.10\n" in shown
    assert "these prompts would be decided best with threshold 0.00: 1.000 as wanted" in shown
    nobody = format_routing_evaluation(make_evaluation([(None, "a", 0.9)]), show=0)
    assert "decided best with no expert: 1.000 as wanted" in nobody


def test_a_decision_without_a_candidate_says_so() -> None:
    shown = format_routing_evaluation(make_evaluation([("a", None, None)]), show=1)
    assert "got     none; no expert may answer" in shown


def test_a_long_prompt_is_cut_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_QUOTED_CHARACTERS", 4)
    assert 'prompt  "prom…"' in format_routing_evaluation(
        make_evaluation([("a", None, None)]), show=1
    )
