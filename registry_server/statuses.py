"""HTTP statuses, in one table. The most specific class of an error decides."""

from expertctl.errors import (
    BudgetError,
    DiskFullError,
    ExpertError,
    ForbiddenError,
    IncompatibleError,
    InvalidPackageError,
    MediaTypeError,
    MisdirectedError,
    NotFoundError,
    RateLimitError,
    RegistryError,
    SlowBodyError,
    StoreError,
    TooLargeError,
    TrustError,
    UnauthenticatedError,
    UsageError,
)
from registry_server.oci.errors import OCI_STATUS, OciError

RETRY_SECONDS = 5
"""What ``Retry-After`` says when the server cannot tell."""

_BY_CLASS: dict[type[ExpertError], int] = {
    UsageError: 400,
    MediaTypeError: 415,
    MisdirectedError: 421,
    SlowBodyError: 408,
    InvalidPackageError: 400,
    TrustError: 400,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    BudgetError: 403,
    NotFoundError: 404,
    IncompatibleError: 409,
    TooLargeError: 413,
    RateLimitError: 429,
    RegistryError: 502,
    StoreError: 503,
    DiskFullError: 507,
}


def status_of(error: ExpertError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, OciError):
        return OCI_STATUS[error.oci_code]
    statuses = (_BY_CLASS.get(cls) for cls in type(error).__mro__)
    return next((status for status in statuses if status is not None), 500)


def retry_after(error: ExpertError) -> int | None:
    """Return the seconds after which the same request may succeed, None when that is no matter."""
    if isinstance(error, RateLimitError):
        return error.retry_after
    return RETRY_SECONDS if status_of(error) == 503 else None
