"""Errors as the official client meets them."""

from typing import Any

import anthropic
import pytest
from anthropic.types.shared import ErrorResponse

from tests.server.anthropic.client import WEATHER, make_client
from tests.server.harness import BASE, ServerHarness

ASK: dict[str, Any] = {"model": BASE, "max_tokens": 16}
HI: Any = [{"role": "user", "content": "Hi"}]
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"model": "gpt-9"}, anthropic.NotFoundError, "gpt-9"),
        ({"model": "acme/none"}, anthropic.NotFoundError, "acme/none"),
        ({"model": "../../etc/passwd"}, anthropic.NotFoundError, "passwd"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"mcp_servers": [{}]}}, anthropic.BadRequestError, "mcp_servers"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "any"}},
            anthropic.BadRequestError,
            "tool_choice",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            anthropic.BadRequestError,
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            anthropic.BadRequestError,
            "tokens",
        ),
    ],
)
def test_an_error_has_its_class_and_says_what_is_wrong(
    client: anthropic.Anthropic, fields: dict[str, Any], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind) as refused:
        client.messages.create(**{"messages": HI, **ASK, **fields})
    error: Any = refused.value
    told = ErrorResponse.model_validate(error.body, strict=True)
    assert named in told.error.message
    assert told.request_id


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"model": "\xff"}', "application/json", 400),
        (b'{"model": "a", "model": "b"}', "application/json", 400),
        (b"{}", "text/plain", 415),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_in_the_same_shape(
    scripted: ServerHarness, content: bytes, media_type: str, status: int
) -> None:
    headers = {"Content-Type": media_type}
    answer = scripted.client().post("/v1/messages", content=content, headers=headers)
    assert answer.status_code == status
    told = ErrorResponse.model_validate(answer.json(), strict=True)
    assert told.error.type == "invalid_request_error"


def test_the_version_that_a_client_names_makes_no_difference(scripted: ServerHarness) -> None:
    body = {"messages": HI, **ASK}
    for headers in ({}, {"anthropic-version": "2023-06-01"}, {"anthropic-beta": "tools-2024"}):
        answer = scripted.client().post("/v1/messages", json=body, headers=headers)
        assert answer.status_code == 200


def test_the_beta_address_is_the_same(scripted: ServerHarness) -> None:
    with make_client(scripted) as client:
        message = client.beta.messages.create(messages=HI, betas=["token-counting"], **ASK)
    assert message.role == "assistant"
