"""Failures of registries: what their error answers mean, and when a request is retried.

`make_response_error` turns statuses and error bodies into errors of ours; every text of a server is
bounded and cleared of control characters before a user sees it. `RetrySchedule` repeats transient
failures after growing, random pauses.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from expertctl.errors import (
    BudgetError,
    ConflictError,
    ExpertError,
    ForbiddenError,
    InvalidPackageError,
    NotFoundError,
    RateLimitError,
    RegistryError,
    RevokedError,
    SignatureError,
    TooLargeError,
    TrustError,
    UnauthenticatedError,
    UnreachableError,
    UnsignedError,
    UsageError,
    sanitise_text,
)
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """How often and after which pauses a request is retried; tests replace sleep and jitter."""

    attempts: int = 5
    first_pause: float = 0.5
    max_pause: float = 15.0
    max_retry_after: float = 60.0
    """A server that asks for a longer pause is not waited for."""
    tell: Callable[[str], object] | None = None
    """Called with a message after the first failure."""
    sleep: Callable[[float], object] | None = None
    jitter: Callable[[], float] = random.random

    def run(
        self,
        operation: Callable[[], _Result],
        *,
        repeatable: bool = True,
        stop: Event | None = None,
    ) -> _Result:
        """Call ``operation`` until it succeeds; one that may have arrived only if it is repeatable.

        Raises:
            UnreachableError: the last one, when every attempt failed.
            RateLimitError: likewise.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except (UnreachableError, RateLimitError) as error:
                if not repeatable and isinstance(error, UnreachableError) and error.sent:
                    raise
                self.pause(attempt, error, stop=stop)
        raise AssertionError("the last pause raises")

    def pause(
        self, attempt: int, error: UnreachableError | RateLimitError, *, stop: Event | None = None
    ) -> None:
        """Wait after a failed attempt, the first being 1; no longer than until ``stop`` is set.

        Raises:
            UnreachableError: when that was the last, or the pause asked for is too long.
            RateLimitError: likewise.
        """
        requested = error.retry_after or 0.0
        if attempt >= self.attempts or requested > self.max_retry_after:
            error.message = self._final_message(error.message, attempt, requested)
            error.args = (error.message,)
            raise error
        pause = min(self.max_pause, self.first_pause * 2.0 ** (attempt - 1))
        if attempt == 1 and self.tell is not None:
            self.tell(f"{error.message}; trying again")
        sleep = self.sleep or (stop.wait if stop is not None else time.sleep)
        sleep(max(requested, pause * (0.5 + self.jitter() / 2)))

    def _final_message(self, message: str, attempt: int, asked: float) -> str:
        if asked > self.max_retry_after:
            return f"{message}; it asks to wait {asked:.0f} seconds"
        return f"{message} (tried {attempt} times)" if attempt > 1 else message


MAX_ERROR_BYTES = 64 << 10
MAX_TEXT = 500
BUSY_STATUSES = frozenset({500, 502, 503, 504})
_BY_STATUS: dict[int, type[ExpertError]] = {
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: TooLargeError,
}
_BY_CODE: dict[str, type[ExpertError]] = {
    kind.code: kind
    for kind in (
        BudgetError,
        ConflictError,
        InvalidPackageError,
        NotFoundError,
        RevokedError,
        SignatureError,
        TooLargeError,
        TrustError,
        UnsignedError,
        UsageError,
    )
}
_OUR_CODES = frozenset(
    {*_BY_CODE, *(kind.code for kind in (ForbiddenError, RateLimitError, UnauthenticatedError))}
)


@dataclass(frozen=True, slots=True)
class RefusalReason:
    """The content of an error body; empty fields where it says nothing."""

    code: str = ""
    message: str = ""
    hint: str = ""


def make_response_error(
    status: int, headers: Mapping[str, str], body: bytes, *, host: str, what: str
) -> ExpertError:
    """Return the error for an answer with an unexpected status."""
    reason = parse_error_body(body)
    message = f"{host}: {_error_message(status, reason, what)}"
    if status == 429:
        pause = parse_retry_after(headers)
        return RateLimitError(message, retry_after=max(1, math.ceil(pause or 0)), hint=reason.hint)
    if status in BUSY_STATUSES:
        return UnreachableError(message, sent=status != 503, retry_after=parse_retry_after(headers))
    kind = _BY_CODE.get(reason.code) or _BY_STATUS.get(status, RegistryError)
    hint = _error_hint(status, reason, host)
    if kind is InvalidPackageError:
        return InvalidPackageError(f"{host}: {what}", [reason.message or "refused"], hint=hint)
    return kind(message, hint=hint)


def _error_message(status: int, reason: RefusalReason, what: str) -> str:
    """Return the fact: a message of a registry of ours as it is, else the request and status."""
    if reason.message and reason.code in _OUR_CODES:
        return reason.message
    detail = f": {reason.message}" if reason.message else ""
    return f"{what}: {_STATUS_MESSAGES.get(status, f'status {status}')}{detail}"


def _error_hint(status: int, reason: RefusalReason, host: str) -> str:
    """Return the way out; for a 401 our own hint, which names the host."""
    here = _STATUS_HINTS.get(status, "").format(host=host)
    return here if status == 401 else reason.hint or here


def parse_error_body(body: bytes) -> RefusalReason:
    """Parse the error body of `/api/v1`, or that of the OCI specification."""
    try:
        document = load_object(body, what="an error", max_bytes=MAX_ERROR_BYTES)
    except ExpertError:
        return RefusalReason()
    errors = document.get("errors")
    if isinstance(errors, list) and errors and isinstance(errors[0], dict):
        first = errors[0]
        detail = first.get("detail")
        fields = detail if isinstance(detail, dict) else {}
        code = fields.get("code") or first.get("code")
        return RefusalReason(
            _text_or_empty(code),
            _text_or_empty(first.get("message")),
            _text_or_empty(fields.get("hint")),
        )
    error = document.get("error")
    fields = error if isinstance(error, dict) else _flatten_details(document)
    return RefusalReason(*(_text_or_empty(fields.get(key)) for key in ("code", "message", "hint")))


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``; a date, which needs a right clock, counts as none."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _flatten_details(document: JsonObject) -> JsonObject:
    """Convert ``{"details": …}`` and similar bodies of token servers."""
    return {"message": document.get("message") or document.get("details")}


def _text_or_empty(value: JsonValue) -> str:
    return sanitise_text(value, MAX_TEXT) if isinstance(value, str) else ""


_STATUS_MESSAGES = {
    400: "the request is refused",
    401: "it requires a login",
    403: "not allowed",
    404: "not found",
    409: "it conflicts with existing content",
    413: "too large",
    429: "too many requests",
    500: "the server failed",
    502: "the proxy got no answer",
    503: "the server is not available",
    504: "the proxy got no answer in time",
}
_STATUS_HINTS = {
    401: "log in with `expertctl login {host}`",
    403: "ask an owner of the namespace; `expertctl login {host}` changes who asks",
    404: "if it should exist, tell the operator of {host}",
}
