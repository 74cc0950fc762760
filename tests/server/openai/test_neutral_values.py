"""Fields that nothing here does: accepted with the values that ask for nothing."""

from typing import Any

import pytest

from expertctl.http.operation import FieldError
from expertctl.server.openai.generation_request import check_unsupported
from tests.server.openai.client import make_chat_request, make_completion_request


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
    assert check_unsupported(make_chat_request(**fields), strict=True) == ()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_change_the_answer_is_ignored_and_named_unless_fields_are_strict(
    fields: dict[str, Any], name: str
) -> None:
    request = make_chat_request(**fields)
    assert check_unsupported(request) == (name,)
    with pytest.raises(FieldError) as refused:
        check_unsupported(request, strict=True)
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("logit_bias", {"50256": -100}),
        ("web_search_options", {}),
        ("moderation", {"model": "a"}),
        ("function_call", "auto"),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_is_not_done_here_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"{name}: not supported by this server") as refused:
        check_unsupported(make_chat_request(**{name: value}))
    assert refused.value.field == name


def test_a_field_that_has_a_newer_name_is_refused_with_it() -> None:
    with pytest.raises(FieldError) as refused:
        check_unsupported(make_chat_request(functions=[{"name": "f"}]))
    assert refused.value.hint == "use tools"


def test_the_best_of_several_completions_is_not_chosen() -> None:
    with pytest.raises(FieldError, match="best_of"):
        check_unsupported(make_completion_request(best_of=2))
    check_unsupported(make_completion_request(best_of=1))
