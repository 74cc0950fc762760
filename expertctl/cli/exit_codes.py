"""Exit codes, in one table. The most specific class of an error decides."""

from expertctl.errors import (
    BudgetError,
    ExpertError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    RegistryError,
    TrustError,
    UsageError,
)

OK = 0
FAILURE = 1
USAGE = 2
UNTRUSTED = 5
UNREACHABLE = 6
INTERRUPTED = 130

_BY_CLASS: dict[type[ExpertError], int] = {
    UsageError: USAGE,
    NotFoundError: 3,
    IncompatibleError: 4,
    TrustError: UNTRUSTED,
    RegistryError: UNREACHABLE,
    BudgetError: 7,
    InvalidPackageError: 8,
}


def exit_code(error: ExpertError) -> int:
    """Return the process exit code for an error."""
    classes = (_BY_CLASS.get(cls) for cls in type(error).__mro__)
    return next((code for code in classes if code is not None), FAILURE)
