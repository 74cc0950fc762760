"""When something is tried again: failures that may pass, with growing, random pauses."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from expertctl.errors import RateLimitError, UnreachableError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after how long; sleep and chance can be given by tests."""

    attempts: int = 5
    first_pause: float = 0.5
    longest_pause: float = 15.0
    longest_asked: float = 60.0
    """A server that asks for a longer pause is not waited for."""
    tell: Callable[[str], object] | None = None
    """Told of the first failure, so that the user knows what is waited for."""
    sleep: Callable[[float], object] | None = None
    chance: Callable[[], float] = random.random

    def run(
        self,
        operation: Callable[[], _Result],
        *,
        repeatable: bool = True,
        stop: Event | None = None,
    ) -> _Result:
        """Retry until it works; a request that may have arrived only if it is repeatable.

        Raises:
            UnreachableError: the last one, when every attempt failed.
            RateLimitError: likewise.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except (UnreachableError, RateLimitError) as error:
                if not repeatable and isinstance(error, UnreachableError) and error.sent:
                    raise
                self.pause(attempt, error, stop=stop)
        raise AssertionError("the last pause raises")

    def pause(
        self, attempt: int, error: UnreachableError | RateLimitError, *, stop: Event | None = None
    ) -> None:
        """Wait after a failed attempt, the first being 1; no longer than until ``stop`` is set.

        Raises:
            UnreachableError: when that was the last, or the pause asked for is too long.
            RateLimitError: likewise.
        """
        asked = error.retry_after or 0.0
        if attempt >= self.attempts or asked > self.longest_asked:
            error.message = self._final(error.message, attempt, asked)
            error.args = (error.message,)
            raise error
        pause = min(self.longest_pause, self.first_pause * 2.0 ** (attempt - 1))
        if attempt == 1 and self.tell is not None:
            self.tell(f"{error.message}; trying again")
        sleep = self.sleep or (stop.wait if stop is not None else time.sleep)
        sleep(max(asked, pause * (0.5 + self.chance() / 2)))

    def _final(self, message: str, attempt: int, asked: float) -> str:
        if asked > self.longest_asked:
            return f"{message}; it asks to wait {asked:.0f} seconds"
        return f"{message} (tried {attempt} times)" if attempt > 1 else message
