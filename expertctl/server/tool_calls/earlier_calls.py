"""The calls of earlier turns, as the chat template of a base takes them.

Some templates refuse ids that do not have the length that their models write. Clients send ids of
the API that they speak, so these are replaced by short ones, the same for a call and its answer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from expertctl.engine.message import Message
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.tool_calls.call_format import CallFormat


def with_known_ids(messages: Sequence[Message], form: CallFormat) -> tuple[Message, ...]:
    """Return a conversation with call ids as the templates of a family demand them."""
    length = form.id_length
    if length is None:
        return tuple(messages)
    return tuple(replace(one, fields=_fields(one.fields, length)) for one in messages)


def _fields(fields: Mapping[str, JsonValue], length: int) -> JsonObject:
    known = dict(fields)
    answered, calls = known.get("tool_call_id"), known.get("tool_calls")
    if isinstance(answered, str):
        known["tool_call_id"] = _id(answered, length)
    if isinstance(calls, list):
        known["tool_calls"] = [_call(call, length) for call in calls]
    return known


def _call(call: JsonValue, length: int) -> JsonValue:
    name = call.get("id") if isinstance(call, dict) else None
    return {**call, "id": _id(name, length)} if isinstance(name, str) else call  # type: ignore[dict-item]  # an object


def _id(name: str, length: int) -> str:
    if len(name) == length and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:length]
