"""HTTP statuses of the generation server, in one table; the most specific class decides.

A permanent error gets a status below 500, never 409: clients retry 409 and 5xx by themselves.
"""

from expertctl.errors import (
    BudgetError,
    DigestError,
    DiskFullError,
    ExpertError,
    ForbiddenError,
    IncompatibleError,
    InvalidPackageError,
    MediaTypeError,
    MisdirectedError,
    NoAnswerError,
    NotFoundError,
    RateLimitError,
    RegistryError,
    SlowBodyError,
    StoreError,
    TimedOutError,
    TooLargeError,
    TrustError,
    UnauthenticatedError,
    UsageError,
)

RETRY_SECONDS = 5
"""The ``Retry-After`` of a 503, which cannot tell when to retry."""

_BY_CLASS: dict[type[ExpertError], int] = {
    UsageError: 400,
    MediaTypeError: 415,
    MisdirectedError: 421,
    SlowBodyError: 408,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    TrustError: 403,
    NotFoundError: 404,
    TimedOutError: 408,
    TooLargeError: 413,
    IncompatibleError: 422,
    BudgetError: 422,
    RateLimitError: 429,
    DigestError: 500,
    InvalidPackageError: 422,
    RegistryError: 503,
    StoreError: 503,
    NoAnswerError: 503,
    DiskFullError: 507,
}


def status_of(error: ExpertError) -> int:
    """Return the HTTP status of an error."""
    statuses = (_BY_CLASS.get(cls) for cls in type(error).__mro__)
    return next((status for status in statuses if status is not None), 500)


def retry_after(error: ExpertError) -> int | None:
    """Return the seconds after which the same request may succeed; None if waiting is no help."""
    if isinstance(error, RateLimitError):
        return error.retry_after
    return RETRY_SECONDS if status_of(error) == 503 else None
