"""Who is pinned: so many of each layer, or those that a share of all prompts ask for."""

import pytest

from expertctl.engine.moe.cache_plan import parse_pins, select_pinned
from expertctl.engine.moe.usage_profile import build_prompt_profile
from expertctl.engine_config import Pins, SharePins, TopPins
from expertctl.errors import UsageError

USAGE = build_prompt_profile({0: {3: 24, 7: 12, 9: 11, 1: 2}}, experts=64, prompts=24)


@pytest.mark.parametrize(
    ("text", "pins"),
    [("8", TopPins(8)), ("0", TopPins(0)), ("50%", SharePins(0.5)), (" 100% ", SharePins(1.0))],
)
def test_what_a_person_writes_is_read(text: str, pins: Pins) -> None:
    assert parse_pins(text) == pins


@pytest.mark.parametrize("text", ["", "-1", "0.5", "101%", "%", "1025", "eight", "8 %", "٣"])
def test_anything_else_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pins(text)
    assert "50%" in caught.value.hint


def test_so_many_of_each_layer_or_those_that_a_share_asks_for() -> None:
    assert select_pinned(TopPins(2), USAGE, 0, capacity=4) == {3, 7}
    assert select_pinned(SharePins(0.5), USAGE, 0, capacity=4) == {3, 7}
    assert select_pinned(SharePins(0.4), USAGE, 0, capacity=4) == {3, 7, 9}
    assert select_pinned(TopPins(2), USAGE, 5, capacity=4) == frozenset()


def test_more_than_there_are_slots_are_refused_by_number_and_cut_by_share() -> None:
    assert select_pinned(SharePins(0.0), USAGE, 0, capacity=2) == {3, 7}
    with pytest.raises(UsageError, match="layer 0 has 2 slots"):
        select_pinned(TopPins(3), USAGE, 0, capacity=2)


def test_a_share_of_a_layer_without_slots_is_refused_unless_it_names_nobody() -> None:
    with pytest.raises(UsageError, match="cannot pin 2 routed experts of layer 0") as told:
        select_pinned(SharePins(0.5), USAGE, 0, capacity=0)
    assert "memory" in told.value.hint
    assert select_pinned(SharePins(0.5), USAGE, 1, capacity=0) == frozenset(), "nobody asked it"
