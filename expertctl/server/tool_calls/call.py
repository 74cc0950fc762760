"""`Call`: a tool that a model wants to use, and the arguments.

A call names a tool that was offered, and its arguments are a JSON object, read as strictly as any
other JSON from outside. Anything else is not a call, and stays text.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue, loads

MAX_CALL_CHARACTERS = 1 << 18
"""Most characters of one call, or of several that are written as one list."""
MAX_CALLS = 128
"""Most calls in one list."""
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "id", "type"}
KEYS = frozenset({*_ARGUMENTS, *_BESIDE})
"""The keys that the object of a call has."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as the model wrote it."""

    name: str
    arguments: JsonObject

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text."""
        return json.dumps(self.arguments, ensure_ascii=False)


def call_id(prefix: str, *, job_id: str, number: int) -> str:
    """Return the id of a call of a job: stable, and as hard to guess as the id of the job."""
    digest = hashlib.sha256(f"{job_id}/{number}".encode())
    return f"{prefix}{digest.hexdigest()[:24]}"


def calls_in(text: str, *, tools: Collection[str]) -> tuple[Call, ...] | None:
    """Return the calls in a JSON text, one or a list; None if it holds anything else."""
    document = _document(text)
    found = document if isinstance(document, list) else [document]
    if not 0 < len(found) <= MAX_CALLS:
        return None
    calls = [_call(one, tools) for one in found]
    sure = tuple(call for call in calls if call is not None)
    return sure if len(sure) == len(calls) else None


def call_of(name: str, text: str) -> tuple[Call, ...] | None:
    """Return the call of a tool with this JSON text as arguments; None if it is no object."""
    arguments = _document(text)
    return (Call(name, arguments),) if isinstance(arguments, dict) else None


def _document(text: str) -> JsonValue:
    try:
        data = text.encode("utf-8")
        return loads(data, what="a call", max_bytes=4 * MAX_CALL_CHARACTERS)
    except (InvalidPackageError, UnicodeEncodeError):
        return None


def _call(value: JsonValue, tools: Collection[str]) -> Call | None:
    """Read one call; None for anything else, or for unknown fields, which would be lost."""
    if not isinstance(value, dict):
        return None
    name, given = value.get("name"), [key for key in _ARGUMENTS if key in value]
    if not isinstance(name, str) or name not in tools or len(given) != 1:
        return None
    arguments = value[given[0]]
    if not isinstance(arguments, dict) or not value.keys() <= {*_BESIDE, *given}:
        return None
    return Call(name, arguments)
