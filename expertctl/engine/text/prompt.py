"""Messages: those of a conversation, and the user's own of prompt, body and template.

A message is put together, never rewritten. Without a template it is the prompt, a blank line, the
body. A template holds ``{prompt}`` and ``{body}`` at most once each; what is put in is not looked
at again. Routing sees the prompt only. A raw prompt is no message: it is continued as it stands.

`PromptLogprobs`: the log-probability of each token of a prompt, recorded while it is read.

A decoder gives the logits of all positions, a few rows at a time. Each row is reduced at once to
the log-probability of the token that follows it and to the likeliest tokens, so memory grows with
the length of the prompt and never with its product with the vocabulary. Values are those of the
model alone: log-softmax of float32 logits, without temperature and penalties.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from expertctl.errors import ContextLengthError, IncompatibleError, UsageError
from expertctl.routing.sampling_presets import MAX_PROMPT_CHARACTERS, check_prompt
from expertctl.schema.strict_json import JsonValue

PROMPT_NOT_IN_TEMPLATE = (
    "the template has no {prompt}: the prompt chose the experts, the model does not read it"
)
_PLACEHOLDERS = re.compile(r"\{(prompt|body)\}")

Role = Literal["system", "user", "assistant", "tool"]
ChatEnd = Literal["new_turn", "as_is", "continue"]
"""How a prompt ends: where a new turn of the assistant begins, where the last message was closed,
or inside the last message, which the answer continues."""


@dataclass(frozen=True, slots=True)
class ConversationMessage:
    """One message of a conversation."""

    role: Role
    content: str
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    """What else a chat template sees of it, ``tool_calls`` say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage:
    """What the user wants the model to read."""

    prompt: str
    body: str | None = None
    template: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of it the model does not read."""
        lost = self.template is not None and "prompt" not in _PLACEHOLDERS.findall(self.template)
        return (PROMPT_NOT_IN_TEMPLATE,) if lost else ()

    def text(self) -> str:
        """Return the message as the model is to read it.

        Raises:
            UsageError: when it is empty, too long or not text, or the template does not fit.
        """
        check_prompt(self.prompt)
        text = self._join_parts() if self.template is None else self._fill_template(self.template)
        _check_text(text)
        return text

    def _join_parts(self) -> str:
        return self.prompt if self.body is None else f"{self.prompt}\n\n{self.body}"

    def _fill_template(self, template: str) -> str:
        places = _PLACEHOLDERS.findall(template)
        for name in ("prompt", "body"):
            if places.count(name) > 1:
                raise UsageError(
                    f"the template has {{{name}}} {places.count(name)} times, not once",
                    hint="leave it there once",
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
    """What is continued as it stands, by no chat template: a text or, with ``ids``, tokens."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    suffix: str | None = None
    """What stands behind the continuation, which is the middle then; only of a text."""
    parse_special: bool = True
    """Whether control tokens that a text spells are control tokens; else they are letters."""
    add_special_tokens: bool = True
    """Whether the token that the tokenizer puts before a text is added."""
    is_continued: bool = True
    """Whether anything is written; else the prompt is only read."""


def _check_text(text: str) -> None:
    if not text.strip():
        raise UsageError(
            "the message is empty: the template leaves nothing to read",
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
"""How many rows of logits a decoder holds at a time for this, at most, in memory of its own."""
_FLOAT_BYTES, _NUMBER_BYTES = 4, 8

AnyArray = np.ndarray[Any, Any]
RecordLogits = Callable[[int, AnyArray], None]
"""Takes the position of the first row, soft prompts counted, and logits, float32 [rows, vocab]."""


class PromptLogprobs:
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

    def record(self, first: int, logits: AnyArray) -> None:
        """Record logits [rows, vocab] of consecutive positions; a position may come again.

        Raises:
            IncompatibleError: when they are not numbers.
        """
        for place, row in enumerate(logits, first - self._virtual + 1):
            if 1 <= place < len(self.ids):
                self._record_row(place, row)

    def logprob(self, place: int) -> float | None:
        """Return the log-probability of a token after all before it; None for the first token."""
        return None if place == 0 else float(self._logprobs[place])

    def top_logprobs(self, place: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens at a place and their log-probabilities, in that order."""
        ids, logprobs = self._likeliest[place], self._likeliest_logprobs[place]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True)) if place else []

    def _record_row(self, place: int, row: AnyArray) -> None:
        best = row.max()
        with np.errstate(under="ignore", invalid="ignore"):
            total = np.exp(row - best).sum(dtype=np.float64)
        if not np.isfinite(total):
            raise IncompatibleError("the base gives scores of a prompt that are not numbers")
        least = float(best) + float(np.log(total))
        self._logprobs[place] = float(row[self.ids[place]]) - least
        found = _largest_indices(row, self.top)
        self._likeliest[place] = found
        self._likeliest_logprobs[place] = row[found].astype(np.float64) - least


def prompt_logprob_bytes(tokens: int, *, top: int, vocabulary: int) -> int:
    """Return the bytes that scoring a prompt takes: its results and the rows being reduced."""
    results = tokens * _NUMBER_BYTES * (2 + 2 * top)
    return results + (2 * LOGIT_ROWS + 4) * vocabulary * _FLOAT_BYTES


def _largest_indices(row: AnyArray, count: int) -> AnyArray:
    """Return the indices of the largest values, in that order; of equals the lowest first."""
    found = np.empty(count, np.int64)
    left = row.copy() if count > 1 else row
    for number in range(count):
        found[number] = left.argmax()
        if number < count - 1:
            left[found[number]] = -np.inf
    return found
