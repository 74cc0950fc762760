"""How many requests and tokens each caller may have in a minute.

The tokens of an answer are known only at its end. So a caller may begin as long as it has tokens
left, and waits longer after an answer that took more than that.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from expertctl.errors import RateLimitError
from expertctl.http.rates import Rates
from expertctl.server.caller import Caller

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit of a caller, how much of it is left, and the seconds until it is whole again."""

    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits that apply to a caller; None where there is none."""

    requests: Standing | None = None
    tokens: Standing | None = None


class Quotas:
    """What callers have used of their limits, in this process; any thread may use it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """Begin with nothing used."""
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[int, Rates] = {}
        self._tokens: dict[int, Rates] = {}
        self._limits: dict[str, int] = {}
        """Caller with a token limit → tokens in a minute."""

    def enter(self, caller: Caller) -> None:
        """Count a request.

        Raises:
            RateLimitError: when there were too many.
        """
        with self._lock:
            if caller.tokens_per_minute is not None:
                self._limits[caller.id] = caller.tokens_per_minute
            else:
                self._limits.pop(caller.id, None)
            if caller.requests_per_minute is None:
                return
            rates = self._rates(self._requests, caller.requests_per_minute)
            if seconds := rates.take(caller.id):
                raise RateLimitError("too many requests with this API key", retry_after=seconds)

    def limits_of(self, caller: Caller) -> RateLimits:
        """Return the limits of a caller as they stand now."""
        with self._lock:
            return RateLimits(
                requests=self._standing(self._requests, caller.requests_per_minute, caller.id),
                tokens=self._standing(self._tokens, caller.tokens_per_minute, caller.id),
            )

    def demand_tokens(self, caller_id: str) -> None:
        """Check that a caller may have more tokens.

        Raises:
            RateLimitError: when it had too many.
        """
        with self._lock:
            limit = self._limits.get(caller_id)
            if limit is None:
                return
            if seconds := self._rates(self._tokens, limit).wait(caller_id):
                raise RateLimitError("too many tokens with this API key", retry_after=seconds)

    def spend(self, caller_id: str, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        with self._lock:
            limit = self._limits.get(caller_id)
            if limit is not None:
                self._rates(self._tokens, limit).spend(caller_id, tokens)

    def _standing(
        self, known: dict[int, Rates], limit: int | None, caller_id: str
    ) -> Standing | None:
        if limit is None:
            return None
        return Standing(limit, *self._rates(known, limit).standing(caller_id))

    def _rates(self, known: dict[int, Rates], per_minute: int) -> Rates:
        return known.setdefault(per_minute, Rates(per_minute, self._clock))
