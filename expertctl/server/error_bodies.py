"""How an error is answered: each API in its own shape, chosen by the path that was asked for."""

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
_OPENAI_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class Told:
    """An error, the status that says it, and the request that it answers."""

    error: ExpertError
    status: int
    request_id: str


Shape = Callable[[Told], JsonObject]


def own_body(told: Told) -> JsonObject:
    """Return the body of the native API, which is that of ``--json`` on the command line."""
    error = told.error
    shown = {"code": error.code, "message": printable(error.message)}
    return {"error": {**shown, "hint": printable(error.hint)}}


def openai_body(told: Told) -> JsonObject:
    """Return the error object of the OpenAI API."""
    param = told.error.field if isinstance(told.error, FieldError) else None
    usual = "invalid_request_error" if told.status < 500 else "server_error"
    return {
        "error": {
            "message": printable(told.error.message),
            "type": _OPENAI_TYPES.get(told.status, usual),
            "param": param or None,
            "code": _openai_code(told),
        }
    }


def anthropic_body(told: Told) -> JsonObject:
    """Return the error object of the Anthropic API."""
    usual = "invalid_request_error" if told.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(told.status, usual)
    shown: JsonObject = {"type": kind, "message": printable(told.error.message)}
    return {"type": "error", "error": shown, "request_id": told.request_id}


_SHAPES: tuple[tuple[str, Shape], ...] = (
    ("/v1/messages", anthropic_body),
    ("/v1/chat/completions", openai_body),
    ("/v1/completions", openai_body),
    ("/v1/models", openai_body),
)


def error_body(error: ExpertError, scope: Scope, *, status: int | None = None) -> JsonObject:
    """Return what is said of an error to who asked for this path."""
    told = Told(error, status or status_of(error), request_id_of(scope))
    return _shape_of(str(scope.get("path", "")))(told)


def error_response(error: ExpertError, scope: Scope, *, status: int | None = None) -> Response:
    """Return the answer to a request that failed; ``status`` where the table has another."""
    code = status or status_of(error)
    headers = {"Cache-Control": "no-store"}
    if (seconds := retry_after(error)) is not None:
        headers["Retry-After"] = str(seconds)
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(error_body(error, scope, status=status))
    return Response(content, code, headers, media_type="application/json")


def error_event(error: ExpertError, scope: Scope) -> bytes:
    """Return the event that ends a stream that cannot go on.

    OpenAI's streams have no names for events; in the others it is called ``error``.
    """
    data = msgspec.json.encode(error_body(error, scope))
    unnamed = _shape_of(str(scope.get("path", ""))) is openai_body
    return b"data: %s\n\n" % data if unnamed else b"event: error\ndata: %s\n\n" % data


def _shape_of(path: str) -> Shape:
    found = (shape for start, shape in _SHAPES if path == start or path.startswith(f"{start}/"))
    return next(found, own_body)


def _openai_code(told: Told) -> str | None:
    return (
        told.error.code if told.error.code == "model_not_found" else _OPENAI_CODES.get(told.status)
    )
