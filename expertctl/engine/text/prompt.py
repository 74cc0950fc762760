"""Prompts: conversation messages, user messages from templates, raw prompts, and prompt logprobs.

A user message is assembled, never rewritten. Without a template it is the prompt, a blank line and
the body. A template holds ``{prompt}`` and ``{body}`` at most once each; inserted text is not
expanded again. Routing sees only the prompt. A raw prompt is not a message: it is continued
unchanged.

`PromptLogprobs` records the log-probability of each prompt token during prefill. The decoder passes
the logits of all positions, a few rows at a time. Each row is reduced at once to the
log-probability of the following token and the most likely tokens, so memory grows with the length
of the prompt and never with its product with the vocabulary. Values are the log-softmax of the
model's float32 logits, without temperature and penalties.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.errors import ContextLengthError, IncompatibleError, UsageError
from expertctl.routing.request import MAX_PROMPT_CHARACTERS, check_prompt
from expertctl.schema.strict_json import JsonValue

PROMPT_NOT_IN_TEMPLATE = (
    "the template has no {prompt}: the prompt selects experts, but the model does not see it"
)
_PLACEHOLDERS = re.compile(r"\{(prompt|body)\}")

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
class UserMessage:
    """A prompt with an optional body and template."""

    prompt: str
    body: str | None = None
    template: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts that the model does not read."""
        lost = self.template is not None and "prompt" not in _PLACEHOLDERS.findall(self.template)
        return (PROMPT_NOT_IN_TEMPLATE,) if lost else ()

    def text(self) -> str:
        """Return the text for the model.

        Raises:
            UsageError: if it is empty or not valid text, or the template does not fit.
            ContextLengthError: if it is too long.
        """
        check_prompt(self.prompt)
        if self.template is not None:
            text = self._fill_template(self.template)
        else:
            text = self.prompt if self.body is None else f"{self.prompt}\n\n{self.body}"
        _check_text(text)
        return text

    def _fill_template(self, template: str) -> str:
        places = _PLACEHOLDERS.findall(template)
        for name in ("prompt", "body"):
            if places.count(name) > 1:
                raise UsageError(
                    f"the template has {{{name}}} {places.count(name)} times; it may occur once",
                    hint="use it only once",
                )
        if self.body is None and "body" in places:
            raise UsageError("the template has {body}, but there is none", hint="give --body FILE")
        if self.body is not None and "body" not in places:
            raise UsageError(
                "the body would be lost: the template has no {body}",
                hint="put {body} into the template, or leave out --body",
            )
        values = {"prompt": self.prompt, "body": self.body or ""}
        return _PLACEHOLDERS.sub(lambda match: values[match[1]], template)


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


def _check_text(text: str) -> None:
    if not text.strip():
        raise UsageError(
            "the message is empty: the template contains no text",
            hint="put {prompt} into the template",
        )
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ContextLengthError(
            f"prompt and body together have {len(text)} characters, at most "
            f"{MAX_PROMPT_CHARACTERS} are allowed",
            size=len(text),
            limit=MAX_PROMPT_CHARACTERS,
            unit="characters",
            hint="shorten the body, or ask in several parts",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid text at character {error.start}") from error


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
