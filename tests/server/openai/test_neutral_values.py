"""Fields that nothing here does: accepted with the values that ask for nothing."""

from typing import Any

import pytest

from expertctl.server.field_error import FieldError
from expertctl.server.openai.neutral_values import check_neutral
from tests.server.openai.bodies import chat_request, completion_request


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"modalities": ["text"]},
        {"verbosity": "medium"},
        {"logit_bias": {}},
        {"functions": []},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)
def test_a_value_that_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    check_neutral(chat_request(**fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("service_tier", "flex"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("verbosity", "low"),
        ("logit_bias", {"50256": -100}),
        ("prediction", {"type": "content", "content": "a"}),
        ("web_search_options", {}),
        ("moderation", {"model": "a"}),
        ("function_call", "auto"),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_is_not_done_here_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"{name}: this server does not do that") as refused:
        check_neutral(chat_request(**{name: value}))
    assert refused.value.field == name


def test_a_field_that_has_a_newer_name_is_refused_with_it() -> None:
    with pytest.raises(FieldError) as refused:
        check_neutral(chat_request(functions=[{"name": "f"}]))
    assert refused.value.hint == "use tools"


def test_the_best_of_several_completions_is_not_chosen() -> None:
    with pytest.raises(FieldError, match="best_of"):
        check_neutral(completion_request(best_of=2))
    check_neutral(completion_request(best_of=1))


def test_options_of_streams_are_for_streams() -> None:
    with pytest.raises(FieldError, match="for streams only"):
        check_neutral(chat_request(stream_options={"include_usage": True}))
    options = {"include_obfuscation": True}
    with pytest.raises(FieldError, match="include_obfuscation"):
        check_neutral(chat_request(stream=True, stream_options=options))
