"""What a refusal of the server means: its code, else its status, becomes an error of ours."""

import math
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from expertctl.errors import (
    BudgetError,
    ExpertError,
    ForbiddenError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    RateLimitError,
    RegistryError,
    TimedOutError,
    TooLargeError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
)

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""As in `expertctl.plain_text`, which the client does not import."""
MAX_TEXT = 1000
_BY_STATUS: Mapping[int, type[ExpertError]] = {
    400: UsageError,
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    405: UsageError,
    408: TimedOutError,
    413: TooLargeError,
    415: UsageError,
    422: IncompatibleError,
    504: TimedOutError,
    507: BudgetError,
}


class _Error(Struct, frozen=True):
    message: str = ""
    code: str | None = None
    hint: str = ""


class _ErrorAnswer(Struct, frozen=True):
    error: _Error


_READER = msgspec.json.Decoder(_ErrorAnswer)  # made as this is imported, by one thread


def refusal(status: int, headers: Mapping[str, str], body: bytes, *, what: str) -> ExpertError:
    """Return the error for an answer that is none of those that were hoped for."""
    error = _read(body)
    message = shown(error.message) or f"{what}: the server answers with status {status}"
    hint = shown(error.hint)
    pause = retry_after(headers)
    if status == 429:
        return RateLimitError(message, retry_after=max(1, math.ceil(pause or 0)), hint=hint)
    if status in {502, 503}:
        return UnreachableError(message, sent=status != 503, retry_after=pause, hint=hint)
    if 300 <= status < 400:
        return _redirected(headers, what)
    return error_of_code(error.code or "", message, hint=hint, status=status)


def error_of_code(code: str, message: str, *, hint: str = "", status: int = 500) -> ExpertError:
    """Return the error that a server tells by its code; one that is not known by its status."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, RegistryError)
    if kind is InvalidPackageError:
        return InvalidPackageError("the server", [message], hint=hint)
    return kind(message, hint=hint)


def failure_of(event: bytes) -> ExpertError:
    """Return the error that ends a stream."""
    error = _read(event)
    return error_of_code(error.code or "", shown(error.message) or "the answer broke off")


def shown(text: str) -> str:
    """Return a text of a server as it may be printed: bounded, one line, nothing to obey."""
    clean = " ".join(_UNSAFE.sub(" ", text[:MAX_TEXT]).split())
    return clean if len(text) <= MAX_TEXT else f"{clean}…"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``; a date, which needs a right clock, counts as none."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _redirected(headers: Mapping[str, str], what: str) -> ExpertError:
    place = shown(headers.get("location", "")) or "another address"
    return UnreachableError(
        f"{what}: the server sends requests on to {place}",
        hint="if that is right, give it as base_url: a key is not sent to where a server points",
    )


def _read(body: bytes) -> _Error:
    try:
        return _READER.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Error()


def _kinds(kind: type[ExpertError]) -> Iterator[type[ExpertError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == ExpertError.__module__:
            yield from _kinds(child)


_BY_CODE: Mapping[str, type[ExpertError]] = {kind.code: kind for kind in _kinds(ExpertError)}
