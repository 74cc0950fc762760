"""The caller of a request: an API key, or the local machine where there are no keys."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from expertctl.errors import ForbiddenError

LOCAL = "local"
DEFAULT_CACHE_KEY = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of jobs and kept texts, with the limits that apply to it."""

    id: str = LOCAL
    """The id of the API key."""
    name: str = ""
    """The name of the API key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    manages: bool = False
    """Whether the caller may also change what others get."""


def caller_of(request: HTTPConnection) -> Caller:
    """Return the caller of a request."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def demand_manager(caller: Caller) -> None:
    """Refuse a caller that may only ask for answers.

    Raises:
        ForbiddenError: for a key that does not manage the server.
    """
    if not caller.manages:
        raise ForbiddenError(
            f"the key {caller.name} may not change what others get",
            hint="`expertctl serve key new NAME --manage` makes one that may",
        )


def cache_key_of(caller: Caller, *given: str | None) -> str:
    """Return the key of kept texts: the first one given, within the keys of this caller alone.

    ``given`` are fields of a request in order of preference, such as cache_key, session_id, user.
    """
    return f"{caller.id}/{next((key for key in given if key), DEFAULT_CACHE_KEY)}"
