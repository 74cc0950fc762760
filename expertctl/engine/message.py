"""Messages: those of a conversation, and the user's own of prompt, body and template.

A message is put together, never rewritten. Without a template it is the prompt, a blank line, the
body. A template holds ``{prompt}`` and ``{body}`` at most once each; what is put in is not looked
at again. Routing sees the prompt only. A raw prompt is no message: it is continued as it stands.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from expertctl.errors import ContextLengthError, UsageError
from expertctl.routing.presets import MAX_PROMPT_CHARACTERS, check_prompt
from expertctl.schema.strict_json import JsonValue

NOT_READ = "the template has no {prompt}: the prompt chose the experts, the model does not read it"
_PLACES = re.compile(r"\{(prompt|body)\}")

Role = Literal["system", "user", "assistant", "tool"]
ChatEnd = Literal["new_turn", "as_is", "continue"]
"""How a prompt ends: where a new turn of the assistant begins, where the last message was closed,
or inside the last message, which the answer continues."""


@dataclass(frozen=True, slots=True)
class Message:
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
        lost = self.template is not None and "prompt" not in _PLACES.findall(self.template)
        return (NOT_READ,) if lost else ()

    def text(self) -> str:
        """Return the message as the model is to read it.

        Raises:
            UsageError: when it is empty, too long or not text, or the template does not fit.
        """
        check_prompt(self.prompt)
        text = self._joined() if self.template is None else self._filled(self.template)
        _check(text)
        return text

    def _joined(self) -> str:
        return self.prompt if self.body is None else f"{self.prompt}\n\n{self.body}"

    def _filled(self, template: str) -> str:
        places = _PLACES.findall(template)
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
        return _PLACES.sub(lambda match: values[match[1]], template)


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


def _check(text: str) -> None:
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
            most=MAX_PROMPT_CHARACTERS,
            unit="characters",
            hint="shorten the body, or ask in several parts",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid text at character {error.start}") from error
