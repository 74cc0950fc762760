"""What a user asks: `UserMessage`, `SamplingOverrides`, and their limits.

A user message is assembled, never rewritten. Without a template it is the prompt, a blank line and
the body. A template holds ``{prompt}`` and ``{body}`` at most once each; inserted text is not
expanded again. Routing sees only the prompt.

This module imports only errors: a command that asks a server loads neither numpy nor the engine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expertctl.errors import ContextLengthError, UsageError

MAX_PROMPT_CHARACTERS = 500_000
MAX_MESSAGES = 10_000
"""Maximum messages of a conversation that a server takes with a prompt."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 200
LIMITS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (1, 200_000),
    "max_experts": (1, 10),
    "priority": (0, 9),
    "seed": (0, 2**53 - 1),
    "weight": (-10.0, 10.0),
}
"""Setting → smallest and largest value; ``top_p`` must be above 0."""


_EXCLUSIVE_MINIMUM = frozenset({"top_p"})
PROMPT_NOT_IN_TEMPLATE = (
    "the template has no {prompt}: the prompt selects experts, but the model does not see it"
)
_PLACEHOLDERS = re.compile(r"\{(prompt|body)\}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOverrides:
    """The settings given by a user; ``None`` leaves one to the experts and the preset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    greedy: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not left open."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "greedy"}
        return {name: value for name, value in values.items() if value is not None}


NO_OVERRIDES = SamplingOverrides()


def check_prompt(prompt: str) -> None:
    """Reject a prompt that is blank or too long.

    Raises:
        ContextLengthError: when it is too long.
        UsageError: when it is blank.
    """
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint='expertctl run "Sort these numbers: 3, 1, 2"')
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            size=len(prompt),
            limit=MAX_PROMPT_CHARACTERS,
            unit="characters",
            hint="shorten it, or ask in several parts",
        )


def check_limit(name: str, value: float | None) -> None:
    """Reject a value outside ``LIMITS``; ``None`` means not given.

    Raises:
        UsageError: with the range.
    """
    if value is None or is_within(name, value):
        return
    low, high = LIMITS[name]
    bounds = f"{low:.16g} to {high:.16g}"
    above = f"must be above {low:.16g}, up to {high:.16g}"
    violation = above if name in _EXCLUSIVE_MINIMUM else f"is outside {bounds}"
    raise UsageError(
        f"{name} {value} {violation}", hint="give a value between these, or leave it out"
    )


def is_within(name: str, value: float) -> bool:
    """Tell whether a value is within ``LIMITS``."""
    low, high = LIMITS[name]
    return low < value <= high if name in _EXCLUSIVE_MINIMUM else low <= value <= high


def check_overrides(overrides: SamplingOverrides) -> None:
    """Reject settings outside the limits, and a temperature together with greedy decoding.

    Raises:
        UsageError: naming the setting.
    """
    for name, value in overrides.given.items():
        if name != "stop":
            check_limit(name, value)
    stops = overrides.stop or ()
    if len(stops) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_CHARACTERS for s in stops):
        raise UsageError(
            f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARACTERS} characters",
            hint="give fewer, or shorter ones",
        )
    if overrides.greedy and overrides.temperature:
        raise UsageError(
            f"temperature {overrides.temperature:g} has no effect when decoding is greedy",
            hint="leave out the one or the other",
        )
