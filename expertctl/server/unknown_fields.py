"""Fields of requests that no type here knows: removed before the body is read, and reported.

Clients send fields of the APIs that they were written for, and cannot be told to leave them out. A
field that only says how the answer is delivered, stored or paid for is ignored; the answer says
which ones were, in its ``warnings`` and in the header `IGNORED_HEADER`. A field that would change
what the answer is (a grammar, an image) is refused by name, unless its value asks for nothing.

The types of the bodies say what is known: objects of a type that forbids unknown fields are looked
at, to any depth; what a type leaves open (schemas of tools, metadata) is not.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

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
    **dict.fromkeys(
        ("allowed_token_ids", "bad_words", "logits_processors"),
        "tokens can be neither demanded nor excluded yet",
    ),
    "chat_template": "conversations are read by the template of the base or of an expert",
    "mcp_servers": "this server calls no tools itself",
    "output_format": "give it as output_config.format, which is checked afterwards",
    "prompt_embeds": _ONLY_TEXT,
    "response_format": "this call does not take it; ask for a chat completion",
}
"""Field → why it cannot be ignored: without it the answer would be another one."""
_USUAL_VALUES: Mapping[str, tuple[JsonValue, ...]] = {
    "diagnostics": (None,),
    "inference_geo": (None,),
    "speed": (None, "standard"),
}
"""Known fields that only say how and where an answer is made; any other value is ignored."""


@dataclass(frozen=True, slots=True)
class _Struct:
    """The fields of one type of objects."""

    names: frozenset[str]
    nested: Mapping[str, "_Place"]
    """The fields in which there are objects or lists of known types."""
    is_closed: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """What can stand at one place of a body: an object of one of some types, or a list."""

    path: str
    """Such as ``messages[].content``; numbers of items are left out."""
    tag_field: str
    structs: Mapping[str, _Struct]
    """Tag → type; the tag of a type without one is empty."""
    items: "_Place | None"
    max_items: int


@dataclass(slots=True)
class _Found:
    """The paths of unknown fields, each once and in order, one more than are told."""

    never_ignored: Mapping[str, str]
    paths: dict[str, None] = field(default_factory=dict)

    def add(self, path: str, name: str, value: JsonValue) -> None:
        reason = self.never_ignored.get(name)
        whole = f"{path}.{name}" if path else name
        if reason is not None and value not in (None, False, "", [], {}):
            raise FieldError(f"{whole}: {reason}", field=whole, hint="leave it out")
        if len(self.paths) <= MAX_TOLD:
            self.paths[whole] = None


def remove_unknown_fields(
    body: JsonObject, kind: type, *, refused: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Remove from a body the fields that a type does not know; return their names.

    ``refused`` are further fields that would change what the answer is, and why.

    Raises:
        FieldError: for an unknown field that would change what the answer is.
    """
    found = _Found({**_NEVER_IGNORED, **refused})
    place = _place_of(kind)
    assert place is not None
    _remove(body, place, found)
    return tuple(found.paths)


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


def _remove(value: JsonValue, place: _Place, found: _Found) -> None:
    if isinstance(value, dict):
        tag = value.get(place.tag_field, "")
        struct = place.structs.get(tag) if isinstance(tag, str) else None
        if struct is not None:
            _remove_of(value, struct, place, found)
    elif isinstance(value, list) and place.items is not None and len(value) <= place.max_items:
        for item in value:  # a longer list is refused as a whole
            _remove(item, place.items, found)


def _remove_of(value: JsonObject, struct: _Struct, place: _Place, found: _Found) -> None:
    if struct.is_closed:
        for name in [name for name in value if _is_ignored(name, value[name], struct)]:
            found.add(place.path, name, value.pop(name))
    for name, nested in struct.nested.items():
        if name in value:
            _remove(value[name], nested, found)


def _is_ignored(name: str, value: JsonValue, struct: _Struct) -> bool:
    usual = _USUAL_VALUES.get(name)
    return name not in struct.names or (usual is not None and value not in usual)


@lru_cache
def _place_of(kind: type) -> _Place | None:
    return _place(types.type_info(kind), "")


def _place(kind: types.Type, path: str) -> _Place | None:
    """Return what can stand at a place; None if nothing there has fields that are known."""
    options = list(_options(kind))
    structs = [one for one in options if isinstance(one, types.StructType)]
    lists = [one for one in options if isinstance(one, types.ListType)]
    items = _place(lists[0].item_type, f"{path}[]") if lists else None
    most = lists[0].max_length if lists else None
    if not structs and items is None:
        return None
    return _Place(
        path=path,
        tag_field=next((one.tag_field for one in structs if one.tag_field), ""),
        structs={str(one.tag or ""): _struct(one, path) for one in structs},
        items=items,
        max_items=sys.maxsize if most is None else most,
    )


def _struct(kind: types.StructType, path: str) -> _Struct:
    names = {one.encode_name for one in kind.fields}
    below = f"{path}." if path else ""
    places = {f.encode_name: _place(f.type, f"{below}{f.encode_name}") for f in kind.fields}
    return _Struct(
        names=frozenset(names | ({kind.tag_field} if kind.tag_field else set())),
        nested={name: place for name, place in places.items() if place is not None},
        is_closed=kind.forbid_unknown_fields,
    )


def _options(kind: types.Type) -> Iterator[types.Type]:
    if isinstance(kind, types.Metadata):
        yield from _options(kind.type)
    elif isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from _options(one)
    else:
        yield kind
