"""Fields of requests that no type here knows: removed before the body is read, and reported.

Clients send fields of the APIs that they were written for, and cannot be told to leave them out. A
field that only says how the answer is delivered, stored or paid for is ignored; the answer says
which ones were, in its ``warnings`` and in the header `IGNORED_HEADER`. A field that would change
what the answer is (a grammar, an image) is refused by name, unless its value asks for nothing.

The types of the bodies say what is known: objects of a type that forbids unknown fields are looked
at, to any depth; what a type leaves open (schemas of tools, metadata) is not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec.inspect as types

from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.field_error import FieldError

IGNORED_HEADER = "x-expertctl-ignored"
MAX_TOLD = 20
"""How many ignored fields an answer names."""
_MAX_NAME = 80
_UNTOLD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NO_FORCING = (
    "no text can be forced yet; ask for it by response_format, which is checked afterwards"
)
_ONLY_TEXT = "only text is read"
_NEVER_IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "grammar",
            "json_schema",
            "regex",
            "ebnf",
        ),
        _NO_FORCING,
    ),
    **dict.fromkeys(
        (
            "image",
            "images",
            "image_url",
            "audio",
            "input_audio",
            "video",
            "videos",
            "video_url",
            "file",
            "files",
            "documents",
            "attachments",
        ),
        _ONLY_TEXT,
    ),
    "mcp_servers": "this server calls no tools itself",
}
"""Field → why it cannot be ignored: without it the answer would be another one."""


@dataclass(slots=True)
class _Found:
    """The paths of unknown fields, each once; places in lists are left out."""

    paths: dict[str, None] = field(default_factory=dict)
    """As an ordered set, with one more than are told."""

    def add(self, path: str, name: str, value: JsonValue) -> None:
        reason = _NEVER_IGNORED.get(name)
        whole = f"{path}.{name}" if path else name
        if reason is not None and value not in (None, False, "", [], {}):
            raise FieldError(f"{whole}: {reason}", field=whole, hint="leave it out")
        if len(self.paths) <= MAX_TOLD:
            self.paths[whole] = None


def without_unknown_fields(body: JsonObject, kind: type) -> tuple[JsonObject, tuple[str, ...]]:
    """Return a body without the fields that a type does not know, and the names of these fields.

    Raises:
        FieldError: for an unknown field that would change what the answer is.
    """
    found = _Found()
    known = _without(body, _type_of(kind), "", found)
    assert isinstance(known, dict)
    return known, tuple(found.paths)


def ignored_warning(ignored: Sequence[str]) -> tuple[str, ...]:
    """Return the warning of an answer; empty if no field was ignored."""
    if not ignored:
        return ()
    return (f"fields that this server does not implement were ignored: {_told(ignored)}",)


def ignored_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Return the headers of an answer; empty if no field was ignored."""
    return {IGNORED_HEADER: _told(ignored)} if ignored else {}


def _told(ignored: Sequence[str]) -> str:
    names = [_UNTOLD.sub("?", name[:_MAX_NAME]) for name in ignored[:MAX_TOLD]]
    return ", ".join([*names, *(["and more"] if len(ignored) > MAX_TOLD else [])])


@lru_cache
def _type_of(kind: type) -> types.Type:
    return types.type_info(kind)


@lru_cache
def _fields_of(kind: type) -> Mapping[str, types.Type]:
    struct = _type_of(kind)
    assert isinstance(struct, types.StructType)
    return {one.encode_name: one.type for one in struct.fields}


def _without(value: JsonValue, kind: types.Type, path: str, found: _Found) -> JsonValue:
    if isinstance(value, dict):
        return _object_without(value, kind, path, found)
    if isinstance(value, list):
        items = next((one.item_type for one in _options(kind) if _is_list(one)), None)
        if items is not None and not isinstance(items, types.AnyType):
            return [_without(item, items, f"{path}[]", found) for item in value]
    return value


def _object_without(value: JsonObject, kind: types.Type, path: str, found: _Found) -> JsonObject:
    chosen = _object_type(value, kind)
    if isinstance(chosen, types.DictType):
        place = f"{path}[]"
        return {k: _without(v, chosen.value_type, place, found) for k, v in value.items()}
    if not isinstance(chosen, types.StructType):
        return value
    fields = _fields_of(chosen.cls)
    kept: JsonObject = {}
    for name, item in value.items():
        if name in fields:
            kept[name] = _without(item, fields[name], f"{path}.{name}" if path else name, found)
        elif name == chosen.tag_field or not chosen.forbid_unknown_fields:
            kept[name] = item
        else:
            found.add(path, name, item)
    return kept


def _object_type(value: JsonObject, kind: types.Type) -> types.Type | None:
    """Return the type that an object has among those that are possible; None if no type fits."""
    for one in _options(kind):
        if isinstance(one, types.DictType):
            return one
        if isinstance(one, types.StructType) and (
            one.tag_field is None or value.get(one.tag_field) == one.tag
        ):
            return one
    return None


def _options(kind: types.Type) -> Iterator[types.Type]:
    if isinstance(kind, types.Metadata):
        yield from _options(kind.type)
    elif isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from _options(one)
    else:
        yield kind


def _is_list(kind: types.Type) -> bool:
    return isinstance(kind, types.ListType)
