"""Why answers end, in the words of the published API."""

from typing import get_args

import pytest
from openai.types.chat.chat_completion import Choice

from expertctl.engine.generation import FinishReason
from expertctl.server.openai.response import map_finish_reason

PUBLISHED = get_args(Choice.model_fields["finish_reason"].annotation)


@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "stop"), ("length", "length"), ("timeout", "length"), ("cancelled", "length")],
)
def test_what_was_cut_off_is_of_limited_length(reason: FinishReason, told: str) -> None:
    assert map_finish_reason(reason) == told


def test_an_answer_with_calls_ends_with_them_unless_it_was_cut_off() -> None:
    assert map_finish_reason("stop", calls=2) == "tool_calls"
    assert map_finish_reason("length", calls=1) == "length"


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_reason_is_one_that_clients_know(reason: FinishReason) -> None:
    assert {map_finish_reason(reason), map_finish_reason(reason, calls=1)} <= set(PUBLISHED)
