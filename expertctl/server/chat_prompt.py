"""Conversations as chat templates read them, and the properties of a base that affect them.

`ChatTemplateTraits` follow from the tokenizer and the chat template, which do not change while a
base is served: how the base writes tool calls, whether it begins with reasoning, how many tokens a
conversation has.

Some templates refuse call ids that do not have the length their models write. Clients send ids of
their own API, so these are replaced by short ones, the same for a call and its result.

A model that is not shown the form of a requested JSON schema seldom writes it, and generation
cannot be constrained here. So the last user message gets one more paragraph with an example made
from the schema; small models only repeat the schema itself. Nothing is added where the messages
already show the form, where tools are offered (the model could no longer call them), or where no
example can be made within the bounds.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from expertctl.engine.text.chat_template import ChatTemplate, encode_chat
from expertctl.engine.text.prompt import ChatEnd, ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.errors import ContextLengthError, ExpertError
from expertctl.routing.sampling_presets import MAX_PROMPT_CHARACTERS
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical
from expertctl.server.output_parser import OutputParserConfig
from expertctl.server.reasoning_parser import (
    OPEN_TAG,
    ends_in_reasoning,
    find_partial_tag,
    prompt_opens_reasoning,
    split_reasoning,
)
from expertctl.server.request_body import FieldError
from expertctl.server.tool_parser import ToolCallFormat, detect_call_format, template_reads_tools

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
        asked = {
            name: value for name, value in variables.items() if name not in _IRRELEVANT_VARIABLES
        }
        return _prompt_opens_reasoning(
            source, names, _TemplateVariables(encode_canonical(asked), asked)
        )

    def count_tokens(
        self,
        messages: Sequence[ConversationMessage],
        variables: Mapping[str, JsonValue],
        *,
        end: ChatEnd = "new_turn",
    ) -> int:
        """Count the tokens of a conversation's prompt; this takes a while.

        Raises:
            ExpertError: when the conversation cannot be read.
        """
        return len(encode_chat(self.tokenizer, messages, variables=variables, end=end).ids)

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
        raise FieldError(
            f"tools: they have {size} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            field="tools",
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
        raise FieldError("messages: none of them has text", field="messages")
    said = [message for message in texts if message.role == "user"]
    return (said or texts)[-1].content


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


INSTRUCTION_WARNING = (
    "an example of the requested JSON was added to the last user message; `expertctl serve "
    "--no-json-instruction` disables this"
)
"""The warning in an answer whose prompt got the instruction."""
INSTRUCTION_TEXT = "Reply with one line of JSON in this form, with your own values:"
MAX_INSTRUCTION_CHARACTERS = 2000
MAX_EXAMPLE_VALUES = 200
"""Maximum values of an example; a recursive schema can describe an infinite one."""
_MAX_DEPTH = 12
_DEFAULT_ITEMS, _MAX_ITEMS = 2, 4
_NUMBER = 12
_CHOICES = ("anyOf", "oneOf", "allOf")


def build_json_instruction(schema: JsonObject) -> str | None:
    """Return the instruction for a schema; None if no example can be made from it."""
    try:
        example = _ExampleBuilder(schema).build_value(schema, "value", 0)
    except _TooLargeError:
        return None
    text = json.dumps(example, ensure_ascii=False)
    if (
        not isinstance(example, dict | list)
        or not example
        or len(text) > MAX_INSTRUCTION_CHARACTERS
    ):
        return None
    return f"{INSTRUCTION_TEXT}\n{text}"


def add_json_instruction(
    messages: Sequence[ConversationMessage], schema: JsonObject
) -> tuple[ConversationMessage, ...]:
    """Append the instruction to the last user message, unless a message shows the form already."""
    last = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)
    if last is None or mentions_properties((message.content for message in messages), schema):
        return tuple(messages)
    instruction = build_json_instruction(schema)
    if instruction is None:
        return tuple(messages)
    asked = messages[last]
    told = replace(asked, content=f"{asked.content}\n\n{instruction}")
    return (*messages[:last], told, *messages[last + 1 :])


def mentions_properties(texts: Iterable[str], schema: JsonObject) -> bool:
    """Tell whether texts contain the quoted name of every property of a schema."""
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    text = "\n".join(texts)
    return bool(names) and all(f'"{name}"' in text for name in names)


class _TooLargeError(Exception):
    """An example would have too many values."""


@dataclass(slots=True)
class _ExampleBuilder:
    """Builds an example value of a schema, which may be malformed."""

    root: JsonObject
    value_count: int = 0

    def build_value(self, schema: JsonValue, name: str, depth: int) -> JsonValue:
        """Return an example for the property ``name``."""
        self.value_count += 1
        if self.value_count > MAX_EXAMPLE_VALUES or depth > _MAX_DEPTH:
            raise _TooLargeError
        if not isinstance(schema, dict):
            return f"<{name}>"
        given = _find_given_value(schema)
        if given is not None:
            return given
        inner = self._find_inner_schema(schema)
        if inner is not None:
            return self.build_value(inner, name, depth + 1)
        match _find_type(schema):
            case "object":
                return self._build_object(schema, depth)
            case "array":
                return self._build_array(schema, name, depth)
            case kind:
                return _build_scalar(kind, schema, name)

    def _find_inner_schema(self, schema: JsonObject) -> JsonValue:
        """Return the referenced schema, or the first alternative other than null."""
        if isinstance(place := schema.get("$ref"), str):
            return self._resolve_reference(place)
        for key in _CHOICES if "properties" not in schema else ():
            if isinstance(choices := schema.get(key), list):
                return next((one for one in choices if one != {"type": "null"}), None)
        return None

    def _resolve_reference(self, reference: str) -> JsonValue:
        found: JsonValue = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step) if isinstance(found, dict) else None
        return found if found is not None else True

    def _build_object(self, schema: JsonObject, depth: int) -> JsonValue:
        properties = schema.get("properties")
        fields = properties if isinstance(properties, dict) else {}
        return {name: self.build_value(one, name, depth + 1) for name, one in fields.items()}

    def _build_array(self, schema: JsonObject, name: str, depth: int) -> JsonValue:
        first = schema.get("prefixItems")
        if isinstance(first, list):
            return [self.build_value(one, name, depth + 1) for one in first]
        low, high = _read_bound(schema, "minItems", 0), _read_bound(schema, "maxItems", _MAX_ITEMS)
        count = min(max(_DEFAULT_ITEMS, low), high, _MAX_ITEMS)
        return [self.build_value(schema.get("items"), name, depth + 1) for _ in range(int(count))]


def _find_given_value(schema: JsonObject) -> JsonValue:
    """Return the first value that the schema lists; None if it lists none."""
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if isinstance(values := schema.get(key), list) and values:
            return values[0]
    return None


def _find_type(schema: JsonObject) -> JsonValue:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    return "object" if kind is None and "properties" in schema else kind


def _build_scalar(kind: JsonValue, schema: JsonObject, name: str) -> JsonValue:
    match kind:
        case "integer" | "number":
            usual = _NUMBER if kind == "integer" else _NUMBER + 0.5
            least = max(usual, _read_bound(schema, "minimum", usual))
            return min(least, _read_bound(schema, "maximum", least))
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return f"<{name}>"


def _read_bound(schema: Mapping[str, JsonValue], key: str, default: float) -> float:
    bound = schema.get(key)
    return bound if isinstance(bound, int | float) and not isinstance(bound, bool) else default
