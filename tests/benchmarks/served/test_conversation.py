"""What `benchmarks.served.conversation` demands of the turns that it compares."""

from dataclasses import replace

import pytest

from benchmarks.served.conversation import TurnPair, check_session_reuse, make_conversation_row
from benchmarks.serving_load import StreamRecord

FIRST = StreamRecord(0.0, times=[3.0], status=200)
WARM = StreamRecord(0.0, times=[0.2], status=200, cached=1030)
COLD = StreamRecord(0.0, times=[4.0], status=200)


def test_the_next_turn_is_found_again_in_its_own_session_only() -> None:
    check_session_reuse(FIRST, TurnPair(WARM, COLD), history=1024)
    with pytest.raises(SystemExit, match="of 1024 tokens only 1000"):
        check_session_reuse(FIRST, TurnPair(replace(WARM, cached=1000), COLD), history=1024)
    with pytest.raises(SystemExit, match="reused KV of another"):
        check_session_reuse(FIRST, TurnPair(WARM, replace(COLD, cached=16)), history=1024)
    with pytest.raises(SystemExit, match="reused KV of another"):
        check_session_reuse(replace(FIRST, cached=16), TurnPair(WARM, COLD), history=1024)


def test_a_turn_without_an_answer_measures_nothing() -> None:
    for unanswered in (replace(COLD, status=503), replace(COLD, times=[])):
        with pytest.raises(SystemExit, match="not answered"):
            check_session_reuse(FIRST, TurnPair(WARM, unanswered), history=1024)


def test_the_row_compares_the_same_turn_with_and_without_what_was_kept() -> None:
    row = make_conversation_row([TurnPair(WARM, COLD)], history=1024, target="<= 0.25")
    assert (row.ours, row.theirs, row.ok) == (200.0, 4000.0, True)
    assert row.ratio == pytest.approx(0.05)
