"""The body of a completion call: every published field is known."""

from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params as params

from expertctl.http.operation import FieldError
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.openai.generation_request import check_unsupported
from tests.server.openai.client import make_completion_request
from tests.server.openai.test_chat_request import OURS

PUBLISHED = {
    *get_type_hints(params.CompletionCreateParamsNonStreaming),
    *get_type_hints(params.CompletionCreateParamsStreaming),
}
OF_OTHER_SERVERS = {"parse_special", "add_special_tokens"}
"""Fields of llama.cpp and vLLM."""


def test_every_published_field_is_known_and_none_but_ours_is_added() -> None:
    known = {field.name for field in msgspec.structs.fields(CompletionRequest)}
    assert known - OURS - OF_OTHER_SERVERS == PUBLISHED


@pytest.mark.parametrize("name", sorted(PUBLISHED - {"model", "prompt"}))
def test_a_published_field_may_be_null(name: str) -> None:
    check_unsupported(make_completion_request(**{name: None}))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"parse_special": "yes"}, "parse_special"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"messages": []}, ""),
    ],
    ids=str,
)
def test_a_field_that_is_not_as_it_must_be_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        make_completion_request(**fields)
    assert refused.value.field == field
