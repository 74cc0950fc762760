"""How an error is answered: each API in its own shape, chosen by the path of the request.

Two APIs share the addresses of models: there a header tells which of them the client speaks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from expertctl.errors import ExpertError
from expertctl.http.printable import printable
from expertctl.schema.strict_json import JsonObject
from expertctl.server.field_error import FieldError
from expertctl.server.request_id import request_id_of
from expertctl.server.statuses import retry_after, status_of

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    408: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Told:
    """An error, the status that says it, and the request that it answers."""

    error: ExpertError
    status: int
    request_id: str


class OwnFacts(msgspec.Struct, frozen=True):
    """What went wrong: a stable word, a sentence, and the way out where there is one."""

    code: str
    message: str
    hint: str


class OwnError(msgspec.Struct, frozen=True):
    """An error of the native API, which is that of ``--json`` on the command line."""

    error: OwnFacts


class OpenAIFacts(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's words; ``param`` is the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, frozen=True):
    """An error of the OpenAI API."""

    error: OpenAIFacts


class AnthropicFacts(msgspec.Struct, frozen=True):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error of the Anthropic API."""

    error: AnthropicFacts
    request_id: str


ErrorBody = OwnError | OpenAIError | AnthropicError
Shape = Callable[[Told], ErrorBody]


def own_body(told: Told) -> OwnError:
    """Return the body of the native API."""
    error = told.error
    return OwnError(OwnFacts(error.code, printable(error.message), printable(error.hint)))


def openai_body(told: Told) -> OpenAIError:
    """Return the error object of the OpenAI API."""
    param = told.error.field if isinstance(told.error, FieldError) else None
    usual = "invalid_request_error" if told.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(told.status, usual)
    message = printable(told.error.message)
    return OpenAIError(OpenAIFacts(message, kind, param or None, _openai_code(told)))


def anthropic_body(told: Told) -> AnthropicError:
    """Return the error object of the Anthropic API."""
    usual = "invalid_request_error" if told.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(told.status, usual)
    return AnthropicError(AnthropicFacts(kind, printable(told.error.message)), told.request_id)


MODELS = "/v1/models"

_SHAPES: tuple[tuple[str, Shape, type[ErrorBody]], ...] = (
    ("/v1/messages", anthropic_body, AnthropicError),
    ("/v1/chat/completions", openai_body, OpenAIError),
    ("/v1/completions", openai_body, OpenAIError),
    (MODELS, openai_body, OpenAIError),
)


def error_body(error: ExpertError, scope: Scope) -> JsonObject:
    """Return the body for an error, in the shape of the API that the path belongs to."""
    document: JsonObject = msgspec.to_builtins(_body(error, scope, status_of(error)))
    return document


def error_response(error: ExpertError, scope: Scope, *, status: int | None = None) -> Response:
    """Return the answer to a request that failed; ``status`` overrides that of the table."""
    _note(error, scope)
    code = status or status_of(error)
    headers = {"Cache-Control": "no-store"}
    if (seconds := retry_after(error)) is not None:
        headers["Retry-After"] = str(seconds)
    if code == 408:  # else official clients would repeat a request whose time is over
        headers["x-should-retry"] = "false"
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(_body(error, scope, code))
    return Response(content, code, headers, media_type="application/json")


def error_event(error: ExpertError, scope: Scope) -> bytes:
    """Return the event that ends a stream after an error.

    OpenAI's streams have no names for events; in the others it is called ``error``.
    """
    _note(error, scope)
    data = msgspec.json.encode(_body(error, scope, status_of(error)))
    unnamed = _shape_of(str(scope.get("path", ""))) is openai_body
    return b"data: %s\n\n" % data if unnamed else b"event: error\ndata: %s\n\n" % data


def _note(error: ExpertError, scope: Scope) -> None:
    """Keep the code with the request, for logs and traces."""
    scope.setdefault("state", {})["error_code"] = error.code


def _body(error: ExpertError, scope: Scope, status: int) -> ErrorBody:
    path = str(scope.get("path", ""))
    shape = _shape_of(path)
    if _is_below(path, MODELS) and is_of_anthropic(scope):
        shape = anthropic_body
    return shape(Told(error, status, request_id_of(scope)))


def error_kinds(path: str) -> tuple[type[ErrorBody], ...]:
    """Return the types that an error's body can have at a path."""
    kind = next((kind for start, _, kind in _SHAPES if _is_below(path, start)), OwnError)
    return (kind, AnthropicError) if _is_below(path, MODELS) else (kind,)


def is_of_anthropic(scope: Scope) -> bool:
    """Whether a client of the Anthropic API asks at an address that OpenAI's API has, too."""
    return any(name == b"anthropic-version" for name, _ in scope.get("headers", ()))


def _shape_of(path: str) -> Shape:
    return next((shape for start, shape, _ in _SHAPES if _is_below(path, start)), own_body)


def _is_below(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")


def _openai_code(told: Told) -> str | None:
    return (
        told.error.code if told.error.code == "model_not_found" else _OPENAI_CODES.get(told.status)
    )
