"""From conversations and raw prompts to tokens: chat templates and fill-in-the-middle.

A template sees only plain data: messages, tools, the names of special tokens, and the caller's
variables. It is rendered as transformers renders it. User text cannot become control tokens,
because marks around it separate the two (see `tokenizer`). Nothing is rewritten: without a template
the prompt is used unchanged, with a warning.

An expert may bring a template of its own, ``decoding.chat_template``. If the experts of a plan
bring different ones, the base's is used, with a warning. A template is untrusted text, like that of
a base, and is rendered in the same sandbox.

A `RawPrompt` is continued without a chat template. Control tokens spelled in its text are control
tokens unless ``parse_special`` is off; token ids are used unchanged. The tokenizer's token at the
beginning of a text is added once: not to token ids, and not to a text that already starts with it.

Fill-in-the-middle is supported if the vocabulary has all tokens of one of `_FAMILIES`. The order is
the documented one of the family: prefix, suffix, middle; Mistral's bases take the suffix first.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from jinja2.exceptions import (
    SecurityError,
    TemplateAssertionError,
    TemplateError,
    TemplateSyntaxError,
)

from expertctl.engine.text.prompt import ChatEnd, ConversationMessage, RawPrompt
from expertctl.engine.text.template_budget import RenderBudget, use_budget
from expertctl.engine.text.template_sandbox import ChatSandbox
from expertctl.engine.text.tokenizer import ControlTokenMarks, Tokenizer
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.errors import ExpertError, IncompatibleError, InvalidPackageError, UsageError
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.planner import PlannedPrompt
from expertctl.schema.strict_json import JsonValue


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The fill-in-the-middle tokens of a base; ``middle`` is None if none precedes the answer."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    """Additional tokens that end the middle, besides the base's usual ones."""

    def arrange(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """Return the prompt whose continuation is the middle."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


_FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite, StableCode
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek-Coder's letters
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>",
    "<fim_pad>", "<file_sep>", "<fim-pad>", "▁<EOT>", "<EOT>",
)  # fmt: skip
"""Padding of such prompts and file separators: after one of them the middle is complete."""


def find_fim_tokens(vocabulary: Tokenizer) -> FimTokens | None:
    """Return the fill-in-the-middle tokens of a base; None if it has no family of them."""
    for names in _FAMILIES:
        ids = [None if name is None else vocabulary.token_id(name) for name in names]
        if any(one is None for one, name in zip(ids, names, strict=True) if name is not None):
            continue
        prefix, suffix, middle = ids
        assert prefix is not None
        assert suffix is not None
        found = (vocabulary.token_id(name) for name in _ENDS)
        ends = {one for one in (*ids, *found) if one is not None}
        return FimTokens(prefix, suffix, middle, frozenset(ends))
    return None


MAX_TEMPLATE_CHARACTERS = 256 << 10
NO_TEMPLATE = "the base has no chat template; the prompt is used unchanged"
TEMPLATE_USES_CLOCK = "the base's chat template writes the date, so the prompt changes every day"
_SAMPLE_MESSAGES = (ConversationMessage("user", "?"),)
_MAX_REASON_CHARACTERS = 500
_STRFTIME = re.compile(r"(%[-#]?[A-Za-z%]|[^%]){0,100}")

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as text and as tokens, with warnings for the user."""

    text: str
    ids: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()
    """Additional tokens that end the answer, besides the base's usual ones."""


class _RefusalError(TemplateError):
    """A template called ``raise_exception``."""


class ChatTemplate:
    """The chat template of one base."""

    def __init__(self, source: TemplateSource, *, clock: Clock = datetime.now) -> None:
        """Keep the source; each rendering compiles it, within the rendering's budget."""
        self.source = source
        self._clock = clock

    def render(
        self,
        messages: Sequence[ConversationMessage],
        *,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, JsonValue] | None = None,
        add_generation_prompt: bool = True,
        used_clock: Callable[[], None] = lambda: None,
    ) -> str:
        """Return the conversation as text; ``used_clock`` is called if the template reads the time.

        Raises:
            InvalidPackageError: if the template is malformed, fails, or does too much.
            IncompatibleError: if the template refuses every conversation.
            UsageError: if it accepts others, but refuses this one or fails on it.
        """

        def strftime_now(form: str) -> str:
            used_clock()
            return _format_time(self._clock(), form)

        functions = {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        defaults = {
            "tools": None,
            "documents": None,
            "messages": _message_fields(_SAMPLE_MESSAGES),
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
        }
        values = {**defaults, "messages": _message_fields(messages), **(variables or {})}
        try:
            return self._render_sandboxed(ChatSandbox(functions), values)
        except (InvalidPackageError, IncompatibleError) as error:
            is_costly = isinstance(error.__cause__, SecurityError)
            if is_costly or not self._accepts(ChatSandbox(functions), defaults):
                raise
            raise self._make_usage_error(error) from error

    def _accepts(self, sandbox: ChatSandbox, values: Mapping[str, object]) -> bool:
        """Return whether it renders a minimal valid conversation."""
        try:
            self._render_sandboxed(sandbox, values)
        except (InvalidPackageError, IncompatibleError):
            return False
        return True

    def _make_usage_error(self, error: ExpertError) -> UsageError:
        """Describe the problem of a conversation, in the words of the template."""
        cause = error.__cause__
        is_said = isinstance(cause, _RefusalError)
        reason = _clean_template_text(
            str(cause) if is_said else f"it fails: {type(cause).__name__}: {cause}"
        )
        return UsageError(
            "the chat template does not accept this conversation: "
            f"{reason[:_MAX_REASON_CHARACTERS]}",
            hint="change the roles, order or contents of the messages or tools accordingly",
        )

    def _render_sandboxed(self, sandbox: ChatSandbox, values: Mapping[str, object]) -> str:
        if len(self.source.text) > MAX_TEMPLATE_CHARACTERS:
            raise self._make_package_error(f"longer than {MAX_TEMPLATE_CHARACTERS} characters")
        try:
            with use_budget(RenderBudget()):
                return sandbox.from_string(self.source.text).render(values)
        except (TemplateSyntaxError, TemplateAssertionError) as error:
            raise self._make_package_error(f"line {error.lineno}: {error.message}") from error
        except _RefusalError as error:
            raise IncompatibleError(
                f"{self.source.file}: the chat template refuses this conversation: {error}",
                hint="change the conversation accordingly",
            ) from error
        except Exception as error:  # a template can raise whatever Python can
            raise self._make_package_error(f"fails: {type(error).__name__}: {error}") from error

    def _make_package_error(self, problem: str) -> InvalidPackageError:
        return InvalidPackageError(
            f"{self.source.file}: chat template",
            [_clean_template_text(problem)],
            hint="use a base and experts whose chat template can be rendered",
        )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ConversationMessage],
    *,
    template: TemplateSource | None = None,
    variables: Mapping[str, JsonValue] | None = None,
    end: ChatEnd = "new_turn",
    clock: Clock = datetime.now,
) -> EncodedPrompt:
    """Encode a conversation; ``template`` replaces the base's own.

    Raises:
        UsageError: for several messages if the base has no chat template, for control tokens
            that cannot be encoded as letters, if the template refuses the conversation or fails,
            and if a last message to be continued is not written unchanged.
        InvalidPackageError: if the template is malformed, fails, or does too much.
        IncompatibleError: if the template refuses every conversation.
    """
    config = tokenizer.config
    template = template or config.template
    if template is None:
        return _encode_without_template(tokenizer, messages)
    texts = _collect_texts(messages, variables)
    marks = tokenizer.choose_marks(texts, template=template.text)
    if marks is not None:
        messages = [_mark_message(message, tokenizer, marks) for message in messages]
        variables = _mark_object(variables or {}, tokenizer, marks)
    tag = _choose_unused_tag(texts) if end == "continue" else ""
    clock_uses: list[str] = []
    text = ChatTemplate(template, clock=clock).render(
        _append_tag(messages, tag),
        special_tokens=config.special_tokens,
        variables=variables,
        add_generation_prompt=end == "new_turn",
        used_clock=lambda: clock_uses.append(TEMPLATE_USES_CLOCK),
    )
    text = _cut_after_tag(text, tag)
    ids = tokenizer.encode_rendered(text, marks)
    if marks is not None:
        text = text.replace(marks.begin, "").replace(marks.end, "")
    return EncodedPrompt(text, tuple(ids), tuple(clock_uses[:1]))


def _choose_unused_tag(texts: Sequence[str]) -> str:
    """Return a word that marks the end of the last message and occurs in no user text.

    It contains the digest of all texts, which none of them can contain.
    """
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass"))
    return f"CONTINUED-{digest.hexdigest()} "


def _append_tag(messages: Sequence[ConversationMessage], tag: str) -> Sequence[ConversationMessage]:
    if not tag:
        return messages
    *before, last = messages
    return [*before, replace(last, content=last.content + tag)]


def _cut_after_tag(text: str, tag: str) -> str:
    """Cut a rendered conversation after its last message, as transformers does.

    If the template strips white space at the end of messages, it is stripped here too.
    """
    if not tag:
        return text
    at = text.rfind(tag.strip())
    if at < 0:
        raise UsageError(
            "the last message cannot be continued: the chat template of the base does not write it",
            hint="end the conversation with a user message",
        )
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()


def _collect_texts(
    messages: Sequence[ConversationMessage], variables: Mapping[str, JsonValue] | None
) -> list[str]:
    """Return every user text that a template may write, including names of fields."""
    fields = (text for message in messages for text in _collect_strings(message.fields))
    return [*(m.content for m in messages), *fields, *_collect_strings(variables or {})]


def _collect_strings(value: Mapping[str, JsonValue] | JsonValue) -> list[str]:
    """Return all strings in a value, including keys."""
    match value:
        case str():
            return [value]
        case list():
            return [text for item in value for text in _collect_strings(item)]
        case Mapping():
            return [text for key, item in value.items() for text in (key, *_collect_strings(item))]
        case _:
            return []


def _mark_message(
    message: ConversationMessage, tokenizer: Tokenizer, marks: ControlTokenMarks
) -> ConversationMessage:
    content = tokenizer.mark_control_tokens(message.content, marks)
    fields = _mark_object(message.fields, tokenizer, marks)
    return ConversationMessage(message.role, content, fields)


def _mark_object(
    given: Mapping[str, JsonValue], tokenizer: Tokenizer, marks: ControlTokenMarks
) -> dict[str, JsonValue]:
    """Mark control tokens in values and nested names; top-level names are the template's."""

    def marked(value: JsonValue) -> JsonValue:
        match value:
            case str():
                return tokenizer.mark_control_tokens(value, marks)
            case list():
                return [marked(item) for item in value]
            case dict():
                mark = tokenizer.mark_control_tokens
                return {mark(key, marks): marked(item) for key, item in value.items()}
            case _:
                return value

    return {name: marked(value) for name, value in given.items()}


def _encode_without_template(
    tokenizer: Tokenizer, messages: Sequence[ConversationMessage]
) -> EncodedPrompt:
    if len(messages) != 1:
        raise UsageError(
            "the base has no chat template, so it accepts one prompt but no conversation",
            hint="use a base with a chat_template in tokenizer_config.json",
        )
    text = messages[0].content
    return EncodedPrompt(text, tuple(tokenizer.encode(text)), (NO_TEMPLATE,))


def _message_fields(messages: Sequence[ConversationMessage]) -> list[dict[str, JsonValue]]:
    return [{**m.fields, "role": m.role, "content": m.content} for m in messages]


def _raise_exception(message: object) -> None:
    """Let a template refuse a conversation, as in transformers."""
    raise _RefusalError(_clean_template_text(str(message)))


def _clean_template_text(text: str) -> str:
    """Return template text for an error message: one line, printable, bounded."""
    plain = "".join(c if c.isprintable() else " " for c in text[:1000])
    return " ".join(plain.split())


def _format_time(moment: datetime, form: str) -> str:
    """Format with plain conversions only: some C libraries pad ``%999999999d`` without limit."""
    if not _STRFTIME.fullmatch(str(form)):
        raise TemplateError(f"the date format {str(form)[:40]!r} is not available")
    return moment.strftime(str(form))


_MAX_BYTES = 4 * MAX_TEMPLATE_CHARACTERS
"""The maximum UTF-8 size of a template."""

ReadFile = Callable[[InstalledExpert, str], bytes]
"""Returns one file of an expert, its digest checked."""


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The template of an expert, or ``None`` for the base's."""

    source: TemplateSource | None = None
    warnings: tuple[str, ...] = ()


def choose_template(planned: PlannedPrompt, read: ReadFile) -> TemplateChoice:
    """Return the one template that the experts of a plan bring; experts of weight 0 are ignored.

    Raises:
        DigestError: if the file is not the one that was verified.
        InvalidPackageError: if it is too long or not text.
    """
    active = zip(planned.experts, planned.result.plan.experts, strict=True)
    brought: dict[str, TemplateSource] = {}
    for expert, chosen in active:
        path = expert.manifest.decoding.chat_template
        if path is not None and chosen.weight != 0.0:
            source = _read_template_source(expert, path, read)
            brought.setdefault(source.text, source)
    if len(brought) > 1:
        files = ", ".join(str(source.file) for source in brought.values())
        return TemplateChoice(warnings=(f"{files} differ: the chat template of the base is used",))
    return TemplateChoice(next(iter(brought.values()), None))


def _read_template_source(expert: InstalledExpert, path: str, read: ReadFile) -> TemplateSource:
    what = f"{expert.ref} {path}"
    size = expert.stored.find_file(path).size
    if size > _MAX_BYTES:
        raise InvalidPackageError(what, [f"{size} bytes, at most {_MAX_BYTES} allowed"])
    try:
        return TemplateSource(read(expert, path).decode("utf-8"), Path(what))
    except UnicodeDecodeError as error:
        raise InvalidPackageError(what, [f"not UTF-8 at byte {error.start}"]) from error


def encode_raw_prompt(tokenizer: Tokenizer, raw: RawPrompt) -> EncodedPrompt:
    """Encode a raw prompt.

    Raises:
        UsageError: if it is empty, or has a suffix and the base has no fill-in-the-middle tokens.
    """
    if raw.suffix is not None:
        return _encode_fim(tokenizer, raw, raw.suffix)
    ids = raw.ids
    if ids is None:
        parse, add = raw.parse_special, raw.add_special_tokens
        ids = tuple(tokenizer.encode_raw(raw.text, parse_special=parse, add_special_tokens=add))
    if not ids:
        raise UsageError("the prompt is empty", hint="send at least one token")
    return EncodedPrompt(raw.text, ids)


def _encode_fim(tokenizer: Tokenizer, raw: RawPrompt, suffix: str) -> EncodedPrompt:
    tokens = find_fim_tokens(tokenizer)
    if tokens is None:
        raise UsageError(
            "suffix: the base has no fill-in-the-middle tokens",
            hint="leave out suffix, or serve a base that was trained for it, such as Qwen2.5-Coder",
        )
    parse = raw.parse_special
    before = tokenizer.encode_piece(raw.text, parse_special=parse, is_first=True)
    after = tokenizer.encode_piece(suffix, parse_special=parse, is_first=False)
    begin = tokenizer.begin_ids if raw.add_special_tokens else ()
    return EncodedPrompt(raw.text, (*begin, *tokens.arrange(before, after)), end_ids=tokens.ends)
