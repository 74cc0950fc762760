"""When a request is sent again: what the server could not take, after growing, random pauses."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from expertctl.errors import ExpertError, RateLimitError, UnreachableError


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after how long; ``chance`` can be given by tests."""

    attempts: int = 3
    """How often a request is sent at most; 1 never repeats it."""
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_asked: float = 60.0
    """A server that asks for a longer pause is not waited for."""
    chance: Callable[[], float] = random.random

    def pause_after(self, attempt: int, error: ExpertError, *, repeatable: bool) -> float | None:
        """Return how long to wait after an attempt, the first being 1; None: do not try again.

        What the server refused for now, or never got, may be sent again; what it may have begun
        only if that does no harm.
        """
        if attempt >= self.attempts:
            return None
        asked = _asked(error, repeatable=repeatable)
        if asked is None or asked > self.longest_asked:
            return None
        pause = min(self.longest_pause, self.first_pause * 2.0 ** (attempt - 1))
        return max(asked, pause * (0.5 + self.chance() / 2))


def _asked(error: ExpertError, *, repeatable: bool) -> float | None:
    """Return for how long the server wants no request, None where another one would not help."""
    match error:
        case RateLimitError():
            return float(error.retry_after)
        case UnreachableError() if repeatable or not error.sent:
            return error.retry_after or 0.0
        case _:
            return None
