"""From a conversation to the tokens of a prompt, by the chat template of the base.

A template sees plain data only: messages, tools, the names of special tokens, and what the caller
adds. It is rendered as transformers renders it. Text of users is kept from becoming control tokens
by marks around them (see `tokenizer`). Nothing is rewritten: without a template the prompt is used
as it is, and that is said in the warnings.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from jinja2.exceptions import (
    SecurityError,
    TemplateAssertionError,
    TemplateError,
    TemplateSyntaxError,
)

from expertctl.engine.message import ChatEnd, Message
from expertctl.engine.template_budget import Budget, paying_from
from expertctl.engine.template_sandbox import ChatSandbox
from expertctl.engine.tokenizer import Marks, Tokenizer
from expertctl.engine.tokenizer_config import TemplateSource
from expertctl.errors import ExpertError, IncompatibleError, InvalidPackageError, UsageError
from expertctl.schema.strict_json import JsonValue

MAX_TEMPLATE_CHARACTERS = 256 << 10
NO_TEMPLATE = "the base has no chat template, the prompt is used as it is"
USES_CLOCK = "the base's chat template writes the date, so the prompt differs from day to day"
_ANY_TURN = (Message("user", "?"),)
_MAX_SAID = 500
_STRFTIME = re.compile(r"(%[-#]?[A-Za-z%]|[^%]){0,100}")

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the decoder reads, as text and as tokens, and what the user should know about it."""

    text: str
    ids: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, beside those that end every text of the base."""


class _RefusalError(TemplateError):
    """A template called ``raise_exception``."""


class ChatTemplate:
    """The chat template of one base."""

    def __init__(self, source: TemplateSource, *, clock: Clock = datetime.now) -> None:
        """Keep the source; it is compiled by each rendering, under the rendering's budget."""
        self.source = source
        self._clock = clock

    def render(
        self,
        messages: Sequence[Message],
        *,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, JsonValue] | None = None,
        add_generation_prompt: bool = True,
        used_clock: Callable[[], None] = lambda: None,
    ) -> str:
        """Return the conversation as text; ``used_clock`` is called when the template asks for it.

        Raises:
            InvalidPackageError: when the template is malformed, fails, or does too much.
            IncompatibleError: when the template refuses every conversation.
            UsageError: when it takes others, and refuses this one or fails on it.
        """

        def strftime_now(form: str) -> str:
            used_clock()
            return _formatted(self._clock(), form)

        functions = {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        usual = {
            "tools": None,
            "documents": None,
            "messages": _fields_of(_ANY_TURN),
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
        }
        values = {**usual, "messages": _fields_of(messages), **(variables or {})}
        try:
            return self._rendered(ChatSandbox(functions), values)
        except (InvalidPackageError, IncompatibleError) as error:
            is_costly = isinstance(error.__cause__, SecurityError)
            if is_costly or not self._takes(ChatSandbox(functions), usual):
                raise
            raise self._not_this_one(error) from error

    def _takes(self, sandbox: ChatSandbox, values: Mapping[str, object]) -> bool:
        """Tell whether it renders a conversation that nothing is wrong with."""
        try:
            self._rendered(sandbox, values)
        except (InvalidPackageError, IncompatibleError):
            return False
        return True

    def _not_this_one(self, error: ExpertError) -> UsageError:
        """Say what is wrong with a conversation, in the words of the template."""
        cause = error.__cause__
        is_said = isinstance(cause, _RefusalError)
        said = _one_line(str(cause) if is_said else f"it fails: {type(cause).__name__}: {cause}")
        return UsageError(
            f"the chat template takes no such conversation: {said[:_MAX_SAID]}",
            hint="change roles, order or contents of the messages, or of the tools, as it says",
        )

    def _rendered(self, sandbox: ChatSandbox, values: Mapping[str, object]) -> str:
        if len(self.source.text) > MAX_TEMPLATE_CHARACTERS:
            raise self._refused(f"longer than {MAX_TEMPLATE_CHARACTERS} characters")
        try:
            with paying_from(Budget()):
                return sandbox.from_string(self.source.text).render(values)
        except (TemplateSyntaxError, TemplateAssertionError) as error:
            raise self._refused(f"line {error.lineno}: {error.message}") from error
        except _RefusalError as error:
            raise IncompatibleError(
                f"{self.source.file}: the chat template refuses this conversation: {error}",
                hint="change the conversation as it says",
            ) from error
        except Exception as error:  # a template can raise whatever Python can
            raise self._refused(f"fails: {type(error).__name__}: {error}") from error

    def _refused(self, problem: str) -> InvalidPackageError:
        return InvalidPackageError(
            f"{self.source.file}: chat template",
            [_one_line(problem)],
            hint="use a base and experts whose chat template can be rendered",
        )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: TemplateSource | None = None,
    variables: Mapping[str, JsonValue] | None = None,
    end: ChatEnd = "new_turn",
    clock: Clock = datetime.now,
) -> Prompt:
    """Return what the decoder reads for a conversation; ``template`` is used for the base's own.

    Raises:
        UsageError: for several messages where the base has no chat template, for control tokens
            that cannot be read as letters, for what the template refuses or fails on, and for a
            last message that it does not write as it is, where that is to be continued.
        InvalidPackageError: when the template is malformed, fails, or does too much.
        IncompatibleError: when the template refuses every conversation.
    """
    config = tokenizer.config
    template = template or config.template
    if template is None:
        return _without_template(tokenizer, messages)
    texts = _texts(messages, variables)
    marks = tokenizer.marks_for(texts, template=template.text)
    if marks is not None:
        messages = [_marked_message(message, tokenizer, marks) for message in messages]
        variables = _marked_object(variables or {}, tokenizer, marks)
    tag = _unused_tag(texts) if end == "continue" else ""
    clock_uses: list[str] = []
    text = ChatTemplate(template, clock=clock).render(
        _with_tag(messages, tag),
        special_tokens=config.special_tokens,
        variables=variables,
        add_generation_prompt=end == "new_turn",
        used_clock=lambda: clock_uses.append(USES_CLOCK),
    )
    text = _until_tag(text, tag)
    ids = tokenizer.encode_rendered(text, marks)
    if marks is not None:
        text = text.replace(marks.begin, "").replace(marks.end, "")
    return Prompt(text, tuple(ids), tuple(clock_uses[:1]))


def _unused_tag(texts: Sequence[str]) -> str:
    """Return a word that marks the end of the last message; it occurs in no text of a user.

    It is made of the digest of all texts, which none of them can contain.
    """
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass"))
    return f"CONTINUED-{digest.hexdigest()} "


def _with_tag(messages: Sequence[Message], tag: str) -> Sequence[Message]:
    if not tag:
        return messages
    *before, last = messages
    return [*before, replace(last, content=last.content + tag)]


def _until_tag(text: str, tag: str) -> str:
    """Cut a rendered conversation behind its last message, as transformers does.

    Where the template removes white space at the end of messages, it is removed here.
    """
    if not tag:
        return text
    at = text.rfind(tag.strip())
    if at < 0:
        raise UsageError(
            "the last message cannot be continued: the chat template of the base does not write it",
            hint="end the conversation with a message of the user",
        )
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()


def _texts(messages: Sequence[Message], variables: Mapping[str, JsonValue] | None) -> list[str]:
    """Return every text of a user that a template may write, names of fields too."""
    given = [m.content for m in messages]
    return (
        given + [t for m in messages for t in _strings_of(m.fields)] + _strings_of(variables or {})
    )


def _strings_of(value: Mapping[str, JsonValue] | JsonValue) -> list[str]:
    """Return all strings in a value, those of keys too."""
    match value:
        case str():
            return [value]
        case list():
            return [text for item in value for text in _strings_of(item)]
        case Mapping():
            return [text for key, item in value.items() for text in (key, *_strings_of(item))]
        case _:
            return []


def _marked_message(message: Message, tokenizer: Tokenizer, marks: Marks) -> Message:
    content = tokenizer.mark(message.content, marks)
    return Message(message.role, content, _marked_object(message.fields, tokenizer, marks))


def _marked_object(
    given: Mapping[str, JsonValue], tokenizer: Tokenizer, marks: Marks
) -> dict[str, JsonValue]:
    """Mark control tokens in values; a top name is the template's, names below are the user's."""

    def marked(value: JsonValue) -> JsonValue:
        match value:
            case str():
                return tokenizer.mark(value, marks)
            case list():
                return [marked(item) for item in value]
            case dict():
                return {tokenizer.mark(key, marks): marked(item) for key, item in value.items()}
            case _:
                return value

    return {name: marked(value) for name, value in given.items()}


def _without_template(tokenizer: Tokenizer, messages: Sequence[Message]) -> Prompt:
    if len(messages) != 1:
        raise UsageError(
            "the base has no chat template, so it takes one prompt and no conversation",
            hint="use a base with a chat_template in tokenizer_config.json",
        )
    text = messages[0].content
    return Prompt(text, tuple(tokenizer.encode(text)), (NO_TEMPLATE,))


def _fields_of(messages: Sequence[Message]) -> list[dict[str, JsonValue]]:
    return [{**m.fields, "role": m.role, "content": m.content} for m in messages]


def _raise_exception(message: object) -> None:
    """Let a template refuse a conversation, as transformers does."""
    raise _RefusalError(_one_line(str(message)))


def _one_line(text: str) -> str:
    """Return a text of a template as it may stand in a message: one line, printable, bounded."""
    plain = "".join(c if c.isprintable() else " " for c in text[:1000])
    return " ".join(plain.split())


def _formatted(moment: datetime, form: str) -> str:
    """Only plain conversions: some C libraries pad ``%999999999d`` without limit."""
    if not _STRFTIME.fullmatch(str(form)):
        raise TemplateError(f"the date format {str(form)[:40]!r} is not available")
    return moment.strftime(str(form))
