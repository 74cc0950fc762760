"""Error responses in the shape of each API, the ids of requests, and the rate limits of callers.

An error gets the HTTP status of the most specific class in one table. A permanent error gets a
status below 500, never 409: clients retry 409 and 5xx by themselves.

The path of a request selects the API whose error shape is used. Where a path belongs to several
APIs or to none, a request with ``anthropic-version`` gets Anthropic's, anything else below ``/v1``
OpenAI's. Errors that clients recognise by their wording, such as a prompt that is too long, use
the wording of the API.

A caller is an API key, or the local machine where there are no keys. `Quotas` counts requests and
tokens per minute. The tokens of an answer are known only at its end, so a caller may start a
request while it has tokens left, and waits longer after an answer that exceeded them. Response
headers report the limits: OpenAI's clients get the time until a limit is fully reset as a duration,
Anthropic's as a timestamp. A caller without limits gets no such headers.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from expertctl.errors import (
    BudgetError,
    ContextLengthError,
    DigestError,
    ExpertError,
    ForbiddenError,
    IncompatibleError,
    InvalidPackageError,
    NoAnswerError,
    RateLimitError,
    RegistryError,
    TimedOutError,
    TrustError,
    sanitise_error_text,
)
from expertctl.http.limits import RateLimiter
from expertctl.http.operation import FieldError, find_retry_after, find_status
from expertctl.schema.strict_json import JsonObject

LOCAL_CALLER_ID = "local"
DEFAULT_CACHE_KEY = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of jobs and cached prefixes, with its rate limits."""

    id: str = LOCAL_CALLER_ID
    """The id of the API key."""
    name: str = ""
    """The name of the API key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    manages: bool = False
    """Whether the caller may also change settings that affect other callers."""


def get_caller(request: HTTPConnection) -> Caller:
    """Return the caller of a request."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def require_manager(request: HTTPConnection) -> None:
    """Refuse a request whose caller does not manage the server.

    Raises:
        ForbiddenError: for a key without the right.
    """
    caller = get_caller(request)
    if not caller.manages:
        raise ForbiddenError(
            f"the key {caller.name} may not change settings that affect others",
            hint="create a key that may with `expertctl serve key new NAME --manage`",
        )


def make_cache_key(caller: Caller, *given: str | None) -> str:
    """Return the prefix-cache key of a request, in the caller's own namespace.

    ``given`` are fields of the request in order of preference, such as cache_key, session_id, user;
    the first non-empty one is used.
    """
    return f"{caller.id}/{next((key for key in given if key), DEFAULT_CACHE_KEY)}"


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of a caller, what remains of it, and the seconds until it is fully reset."""

    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of a caller; None where there is none."""

    requests: LimitStatus | None = None
    tokens: LimitStatus | None = None


class Quotas:
    """The rate-limit usage of callers in this process; any thread may use it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """Start with nothing used."""
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[int, RateLimiter] = {}
        self._tokens: dict[int, RateLimiter] = {}
        self._limits: dict[str, int] = {}
        """Caller with a token limit → tokens per minute."""

    def count_request(self, caller: Caller) -> None:
        """Count a request.

        Raises:
            RateLimitError: when the limit is reached.
        """
        with self._lock:
            if caller.tokens_per_minute is not None:
                self._limits[caller.id] = caller.tokens_per_minute
            else:
                self._limits.pop(caller.id, None)
            if caller.requests_per_minute is None:
                return
            rates = self._get_rates(self._requests, caller.requests_per_minute)
            if seconds := rates.take(caller.id):
                raise RateLimitError("too many requests with this API key", retry_after=seconds)

    def get_limits(self, caller: Caller) -> RateLimits:
        """Return the current limits of a caller."""
        with self._lock:
            return RateLimits(
                requests=self._get_status(self._requests, caller.requests_per_minute, caller.id),
                tokens=self._get_status(self._tokens, caller.tokens_per_minute, caller.id),
            )

    def require_tokens(self, caller_id: str) -> None:
        """Check that a caller has tokens left.

        Raises:
            RateLimitError: when it has none.
        """
        with self._lock:
            limit = self._limits.get(caller_id)
            if limit is None:
                return
            if seconds := self._get_rates(self._tokens, limit).get_wait(caller_id):
                raise RateLimitError("too many tokens with this API key", retry_after=seconds)

    def spend_tokens(self, caller_id: str, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        with self._lock:
            limit = self._limits.get(caller_id)
            if limit is not None:
                self._get_rates(self._tokens, limit).spend(caller_id, tokens)

    def _get_status(
        self, known: dict[int, RateLimiter], limit: int | None, caller_id: str
    ) -> LimitStatus | None:
        if limit is None:
            return None
        return LimitStatus(limit, *self._get_rates(known, limit).get_status(caller_id))

    def _get_rates(self, known: dict[int, RateLimiter], per_minute: int) -> RateLimiter:
        return known.setdefault(per_minute, RateLimiter(per_minute, self._clock))


Header = tuple[str, str]
_FACTS = ("limit", "remaining", "reset")
_KINDS = ("requests", "tokens")
RATE_HEADER_NAMES = (
    *(f"x-ratelimit-{fact}-{kind}" for fact in _FACTS for kind in _KINDS),
    *(f"anthropic-ratelimit-{kind}-{fact}" for kind in _KINDS for fact in _FACTS),
)
"""All rate-limit headers; browsers show them to web pages only if they are listed."""


def openai_rate_headers(limits: RateLimits) -> Iterator[Header]:
    """Yield ``x-ratelimit-limit-requests`` and the others."""
    for what, standing in _iter_limits(limits):
        yield f"x-ratelimit-limit-{what}", str(standing.limit)
        yield f"x-ratelimit-remaining-{what}", str(standing.remaining)
        yield f"x-ratelimit-reset-{what}", format_duration(standing.reset_seconds)


def anthropic_rate_headers(limits: RateLimits, *, now: datetime) -> Iterator[Header]:
    """Yield ``anthropic-ratelimit-requests-limit`` and the others; ``now`` is in UTC."""
    for what, standing in _iter_limits(limits):
        reset = now + timedelta(seconds=standing.reset_seconds)
        moment = reset.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        yield f"anthropic-ratelimit-{what}-limit", str(standing.limit)
        yield f"anthropic-ratelimit-{what}-remaining", str(standing.remaining)
        yield f"anthropic-ratelimit-{what}-reset", moment


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI's API does: ``250ms``, ``1s``, ``6m0s``."""
    milliseconds = round(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds / 1e3, 60)
    shown = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"


def _iter_limits(limits: RateLimits) -> Iterator[tuple[str, LimitStatus]]:
    for what, standing in (("requests", limits.requests), ("tokens", limits.tokens)):
        if standing is not None:
            yield what, standing


REQUEST_ID_PREFIX = "req_"


def new_request_id() -> str:
    """Return an unguessable request id; it appears in headers, log and Anthropic errors."""
    return REQUEST_ID_PREFIX + secrets.token_hex(12)


def get_request_id(scope: Scope) -> str:
    """Return the id of a request; empty without the request-log middleware."""
    return str(scope.get("state", {}).get("request_id", ""))


_OWN_STATUSES: dict[type[ExpertError], int] = {
    TrustError: 403,
    TimedOutError: 408,
    IncompatibleError: 422,
    BudgetError: 422,
    InvalidPackageError: 422,
    DigestError: 500,
    RegistryError: 503,
    NoAnswerError: 503,
}


GENERATION_ERRORS = (404, 422)
"""Statuses of requests for a generation, beyond those of any request."""


def get_status(error: ExpertError) -> int:
    """Return the HTTP status of an error."""
    return find_status(error, _OWN_STATUSES)


def get_retry_after(error: ExpertError) -> int | None:
    """Return the seconds after which a retry may succeed; None if retrying is pointless."""
    return find_retry_after(error, get_status(error))


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
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
class ErrorContext:
    """An error, its HTTP status, and the id of the failed request."""

    error: ExpertError
    status: int
    request_id: str


class OwnFacts(msgspec.Struct, frozen=True):
    """What went wrong: a stable code, a message, and a hint, which may be empty."""

    code: str
    message: str
    hint: str


class OwnError(msgspec.Struct, frozen=True):
    """An error of the native API, in the form of ``--json`` on the command line."""

    error: OwnFacts


class OpenAIFacts(msgspec.Struct, frozen=True):
    """The error object of the OpenAI API; ``param`` is the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, frozen=True):
    """An error of the OpenAI API."""

    error: OpenAIFacts


class AnthropicFacts(msgspec.Struct, frozen=True):
    """The error object of the Anthropic API."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error of the Anthropic API."""

    error: AnthropicFacts
    request_id: str


ErrorBody = OwnError | OpenAIError | AnthropicError
BuildErrorBody = Callable[[ErrorContext], ErrorBody]


def native_error_body(context: ErrorContext) -> OwnError:
    """Return the error body of the native API."""
    error = context.error
    return OwnError(
        OwnFacts(error.code, sanitise_error_text(error.message), sanitise_error_text(error.hint))
    )


def openai_error_body(context: ErrorContext) -> OpenAIError:
    """Return the error body of the OpenAI API."""
    error = context.error
    if isinstance(error, ContextLengthError):
        return _openai_context_error(error)
    param = error.field if isinstance(error, FieldError) else None
    default_type = "invalid_request_error" if context.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(context.status, default_type)
    message = sanitise_error_text(error.message)
    return OpenAIError(OpenAIFacts(message, kind, param or None, _openai_code(context)))


def _openai_context_error(error: ContextLengthError) -> OpenAIError:
    """Return the error that tells OpenAI clients to shorten the conversation."""
    message = f"This model's maximum context length is exceeded: {error.message}"
    if error.unit == "tokens":
        message = (
            f"This model's maximum context length is {error.limit} tokens. However, your messages "
            f"resulted in {error.size} tokens. Please reduce the length of the messages."
        )
    facts = OpenAIFacts(
        sanitise_error_text(message), "invalid_request_error", "messages", error.code
    )
    return OpenAIError(facts)


def anthropic_error_body(context: ErrorContext) -> AnthropicError:
    """Return the error body of the Anthropic API."""
    default_type = "invalid_request_error" if context.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(context.status, default_type)
    return AnthropicError(
        AnthropicFacts(kind, _anthropic_message(context.error)), context.request_id
    )


def _anthropic_message(error: ExpertError) -> str:
    if isinstance(error, ContextLengthError):
        return f"prompt is too long: {error.size} {error.unit} > {error.limit} maximum"
    return sanitise_error_text(error.message)


MODELS = "/v1/models"
MESSAGES = "/v1/messages"
_NATIVE = ("/v1/infer", "/v1/jobs", "/v1/route", "/v1/experts", "/v1/proof")
_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions")
_OPENAI_ENDINGS = ("/chat/completions", "/completions", "/models", "/embeddings", "/responses")
"""Path endings of the OpenAI API: a client's base URL without ``/v1`` leads to one of these."""


def error_body(error: ExpertError, scope: Scope) -> JsonObject:
    """Return the body for an error, in the shape of the path's API."""
    document: JsonObject = msgspec.to_builtins(_build_body(error, scope, get_status(error)))
    return document


def error_response(error: ExpertError, scope: Scope, *, status: int | None = None) -> Response:
    """Return the response to a failed request; ``status`` overrides that of the table."""
    _record_error_code(error, scope)
    code = status or get_status(error)
    headers = {"Cache-Control": "no-store"}
    if (seconds := get_retry_after(error)) is not None:
        headers["Retry-After"] = str(seconds)
    if code == 408:  # else official clients retry a request whose deadline has passed
        headers["x-should-retry"] = "false"
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(_build_body(error, scope, code))
    return Response(content, code, headers, media_type="application/json")


def format_error_event(error: ExpertError, scope: Scope) -> bytes:
    """Return the event that ends a stream after an error.

    OpenAI's streams have unnamed events; elsewhere the event is named ``error``.
    """
    _record_error_code(error, scope)
    data = msgspec.json.encode(_build_body(error, scope, get_status(error)))
    unnamed = _select_format(scope) is openai_error_body
    return b"data: %s\n\n" % data if unnamed else b"event: error\ndata: %s\n\n" % data


def _record_error_code(error: ExpertError, scope: Scope) -> None:
    """Store the error code in the request state, for logs and traces."""
    scope.setdefault("state", {})["error_code"] = error.code


def _build_body(error: ExpertError, scope: Scope, status: int) -> ErrorBody:
    return _select_format(scope)(ErrorContext(error, status, get_request_id(scope)))


def list_error_types(path: str) -> tuple[type[ErrorBody], ...]:
    """Return the types of error bodies at a served path."""
    if _is_below(path, MESSAGES):
        return (AnthropicError,)
    if _is_below(path, MODELS):
        return (OpenAIError, AnthropicError)
    return (OpenAIError,) if _is_for_openai(path) else (OwnError,)


def is_anthropic_request(scope: Scope) -> bool:
    """Tell whether the request comes from an Anthropic client (``anthropic-version``)."""
    return any(name == b"anthropic-version" for name, _ in scope.get("headers", ()))


def uses_anthropic_format(scope: Scope) -> bool:
    """Tell whether a request is answered in the shape of the Anthropic API."""
    return _select_format(scope) is anthropic_error_body


def _select_format(scope: Scope) -> BuildErrorBody:
    path = str(scope.get("path", ""))
    if _is_below(path, MESSAGES):
        return anthropic_error_body
    if not _is_for_openai(path):
        return native_error_body
    known = path.startswith(_OPENAI_PATHS)
    return anthropic_error_body if not known and is_anthropic_request(scope) else openai_error_body


def _is_for_openai(path: str) -> bool:
    """Tell whether a path belongs to OpenAI's API, or to none and most likely means it."""
    if any(_is_below(path, start) for start in _NATIVE):
        return False
    return _is_below(path, "/v1") or path.endswith(_OPENAI_ENDINGS)


def _is_below(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")


def _openai_code(context: ErrorContext) -> str | None:
    own = context.error.code
    return own if own in {"model_not_found", "unknown_url"} else _OPENAI_CODES.get(context.status)
