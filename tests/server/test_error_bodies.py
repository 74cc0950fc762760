"""Errors in the shapes of three APIs, read by the types of the official clients."""

import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import ErrorResponse
from openai.types import ErrorObject

from expertctl.errors import (
    BudgetError,
    ContextLengthError,
    ExpertError,
    ForbiddenError,
    MediaTypeError,
    NotFoundError,
    RateLimitError,
    StoreError,
    TimedOutError,
    TooLargeError,
    UnauthenticatedError,
    UnknownAddressError,
    UsageError,
)
from expertctl.http.operation import FieldError
from expertctl.server.responses import error_response, format_error_event
from expertctl.server.settings import ModelNotFoundError

OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/acme/sql")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")


def scope(path: str) -> dict[str, Any]:
    return {"type": "http", "path": path, "state": {"request_id": "req_1"}}


def answered(error: ExpertError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    response = error_response(error, scope(path))
    return response.status_code, json.loads(response.body), dict(response.headers)


@pytest.mark.parametrize("path", OPENAI)
def test_openai_gets_its_own_error_object(path: str) -> None:
    status, body, _ = answered(FieldError("too hot", field="temperature"), path)
    assert (status, set(body)) == (400, {"error"})
    error = ErrorObject.model_validate(body["error"], strict=True)
    assert (error.message, error.type) == ("too hot", "invalid_request_error")
    assert error.param == "temperature"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (UsageError("x"), 400, "invalid_request_error", None),
        (UnauthenticatedError("x"), 401, "authentication_error", "invalid_api_key"),
        (ForbiddenError("x"), 403, "permission_error", None),
        (ModelNotFoundError("x"), 404, "invalid_request_error", "model_not_found"),
        (RateLimitError("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (ExpertError("x"), 500, "server_error", None),
    ],
)
def test_openai_gets_the_types_and_codes_that_it_knows(
    error: ExpertError, status: int, kind: str, code: str | None
) -> None:
    found, body, _ = answered(error, "/v1/chat/completions")
    told = ErrorObject.model_validate(body["error"], strict=True)
    assert (found, told.type, told.code) == (status, kind, code)


@pytest.mark.parametrize("path", ANTHROPIC)
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UsageError("x"), 400, "invalid_request_error"),
        (MediaTypeError("x"), 415, "invalid_request_error"),
        (UnauthenticatedError("x"), 401, "authentication_error"),
        (ForbiddenError("x"), 403, "permission_error"),
        (NotFoundError("x"), 404, "not_found_error"),
        (BudgetError("x"), 422, "invalid_request_error"),
        (RateLimitError("x"), 429, "rate_limit_error"),
        (ExpertError("x"), 500, "api_error"),
        (StoreError("x"), 503, "overloaded_error"),
    ],
)
def test_anthropic_gets_its_own_error_object(
    path: str, error: ExpertError, status: int, kind: str
) -> None:
    found, body, _ = answered(error, path)
    told = ErrorResponse.model_validate(body, strict=True)
    assert (found, told.error.type, told.error.message) == (status, kind, "x")
    assert body["request_id"] == "req_1"


def test_anthropic_calls_a_body_that_is_too_large_by_a_name_of_its_own() -> None:
    """It is in the reference of the API, though not in the types of the client."""
    status, body, _ = answered(TooLargeError("x"), "/v1/messages")
    assert (status, body["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/infer", "/v1/jobs/1", "/healthz", "/", "/moe", "/v2/x"])
def test_everything_else_gets_ours(path: str) -> None:
    _, body, _ = answered(UsageError("no", hint="do"), path)
    assert body == {"error": {"code": "usage", "message": "no", "hint": "do"}}


@pytest.mark.parametrize(
    "path", ["/v1/messagesx", "/v1/chat", "/chat/completions", "/v1/v1/models"]
)
def test_an_address_of_no_api_is_answered_in_the_form_of_whoever_asks(path: str) -> None:
    _, body, _ = answered(UnknownAddressError("no"), path)
    told = ErrorObject.model_validate(body["error"], strict=True)
    assert (told.message, told.type, told.code) == ("no", "invalid_request_error", "unknown_url")
    asked = scope(path) | {"headers": [(b"anthropic-version", b"2023-06-01")]}
    of_anthropic = json.loads(error_response(UnknownAddressError("no"), asked).body)
    shown = ErrorResponse.model_validate(of_anthropic, strict=True)
    assert (shown.error.type, shown.error.message) == ("not_found_error", "no")


LONG = ContextLengthError("the prompt has 20 tokens", size=20, limit=16, hint="--truncate")
MANY = ContextLengthError("messages: 9 characters", size=9, limit=5, unit="characters")


def test_openais_clients_know_a_conversation_that_is_too_long_by_code_and_words() -> None:
    status, body, _ = answered(LONG, "/v1/chat/completions")
    told = ErrorObject.model_validate(body["error"], strict=True)
    assert (status, told.code, told.param) == (400, "context_length_exceeded", "messages")
    assert told.message == (
        "This model's maximum context length is 16 tokens. However, your messages resulted in "
        "20 tokens. Please reduce the length of the messages."
    )
    _, body, _ = answered(MANY, "/v1/chat/completions")
    assert "maximum context length" in body["error"]["message"]
    assert body["error"]["code"] == "context_length_exceeded"


def test_anthropics_clients_know_a_conversation_that_is_too_long_by_its_words() -> None:
    status, body, _ = answered(LONG, "/v1/messages")
    told = ErrorResponse.model_validate(body, strict=True)
    assert (status, told.error.type) == (400, "invalid_request_error")
    assert told.error.message == "prompt is too long: 20 tokens > 16 maximum"
    _, body, _ = answered(MANY, "/v1/messages")
    assert body["error"]["message"] == "prompt is too long: 9 characters > 5 maximum"


def test_headers_say_when_to_come_again_and_how_to_say_who_one_is() -> None:
    _, _, headers = answered(RateLimitError("x", retry_after=7), "/v1/messages")
    assert headers["retry-after"] == "7"
    _, _, headers = answered(UnauthenticatedError("x"), "/v1/models")
    assert headers["www-authenticate"] == "Bearer"


def test_a_message_is_bounded_and_printable() -> None:
    _, body, _ = answered(UsageError("\x1b[31m" + "a" * 5000), "/v1/models")
    assert body["error"]["message"].startswith("?[31maaa")
    assert len(body["error"]["message"]) == 1001


def test_an_error_in_a_stream_is_an_event_of_its_api() -> None:
    error = ExpertError("broken")
    assert format_error_event(error, scope("/v1/chat/completions")).startswith(b'data: {"error":{')
    event = format_error_event(error, scope("/v1/messages"))
    assert event.startswith(b'event: error\ndata: {"type":"error",')
    assert event.endswith(b"\n\n")
    assert format_error_event(error, scope("/v1/infer")).startswith(
        b'event: error\ndata: {"error":'
    )


@pytest.mark.parametrize("make", [openai.OpenAI, anthropic.Anthropic])
def test_the_official_clients_do_not_ask_again_when_the_time_of_a_request_was_over(
    make: type[openai.OpenAI] | type[anthropic.Anthropic],
) -> None:
    asked = list[str]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        status, body, headers = answered(TimedOutError("x"), request.url.path)
        return httpx2.Response(status, json=body, headers=headers)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        client = make(api_key="k", base_url="http://localhost/v1", http_client=http)
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
            client.models.list()
    assert caught.value.status_code == 408
    assert len(asked) == 1
