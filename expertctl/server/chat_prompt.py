"""Conversations as chat templates read them, and the properties of a base that affect them.

`ChatTemplateTraits` follow from the tokenizer and the chat template, which do not change while a
base is served: how the base writes tool calls, whether it begins with reasoning, how many tokens a
conversation has.

Some templates refuse call ids that do not have the length their models write. Clients send ids of
their own API, so these are replaced by short ones, the same for a call and its result.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from expertctl.engine.context_window import insert_samples
from expertctl.engine.text.chat_template import ChatTemplate, encode_chat
from expertctl.engine.text.prompt import ChatEnd, ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.errors import ContextLengthError, ExpertError
from expertctl.http.operation import FieldError
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical
from expertctl.server.output_parser import OutputParserConfig
from expertctl.server.reasoning_parser import (
    OPEN_TAG,
    ends_in_reasoning,
    find_partial_tag,
    prompt_opens_reasoning,
    split_reasoning,
)
from expertctl.server.tool_parser import ToolCallFormat, detect_call_format, template_reads_tools
from expertctl.user_request import MAX_PROMPT_CHARACTERS

_PLACEHOLDER_TURN = (ConversationMessage("user", "?"),)
"""A placeholder: how a template begins an answer does not depend on the messages."""
_IRRELEVANT_VARIABLES = frozenset({"tools", "documents"})
_CACHE_SIZE = 64


@dataclass(frozen=True)
class ChatTemplateTraits:
    """The text properties of a base; any thread may use them."""

    tokenizer: Tokenizer

    @property
    def call_format(self) -> ToolCallFormat:
        """How the base writes tool calls."""
        return detect_call_format(self._template)

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template reads tools at all."""
        return template_reads_tools(self._template)

    @property
    def may_think(self) -> bool:
        """Whether the base may write reasoning: its template or vocabulary has the tag."""
        return OPEN_TAG in self._template or self.tokenizer.token_id(OPEN_TAG) is not None

    def opens_reasoning(self, variables: Mapping[str, JsonValue]) -> bool:
        """Tell whether a prompt with these template variables ends inside reasoning."""
        source = self.tokenizer.config.template
        if source is None:
            return False
        names = tuple(self.tokenizer.config.special_tokens.items())
        relevant = {
            name: value for name, value in variables.items() if name not in _IRRELEVANT_VARIABLES
        }
        return _prompt_opens_reasoning(
            source, names, _TemplateVariables(encode_canonical(relevant), relevant)
        )

    def count_tokens(
        self,
        messages: Sequence[ConversationMessage],
        variables: Mapping[str, JsonValue],
        *,
        end: ChatEnd = "new_turn",
        samples: Sequence[ConversationMessage] = (),
        context: int,
    ) -> int:
        """Count the tokens of a conversation's prompt; this takes a while.

        ``samples`` count if the prompt in a context of that many tokens would hold them.

        Raises:
            ExpertError: when the conversation cannot be read.
        """
        encode = partial(encode_chat, self.tokenizer, variables=variables, end=end)
        extended = insert_samples(messages, samples, encode, room=context, max_tokens=1)
        return len(encode(extended).ids)

    @property
    def _template(self) -> str:
        source = self.tokenizer.config.template
        return "" if source is None else source.text


@dataclass(frozen=True)
class _TemplateVariables:
    """Template variables, compared by their JSON."""

    key: bytes
    values: Mapping[str, JsonValue] = field(compare=False)


@lru_cache(maxsize=_CACHE_SIZE)
def _prompt_opens_reasoning(
    source: TemplateSource,
    special_tokens: tuple[tuple[str, str], ...],
    variables: _TemplateVariables,
) -> bool:
    """Render the placeholder; False if the template fails, which the request then reports."""
    try:
        prompt = ChatTemplate(source).render(
            _PLACEHOLDER_TURN, special_tokens=dict(special_tokens), variables=variables.values
        )
    except ExpertError:
        return False
    return prompt_opens_reasoning(prompt)


def check_conversation_length(messages: Sequence[ConversationMessage]) -> None:
    """Check the length of a conversation.

    Raises:
        ContextLengthError: when it is too long.
    """
    fields = sum(_count_characters(message.fields) for message in messages if message.fields)
    size = sum(len(message.content) for message in messages) + fields
    if size > MAX_PROMPT_CHARACTERS:
        raise ContextLengthError(
            f"messages: they have {size} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            size=size,
            limit=MAX_PROMPT_CHARACTERS,
            unit="characters",
            hint="leave out the oldest messages",
        )


def check_tools_length(tools: Sequence[JsonObject]) -> None:
    """Check the length of the tool definitions.

    Raises:
        FieldError: when it is too long.
    """
    size = _count_characters(tools)
    if size > MAX_PROMPT_CHARACTERS:
        raise FieldError.at(
            "tools", f"they have {size} characters, at most {MAX_PROMPT_CHARACTERS} are allowed"
        )


def _count_characters(value: JsonValue | Mapping[str, JsonValue] | Sequence[JsonObject]) -> int:
    """Count the characters of strings and names in a value of bounded depth.

    Every other value counts as one: it takes memory, and templates write it out.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 1 + sum(len(name) + _count_characters(one) for name, one in value.items())
    return 1 + (sum(map(_count_characters, value)) if isinstance(value, Sequence) else 0)


def find_routing_text(messages: Sequence[ConversationMessage]) -> str:
    """Return the text that routing uses: the last user message, else the last message with text.

    Raises:
        FieldError: when no message has text.
    """
    texts = [message for message in messages if message.content.strip()]
    if not texts:
        raise FieldError.at("messages", "none of them has text")
    by_user = [message for message in texts if message.role == "user"]
    return (by_user or texts)[-1].content


def can_continue(last: ConversationMessage) -> bool:
    """Tell whether the last message is the beginning of an answer, to be continued."""
    is_call = bool(last.fields.get("tool_calls"))
    return last.role == "assistant" and bool(last.content.strip()) and not is_call


def build_parser_config(
    template: ChatTemplateTraits,
    variables: Mapping[str, JsonValue],
    last: ConversationMessage,
    *,
    end: ChatEnd,
    tools: Iterable[str],
    single_call: bool,
    expects_json: bool,
) -> OutputParserConfig:
    """Return how to parse the answers to a conversation; ``last`` is its last message."""
    is_continued = end == "continue"
    opened = template.opens_reasoning(variables) if end == "new_turn" else False
    return OutputParserConfig(
        call_format=template.call_format,
        tools=frozenset(tools),
        single_call=single_call,
        may_think=template.may_think,
        starts_in_reasoning=opened or (is_continued and ends_in_reasoning(last.content)),
        expects_json=expects_json,
        prefix=split_reasoning(last.content)[0] if is_continued else "",
        partial_tag=find_partial_tag(last.content) if is_continued else "",
    )


def normalise_call_ids(
    messages: Sequence[ConversationMessage], form: ToolCallFormat
) -> tuple[ConversationMessage, ...]:
    """Return a conversation with call ids of the length that the templates of a family require."""
    length = form.id_length
    if length is None:
        return tuple(messages)
    return tuple(replace(one, fields=_normalise_fields(one.fields, length)) for one in messages)


def _normalise_fields(fields: Mapping[str, JsonValue], length: int) -> JsonObject:
    known = dict(fields)
    answered, calls = known.get("tool_call_id"), known.get("tool_calls")
    if isinstance(answered, str):
        known["tool_call_id"] = _shorten_id(answered, length)
    if isinstance(calls, list):
        known["tool_calls"] = [_normalise_call(call, length) for call in calls]
    return known


def _normalise_call(call: JsonValue, length: int) -> JsonValue:
    name = call.get("id") if isinstance(call, dict) else None
    return {**call, "id": _shorten_id(name, length)} if isinstance(name, str) else call  # type: ignore[dict-item]  # an object


def _shorten_id(name: str, length: int) -> str:
    if len(name) == length and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:length]
