"""Who asks: an API key, or whoever is on this machine where there are none."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from expertctl.errors import ForbiddenError

LOCAL = "local"
DEFAULT_CACHE_KEY = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as far as jobs, kept texts and limits are concerned."""

    id: str = LOCAL
    """That of the API key."""
    name: str = ""
    """That of the API key, too, as people say it."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    manages: bool = False
    """Whether they may change what others get, too."""


def caller_of(request: HTTPConnection) -> Caller:
    """Return who asks."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def demand_manager(caller: Caller) -> None:
    """Refuse whoever may ask for answers only.

    Raises:
        ForbiddenError: for a key that was not made for more.
    """
    if not caller.manages:
        raise ForbiddenError(
            f"the key {caller.name} may not change what others get",
            hint="`expertctl serve key new NAME --manage` makes one that may",
        )


def cache_key_of(caller: Caller, *given: str | None) -> str:
    """Return the key of kept texts: the first that is given, within those of this caller alone.

    ``given`` are, in order, cache_key, session_id, metadata.cache_key, metadata.session_id, user.
    """
    return f"{caller.id}/{next((key for key in given if key), DEFAULT_CACHE_KEY)}"
