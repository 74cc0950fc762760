"""Suggestions for an expert that was named by less than its whole name."""

from contextlib import suppress

from expertctl.errors import ExpertError, UsageError
from expertctl.settings import find_home
from expertctl.store.store import Store, near_names


def explained(error: ExpertError) -> ExpertError:
    """Return an error about a name with the installed experts that may be meant, if any."""
    if not isinstance(error, UsageError) or not error.misnamed:
        return error
    near = _near(error.misnamed.lower())
    if not near:
        return error
    return UsageError(error.message, hint=f"did you mean {' or '.join(near)}?")


def _near(name: str) -> list[str]:
    with suppress(ExpertError, OSError):  # the original error is the one to report
        experts = Store(find_home().store).experts()
        return near_names(name, [str(expert.package) for expert in experts])
    return []
