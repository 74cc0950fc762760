"""Errors of requests: the HTTP statuses that both servers share, and invalid fields.

The most specific class of an error decides its status. Each server adds the statuses of the classes
that mean something else there.
"""

from collections.abc import Mapping

from expertctl.errors import (
    DiskFullError,
    ExpertError,
    ForbiddenError,
    MediaTypeError,
    MisdirectedError,
    NotFoundError,
    RateLimitError,
    SlowBodyError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UsageError,
)

RETRY_SECONDS = 5
"""The ``Retry-After`` of a 503, for which no better estimate exists."""
SHARED_STATUSES: Mapping[type[ExpertError], int] = {
    UsageError: 400,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    NotFoundError: 404,
    SlowBodyError: 408,
    TooLargeError: 413,
    MediaTypeError: 415,
    MisdirectedError: 421,
    RateLimitError: 429,
    StoreError: 503,
    DiskFullError: 507,
}


class FieldError(UsageError):
    """A field of a request is invalid; ``field`` is its path, such as ``messages[0].role``."""

    def __init__(self, message: str, *, field: str, hint: str = "") -> None:
        """Store the message and the field's path, which is empty for the body itself."""
        super().__init__(message, hint=hint)
        self.field = field


def find_status(error: ExpertError, own: Mapping[type[ExpertError], int]) -> int:
    """Return the HTTP status of an error: by ``own``, else by `SHARED_STATUSES`, else 500."""
    statuses = {**SHARED_STATUSES, **own}
    found = (statuses.get(cls) for cls in type(error).__mro__)
    return next((status for status in found if status is not None), 500)


def find_retry_after(error: ExpertError, status: int) -> int | None:
    """Return the seconds after which a retry may succeed; None if retrying is pointless."""
    if isinstance(error, RateLimitError):
        return error.retry_after
    return RETRY_SECONDS if status == 503 else None
