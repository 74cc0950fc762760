"""The instruction that tells a model the form of JSON that a request asks for by a schema.

Text cannot be forced into a form here, so a model that is not told the form seldom writes it. The
last message of the user gets one more paragraph with an example that is made from the schema; the
schema itself, small models only repeat. Nothing is added where the messages show the form already,
where tools are offered, which the model could not call any more, or where no example can be made
within bounds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from expertctl.engine.message import Message
from expertctl.schema.strict_json import JsonObject, JsonValue

ADDED = (
    "the form of the JSON was added to the last message of the user; `expertctl serve "
    "--no-json-instruction` leaves it out"
)
"""The warning of an answer to which this happened."""
WORDS = "Reply with one line of JSON in this form, with your own values:"
MAX_CHARACTERS = 2000
MAX_PARTS = 200
"""How many values an example may have; a schema can stand for an endless one."""
_MAX_DEPTH = 12
_ITEMS, _MAX_ITEMS = 2, 4
_NUMBER = 12
_CHOICES = ("anyOf", "oneOf", "allOf")


def json_instruction(schema: JsonObject) -> str | None:
    """Return the instruction for a schema; None if no example of an object or list can be made."""
    try:
        example = _Example(schema).value(schema, "value", 0)
    except _TooLargeError:
        return None
    text = json.dumps(example, ensure_ascii=False)
    if not isinstance(example, dict | list) or not example or len(text) > MAX_CHARACTERS:
        return None
    return f"{WORDS}\n{text}"


def instruct(messages: Sequence[Message], schema: JsonObject) -> tuple[Message, ...]:
    """Return a conversation whose last message of the user says the form, if none does yet."""
    last = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)
    if last is None or shows_form((message.content for message in messages), schema):
        return tuple(messages)
    instruction = json_instruction(schema)
    if instruction is None:
        return tuple(messages)
    asked = messages[last]
    told = replace(asked, content=f"{asked.content}\n\n{instruction}")
    return (*messages[:last], told, *messages[last + 1 :])


def shows_form(texts: Iterable[str], schema: JsonObject) -> bool:
    """Tell whether texts hold the name of every property in quotes, as JSON has it."""
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    text = "\n".join(texts)
    return bool(names) and all(f'"{name}"' in text for name in names)


class _TooLargeError(Exception):
    """An example would have too many values."""


@dataclass(slots=True)
class _Example:
    """Makes a value that has the form of a schema; the schema may be malformed."""

    root: JsonObject
    parts: int = 0

    def value(self, schema: JsonValue, name: str, depth: int) -> JsonValue:
        """Return an example; ``name`` is the property that it stands for."""
        self.parts += 1
        if self.parts > MAX_PARTS or depth > _MAX_DEPTH:
            raise _TooLargeError
        if not isinstance(schema, dict):
            return f"<{name}>"
        given = _given(schema)
        if given is not None:
            return given
        inner = self._inner(schema)
        if inner is not None:
            return self.value(inner, name, depth + 1)
        match _type(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, name, depth)
            case kind:
                return _scalar(kind, schema, name)

    def _inner(self, schema: JsonObject) -> JsonValue:
        """Return the schema that one refers to or has as its first choice other than null."""
        if isinstance(place := schema.get("$ref"), str):
            return self._referred(place)
        for key in _CHOICES if "properties" not in schema else ():
            if isinstance(choices := schema.get(key), list):
                return next((one for one in choices if one != {"type": "null"}), None)
        return None

    def _referred(self, place: str) -> JsonValue:
        found: JsonValue = self.root
        for step in place.removeprefix("#").split("/")[1:]:
            found = found.get(step) if isinstance(found, dict) else None
        return found if found is not None else True

    def _object(self, schema: JsonObject, depth: int) -> JsonValue:
        properties = schema.get("properties")
        fields = properties if isinstance(properties, dict) else {}
        return {name: self.value(one, name, depth + 1) for name, one in fields.items()}

    def _array(self, schema: JsonObject, name: str, depth: int) -> JsonValue:
        first = schema.get("prefixItems")
        if isinstance(first, list):
            return [self.value(one, name, depth + 1) for one in first]
        low, high = _bound(schema, "minItems", 0), _bound(schema, "maxItems", _MAX_ITEMS)
        count = min(max(_ITEMS, low), high, _MAX_ITEMS)
        return [self.value(schema.get("items"), name, depth + 1) for _ in range(int(count))]


def _given(schema: JsonObject) -> JsonValue:
    """Return a value that the schema names; None if it names none."""
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if isinstance(values := schema.get(key), list) and values:
            return values[0]
    return None


def _type(schema: JsonObject) -> JsonValue:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    return "object" if kind is None and "properties" in schema else kind


def _scalar(kind: JsonValue, schema: JsonObject, name: str) -> JsonValue:
    match kind:
        case "integer" | "number":
            usual = _NUMBER if kind == "integer" else _NUMBER + 0.5
            least = max(usual, _bound(schema, "minimum", usual))
            return min(least, _bound(schema, "maximum", least))
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return f"<{name}>"


def _bound(schema: Mapping[str, JsonValue], key: str, usual: float) -> float:
    bound = schema.get(key)
    return bound if isinstance(bound, int | float) and not isinstance(bound, bool) else usual
