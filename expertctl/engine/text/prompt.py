"""Prompts: conversation messages, raw prompts, and prompt logprobs.

A raw prompt is not a message: it is continued unchanged.

`PromptLogprobs` records the log-probability of each prompt token during prefill. The decoder passes
the logits of all positions, a few rows at a time. Each row is reduced at once to the
log-probability of the following token and the most likely tokens, so memory grows with the length
of the prompt and never with its product with the vocabulary. Values are the log-softmax of the
model's float32 logits, without temperature and penalties.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.errors import IncompatibleError
from expertctl.schema.strict_json import JsonValue

Role = Literal["system", "user", "assistant", "tool"]
ChatEnd = Literal["new_turn", "as_is", "continue"]
"""The end of a prompt: a new assistant turn, the closed last message, or inside that message.

With ``continue`` the answer continues the last message.
"""


@dataclass(frozen=True, slots=True)
class ConversationMessage:
    """One message of a conversation."""

    role: Role
    content: str
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    """Additional fields for the chat template, such as ``tool_calls``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A prompt that is continued without a chat template: a text or, with ``ids``, tokens."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    suffix: str | None = None
    """The text after the continuation (fill-in-the-middle); requires a text."""
    parse_special: bool = True
    """Whether spelled control tokens become control tokens; otherwise they are letters."""
    add_special_tokens: bool = True
    """Whether the tokenizer's token at the beginning of a text is added."""
    is_continued: bool = True
    """Whether anything is generated; otherwise the prompt is only processed."""


LOGIT_ROWS = 8
"""Maximum rows of logits that a decoder holds for this at a time, in separate memory."""
_FLOAT_BYTES, _NUMBER_BYTES = 4, 8

RecordLogits = Callable[[int, AnyArray], None]
"""Takes the first position, counting soft prompts, and logits, float32 [rows, vocab]."""


class PromptLogprobs:
    """The log-probabilities of one prompt; one thread fills it in, then any may read it."""

    def __init__(self, ids: Sequence[int], *, top: int, virtual: int = 0) -> None:
        """Start empty, for ``ids`` after ``virtual`` rows of soft prompts.

        ``top`` is the number of most likely tokens recorded at each position.
        """
        self.ids, self.top = tuple(ids), top
        self._virtual = virtual
        self._logprobs = np.full(len(self.ids), np.nan)
        self._likeliest = np.zeros((len(self.ids), top), np.int64)
        self._likeliest_logprobs = np.zeros((len(self.ids), top))

    @property
    def is_complete(self) -> bool:
        """Whether every token except the first has its log-probability."""
        return not np.isnan(self._logprobs[1:]).any()

    def record(self, first: int, logits: AnyArray) -> None:
        """Record logits [rows, vocab] of consecutive positions; a position may be recorded again.

        Raises:
            IncompatibleError: if they are not finite numbers.
        """
        for place, row in enumerate(logits, first - self._virtual + 1):
            if 1 <= place < len(self.ids):
                self._record_row(place, row)

    def logprob(self, place: int) -> float | None:
        """Return the log-probability of a token given all before it; None for the first token."""
        return None if place == 0 else float(self._logprobs[place])

    def top_logprobs(self, place: int) -> list[tuple[int, float]]:
        """Return the most likely tokens at a position with their log-probabilities, best first."""
        ids, logprobs = self._likeliest[place], self._likeliest_logprobs[place]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True)) if place else []

    def _record_row(self, place: int, row: AnyArray) -> None:
        best = row.max()
        with np.errstate(under="ignore", invalid="ignore"):
            total = np.exp(row - best).sum(dtype=np.float64)
        if not np.isfinite(total):
            raise IncompatibleError("the base computed logits of the prompt that are not finite")
        least = float(best) + float(np.log(total))
        self._logprobs[place] = float(row[self.ids[place]]) - least
        found = _largest_indices(row, self.top)
        self._likeliest[place] = found
        self._likeliest_logprobs[place] = row[found].astype(np.float64) - least


def prompt_logprob_bytes(tokens: int, *, top: int, vocabulary: int) -> int:
    """Return the bytes for scoring a prompt: its results and the rows being reduced."""
    results = tokens * _NUMBER_BYTES * (2 + 2 * top)
    return results + (2 * LOGIT_ROWS + 4) * vocabulary * _FLOAT_BYTES


def _largest_indices(row: AnyArray, count: int) -> AnyArray:
    """Return the indices of the largest values, best first; among equals the lowest first."""
    found = np.empty(count, np.int64)
    left = row.copy() if count > 1 else row
    for number in range(count):
        found[number] = left.argmax()
        if number < count - 1:
            left[found[number]] = -np.inf
    return found
