"""The caller of a request, its rate limits, and the response headers that report them.

A caller is an API key, or the local machine where there are no keys. `Quotas` counts requests and
tokens per minute. The tokens of an answer are known only at its end, so a caller may start a
request while it has tokens left, and waits longer after an answer that exceeded them.

OpenAI's clients get the time until a limit is fully reset as a duration, Anthropic's as a
timestamp. A caller without limits gets no such headers.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from starlette.requests import HTTPConnection

from expertctl.errors import ForbiddenError, RateLimitError
from expertctl.http.limits import RateLimiter

LOCAL_CALLER_ID = "local"
DEFAULT_CACHE_KEY = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of jobs and cached prefixes, with its rate limits."""

    id: str = LOCAL_CALLER_ID
    """The id of the API key."""
    name: str = ""
    """The name of the API key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    manages: bool = False
    """Whether the caller may also change settings that affect other callers."""


def get_caller(request: HTTPConnection) -> Caller:
    """Return the caller of a request."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def require_manager(request: HTTPConnection) -> None:
    """Refuse a request whose caller does not manage the server.

    Raises:
        ForbiddenError: for a key without the right.
    """
    caller = get_caller(request)
    if not caller.manages:
        raise ForbiddenError(
            f"the key {caller.name} may not change settings that affect others",
            hint="create a key that may with `expertctl serve key new NAME --manage`",
        )


def make_cache_key(caller: Caller, *given: str | None) -> str:
    """Return the prefix-cache key of a request, in the caller's own namespace.

    ``given`` are fields of the request in order of preference, such as cache_key, session_id, user;
    the first non-empty one is used.
    """
    return f"{caller.id}/{next((key for key in given if key), DEFAULT_CACHE_KEY)}"


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of a caller, what remains of it, and the seconds until it is fully reset."""

    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of a caller; None where there is none."""

    requests: LimitStatus | None = None
    tokens: LimitStatus | None = None


class Quotas:
    """The rate-limit usage of callers in this process; any thread may use it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """Start with nothing used."""
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[int, RateLimiter] = {}
        self._tokens: dict[int, RateLimiter] = {}
        self._limits: dict[str, int] = {}
        """Caller with a token limit → tokens per minute."""

    def count_request(self, caller: Caller) -> None:
        """Count a request.

        Raises:
            RateLimitError: when the limit is reached.
        """
        with self._lock:
            if caller.tokens_per_minute is not None:
                self._limits[caller.id] = caller.tokens_per_minute
            else:
                self._limits.pop(caller.id, None)
            if caller.requests_per_minute is None:
                return
            rates = self._get_rates(self._requests, caller.requests_per_minute)
            if seconds := rates.take(caller.id):
                raise RateLimitError("too many requests with this API key", retry_after=seconds)

    def get_limits(self, caller: Caller) -> RateLimits:
        """Return the current limits of a caller."""
        with self._lock:
            return RateLimits(
                requests=self._get_status(self._requests, caller.requests_per_minute, caller.id),
                tokens=self._get_status(self._tokens, caller.tokens_per_minute, caller.id),
            )

    def require_tokens(self, caller_id: str) -> None:
        """Check that a caller has tokens left.

        Raises:
            RateLimitError: when it has none.
        """
        with self._lock:
            limit = self._limits.get(caller_id)
            if limit is None:
                return
            if seconds := self._get_rates(self._tokens, limit).get_wait(caller_id):
                raise RateLimitError("too many tokens with this API key", retry_after=seconds)

    def spend_tokens(self, caller_id: str, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        with self._lock:
            limit = self._limits.get(caller_id)
            if limit is not None:
                self._get_rates(self._tokens, limit).spend(caller_id, tokens)

    def _get_status(
        self, known: dict[int, RateLimiter], limit: int | None, caller_id: str
    ) -> LimitStatus | None:
        if limit is None:
            return None
        return LimitStatus(limit, *self._get_rates(known, limit).get_status(caller_id))

    def _get_rates(self, known: dict[int, RateLimiter], per_minute: int) -> RateLimiter:
        return known.setdefault(per_minute, RateLimiter(per_minute, self._clock))


Header = tuple[str, str]
_FACTS = ("limit", "remaining", "reset")
_KINDS = ("requests", "tokens")
RATE_HEADER_NAMES = (
    *(f"x-ratelimit-{fact}-{kind}" for fact in _FACTS for kind in _KINDS),
    *(f"anthropic-ratelimit-{kind}-{fact}" for kind in _KINDS for fact in _FACTS),
)
"""All rate-limit headers; browsers show them to web pages only if they are listed."""


def openai_rate_headers(limits: RateLimits) -> Iterator[Header]:
    """Yield ``x-ratelimit-limit-requests`` and the others."""
    for what, standing in _iter_limits(limits):
        yield f"x-ratelimit-limit-{what}", str(standing.limit)
        yield f"x-ratelimit-remaining-{what}", str(standing.remaining)
        yield f"x-ratelimit-reset-{what}", format_duration(standing.reset_seconds)


def anthropic_rate_headers(limits: RateLimits, *, now: datetime) -> Iterator[Header]:
    """Yield ``anthropic-ratelimit-requests-limit`` and the others; ``now`` is in UTC."""
    for what, standing in _iter_limits(limits):
        reset = now + timedelta(seconds=standing.reset_seconds)
        moment = reset.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        yield f"anthropic-ratelimit-{what}-limit", str(standing.limit)
        yield f"anthropic-ratelimit-{what}-remaining", str(standing.remaining)
        yield f"anthropic-ratelimit-{what}-reset", moment


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI's API does: ``250ms``, ``1s``, ``6m0s``."""
    milliseconds = round(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds / 1e3, 60)
    shown = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"


def _iter_limits(limits: RateLimits) -> Iterator[tuple[str, LimitStatus]]:
    for what, standing in (("requests", limits.requests), ("tokens", limits.tokens)):
        if standing is not None:
            yield what, standing
