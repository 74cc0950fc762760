"""Stop strings: text is held back while it could still become one, and ends before the first.

The first is the one that is complete first; of those that end at the same letter, the longest. So
the answer does not depend on how the text was cut into pieces, and nothing is generated to decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.errors import UsageError

MAX_STOPS = 64
MAX_STOP_TOKENS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a text may end, besides its stop strings and its length.

    Before ``min_tokens`` were generated no token and no stop string ends it. With ``ignore_end``
    the end tokens of the base do not end it at all; ``stop_tokens`` do in any case.
    """

    min_tokens: int = 0
    ignore_end: bool = False
    stop_tokens: frozenset[int] = frozenset()

    def end_ids(self, of_base: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a text."""
        return self.stop_tokens if self.ignore_end else of_base | self.stop_tokens


USUAL_RULES = StopRules()


class StopScanner:
    """Passes one generation's text on, up to a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of ``stops``.

        Raises:
            UsageError: for an empty or over-long stop string, or too many of them.
        """
        if len(stops) > MAX_STOPS:
            raise UsageError(f"{len(stops)} stop strings, at most {MAX_STOPS} are allowed")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise UsageError(
                    f"a stop string of {len(stop)} characters",
                    hint=f"it must have 1 to {MAX_STOP_LENGTH}",
                )
        self.found: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece, return what is certainly before any stop string."""
        if self.found is not None or not text:
            return ""
        text = self._held + text
        end = self._first_end(text)
        if end is None:
            keep = self._possible_start(text)
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep]
        self.found = max((s for s in self._stops if text.endswith(s, 0, end)), key=len)
        self._held = ""
        return text[: end - len(self.found)]

    def finish(self) -> str:
        """Return what was held back; it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_end(self, text: str) -> int | None:
        found = [(text.find(stop), len(stop)) for stop in self._stops]
        return min((at + length for at, length in found if at >= 0), default=None)

    def _possible_start(self, text: str) -> int:
        """How many letters at the end could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a whole text up to its first stop string; the oracle of the scanner."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text
