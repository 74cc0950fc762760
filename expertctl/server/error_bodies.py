"""How an error is answered: each API in its own shape, chosen by the path of the request.

Where the path belongs to several APIs or to none, the request tells which API the client speaks:
Anthropic's clients send ``anthropic-version``, and whatever else is below ``/v1`` is meant for
OpenAI's. An error that clients handle by its words, such as a prompt that is too long, is told in
the words of the API.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from expertctl.errors import ContextLengthError, ExpertError
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
    error = told.error
    if isinstance(error, ContextLengthError):
        return _openai_context_error(error)
    param = error.field if isinstance(error, FieldError) else None
    usual = "invalid_request_error" if told.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(told.status, usual)
    message = printable(error.message)
    return OpenAIError(OpenAIFacts(message, kind, param or None, _openai_code(told)))


def _openai_context_error(error: ContextLengthError) -> OpenAIError:
    """Return the error by which OpenAI's clients know that they have to shorten a conversation."""
    message = f"This model's maximum context length is exceeded: {error.message}"
    if error.unit == "tokens":
        message = (
            f"This model's maximum context length is {error.most} tokens. However, your messages "
            f"resulted in {error.size} tokens. Please reduce the length of the messages."
        )
    facts = OpenAIFacts(printable(message), "invalid_request_error", "messages", error.code)
    return OpenAIError(facts)


def anthropic_body(told: Told) -> AnthropicError:
    """Return the error object of the Anthropic API."""
    usual = "invalid_request_error" if told.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(told.status, usual)
    return AnthropicError(AnthropicFacts(kind, _anthropic_message(told.error)), told.request_id)


def _anthropic_message(error: ExpertError) -> str:
    if isinstance(error, ContextLengthError):
        return f"prompt is too long: {error.size} {error.unit} > {error.most} maximum"
    return printable(error.message)


MODELS = "/v1/models"
MESSAGES = "/v1/messages"
_NATIVE = ("/v1/infer", "/v1/jobs", "/v1/route", "/v1/experts")
_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions")
_OPENAI_ENDINGS = ("/chat/completions", "/completions", "/models", "/embeddings", "/responses")
"""How the addresses of OpenAI's API end: a base URL without ``/v1`` leads to one of these."""


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
    unnamed = _shape_of(scope) is openai_body
    return b"data: %s\n\n" % data if unnamed else b"event: error\ndata: %s\n\n" % data


def _note(error: ExpertError, scope: Scope) -> None:
    """Keep the code with the request, for logs and traces."""
    scope.setdefault("state", {})["error_code"] = error.code


def _body(error: ExpertError, scope: Scope, status: int) -> ErrorBody:
    return _shape_of(scope)(Told(error, status, request_id_of(scope)))


def error_kinds(path: str) -> tuple[type[ErrorBody], ...]:
    """Return the types that an error's body can have at a path that is served."""
    if _is_below(path, MESSAGES):
        return (AnthropicError,)
    if _is_below(path, MODELS):
        return (OpenAIError, AnthropicError)
    return (OpenAIError,) if _is_for_openai(path) else (OwnError,)


def is_of_anthropic(scope: Scope) -> bool:
    """Whether a client of the Anthropic API asks at an address that OpenAI's API has, too."""
    return any(name == b"anthropic-version" for name, _ in scope.get("headers", ()))


def answers_anthropic(scope: Scope) -> bool:
    """Whether a request is answered as the Anthropic API does."""
    return _shape_of(scope) is anthropic_body


def _shape_of(scope: Scope) -> Shape:
    path = str(scope.get("path", ""))
    if _is_below(path, MESSAGES):
        return anthropic_body
    if not _is_for_openai(path):
        return own_body
    known = path.startswith(_OPENAI_PATHS)
    return anthropic_body if not known and is_of_anthropic(scope) else openai_body


def _is_for_openai(path: str) -> bool:
    """Whether a path is in OpenAI's API, or in none: then its client most likely speaks that."""
    if any(_is_below(path, start) for start in _NATIVE):
        return False
    return _is_below(path, "/v1") or path.endswith(_OPENAI_ENDINGS)


def _is_below(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")


def _openai_code(told: Told) -> str | None:
    own = told.error.code
    return own if own in {"model_not_found", "unknown_url"} else _OPENAI_CODES.get(told.status)
