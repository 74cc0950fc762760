"""What a registry's refusal means: statuses and error bodies become errors of ours.

Every text of a server is bounded and cleared of control characters before a person sees it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
)
from expertctl.plain_text import one_line
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

MAX_ERROR_BYTES = 64 << 10
MAX_TEXT = 500
BUSY = frozenset({500, 502, 503, 504})
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
class Reason:
    """What the body of a refusal says; empty where it says nothing."""

    code: str = ""
    message: str = ""
    hint: str = ""


def refusal(
    status: int, headers: Mapping[str, str], body: bytes, *, host: str, what: str
) -> ExpertError:
    """Return the error for an answer whose status was not expected."""
    reason = read_reason(body)
    message = f"{host}: {_fact(status, reason, what)}"
    if status == 429:
        pause = retry_after(headers)
        return RateLimitError(message, retry_after=max(1, math.ceil(pause or 0)), hint=reason.hint)
    if status in BUSY:
        return UnreachableError(message, sent=status != 503, retry_after=retry_after(headers))
    kind = _BY_CODE.get(reason.code) or _BY_STATUS.get(status, RegistryError)
    hint = _hint(status, reason, host)
    if kind is InvalidPackageError:
        return InvalidPackageError(f"{host}: {what}", [reason.message or "refused"], hint=hint)
    return kind(message, hint=hint)


def _fact(status: int, reason: Reason, what: str) -> str:
    """Return what happened: a full message of a registry of ours, else the request and status."""
    if reason.message and reason.code in _OUR_CODES:
        return reason.message
    said = f": {reason.message}" if reason.message else ""
    return f"{what}: {_FACTS.get(status, f'status {status}')}{said}"


def _hint(status: int, reason: Reason, host: str) -> str:
    """Return the way out; for a 401 our own hint, which names the host."""
    here = _HINTS.get(status, "").format(host=host)
    return here if status == 401 else reason.hint or here


def read_reason(body: bytes) -> Reason:
    """Read the error body of `/api/v1`, or that of the OCI specification."""
    try:
        document = load_object(body, what="an error", max_bytes=MAX_ERROR_BYTES)
    except ExpertError:
        return Reason()
    errors = document.get("errors")
    if isinstance(errors, list) and errors and isinstance(errors[0], dict):
        first = errors[0]
        detail = first.get("detail")
        fields = detail if isinstance(detail, dict) else {}
        code = fields.get("code") or first.get("code")
        return Reason(_text(code), _text(first.get("message")), _text(fields.get("hint")))
    error = document.get("error")
    fields = error if isinstance(error, dict) else _plain(document)
    return Reason(*(_text(fields.get(key)) for key in ("code", "message", "hint")))


def shown(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of a server as it may be printed: bounded, one line, printable."""
    clean = " ".join(one_line(text[: limit + 1], " ").split())
    return clean if len(text) <= limit else f"{clean[:limit]}…"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``; a date, which needs a right clock, counts as none."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _plain(document: JsonObject) -> JsonObject:
    """``{"details": …}`` and the like of token servers."""
    return {"message": document.get("message") or document.get("details")}


def _text(value: JsonValue) -> str:
    return shown(value) if isinstance(value, str) else ""


_FACTS = {
    400: "the request is refused",
    401: "it wants to know who asks",
    403: "not allowed",
    404: "not there",
    409: "it conflicts with what is there",
    413: "too large",
    429: "too many requests",
    500: "the server failed",
    502: "no answer behind the proxy",
    503: "the server is not available",
    504: "no answer behind the proxy in time",
}
_HINTS = {
    401: "log in with `expertctl login {host}`",
    403: "ask an owner of the namespace; `expertctl login {host}` changes who asks",
    404: "if it should be there, tell whoever runs {host}",
}
