"""`PromptScores`: the log-probability of each token of a prompt, recorded while it is read.

A decoder gives the logits of all positions, a few rows at a time. Each row is reduced at once to
the log-probability of the token that follows it and to the likeliest tokens, so memory grows with
the length of the prompt and never with its product with the vocabulary. Values are those of the
model alone: log-softmax of float32 logits, without temperature and penalties.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from expertctl.errors import IncompatibleError

SCORED_ROWS = 8
"""How many rows of logits a decoder holds at a time for this, at most, in memory of its own."""
_FLOAT_BYTES, _NUMBER_BYTES = 4, 8

Numbers = np.ndarray[Any, Any]
ScoreRows = Callable[[int, Numbers], None]
"""Takes the position of the first row, soft prompts counted, and logits, float32 [rows, vocab]."""


class PromptScores:
    """The log-probabilities of one prompt; one thread fills it in, then any may read it."""

    def __init__(self, ids: Sequence[int], *, top: int, virtual: int = 0) -> None:
        """Begin with none, for ``ids`` behind ``virtual`` rows of soft prompts.

        ``top`` is how many of the likeliest tokens are recorded at each position.
        """
        self.ids, self.top = tuple(ids), top
        self._virtual = virtual
        self._logprobs = np.full(len(self.ids), np.nan)
        self._likeliest = np.zeros((len(self.ids), top), np.int64)
        self._likeliest_logprobs = np.zeros((len(self.ids), top))

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its log-probability."""
        return not np.isnan(self._logprobs[1:]).any()

    def take(self, first: int, logits: Numbers) -> None:
        """Record logits [rows, vocab] of consecutive positions; a position may come again.

        Raises:
            IncompatibleError: when they are not numbers.
        """
        for place, row in enumerate(logits, first - self._virtual + 1):
            if 1 <= place < len(self.ids):
                self._record(place, row)

    def logprob(self, place: int) -> float | None:
        """Return the log-probability of a token after all before it; None for the first token."""
        return None if place == 0 else float(self._logprobs[place])

    def likeliest(self, place: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens at a place and their log-probabilities, in that order."""
        ids, logprobs = self._likeliest[place], self._likeliest_logprobs[place]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True)) if place else []

    def _record(self, place: int, row: Numbers) -> None:
        best = row.max()
        with np.errstate(under="ignore", invalid="ignore"):
            total = np.exp(row - best).sum(dtype=np.float64)
        if not np.isfinite(total):
            raise IncompatibleError("the base gives scores of a prompt that are not numbers")
        least = float(best) + float(np.log(total))
        self._logprobs[place] = float(row[self.ids[place]]) - least
        found = _largest(row, self.top)
        self._likeliest[place] = found
        self._likeliest_logprobs[place] = row[found].astype(np.float64) - least


def score_bytes(tokens: int, *, top: int, vocabulary: int) -> int:
    """Return the bytes that scoring a prompt takes: its results and the rows being reduced."""
    results = tokens * _NUMBER_BYTES * (2 + 2 * top)
    return results + (2 * SCORED_ROWS + 4) * vocabulary * _FLOAT_BYTES


def _largest(row: Numbers, count: int) -> Numbers:
    """Return the indices of the largest values, in that order; of equals the lowest first."""
    found = np.empty(count, np.int64)
    left = row.copy() if count > 1 else row
    for number in range(count):
        found[number] = left.argmax()
        if number < count - 1:
            left[found[number]] = -np.inf
    return found
