"""What `benchmarks.served.overhead` counts as outside the engine."""

from dataclasses import replace

import jsonschema
import pytest

from benchmarks.served.overhead import (
    ANSWER_FORMAT,
    RoutedRequest,
    check_routed,
    compute_overhead_share,
    make_overhead_row,
)

STAGES = {
    "reception": 1.0,
    "reasoning": 40.0,
    "preparation": 200.0,
    "inference": 1700.0,
    "post_processing": 2.0,
}
ROUTED = RoutedRequest(
    wall=2.0,
    timings_ms={"route": 40.0, "load": 200.0, "prefill": 300.0, "decode": 1400.0, "post": 2.0},
    stages=STAGES,
    experts=1,
    passed=True,
)


def test_outside_is_all_but_prefill_and_decode_and_loading_counts_nowhere() -> None:
    assert ROUTED.total == pytest.approx(1.8)
    assert ROUTED.overhead == pytest.approx(0.1)
    assert compute_overhead_share([ROUTED]) == pytest.approx(0.1 / 1.8)


def test_the_share_of_several_is_of_their_sums() -> None:
    longer = replace(ROUTED, wall=4.0, timings_ms={"prefill": 1000.0, "decode": 3000.0})
    assert compute_overhead_share([ROUTED, longer]) == pytest.approx(0.1 / 5.8)


def test_the_row_has_that_share_and_tells_loading_apart() -> None:
    row = make_overhead_row([[ROUTED, ROUTED], [ROUTED, ROUTED]], target="<= 0.05")
    assert row.ours == pytest.approx(100.0)
    assert row.theirs == pytest.approx(1800.0)
    assert row.ratio == pytest.approx(0.1 / 1.8, abs=1e-3)
    assert row.ok is False
    assert row.note is not None
    assert "reasoning 40.0 ms" in row.note
    assert "HTTP, tokenising and handing over 57.0 ms" in row.note
    assert "(not counted) loading 200.0 ms" in row.note
    assert "4 of 4 answers fit" in row.note


def test_a_request_without_a_decision_or_a_check_measures_nothing() -> None:
    check_routed([ROUTED, replace(ROUTED, passed=False)])
    with pytest.raises(SystemExit, match="left to the base"):
        check_routed([ROUTED, replace(ROUTED, experts=0)])
    with pytest.raises(SystemExit, match="not checked"):
        check_routed([ROUTED, replace(ROUTED, passed=None)])


def test_an_answer_of_numbers_fits_the_schema_and_other_text_does_not() -> None:
    validator = jsonschema.Draft202012Validator(ANSWER_FORMAT["schema"])
    assert validator.is_valid(int("26148301779" * 20))
    assert validator.is_valid({"answer": "yes", "sources": []})
    assert not validator.is_valid({"answer": "yes"})
    assert not validator.is_valid("text")
