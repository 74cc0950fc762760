"""The error for a body with an invalid field.

Fields of requests that no type here knows: removed before the body is read, and reported.

Clients send fields of the APIs that they were written for, and cannot be told to leave them out. A
field that only says how the answer is delivered, stored or paid for is ignored; the answer says
which ones were, in its ``warnings`` and in the header `IGNORED_HEADER`. A field that would change
what the answer is (a grammar, an image) is refused by name, unless its value asks for nothing.

The types of the bodies say what is known: objects of a type that forbids unknown fields are looked
at, to any depth; what a type leaves open (schemas of tools, metadata) is not.

The body of a request as a value: JSON read strictly, every field checked.

The size of the body and its pace are checked earlier: see `expertctl.server.middleware`.

The deadline of an answer: from the request, else the default of this server.

The limits of the fields that say how tokens are drawn.

There are no defaults here: what a client leaves open is decided by `expertctl.routing.sampling_presets`,
whichever API the request came by.
"""

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Annotated, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import msgspec.inspect as types
from anyio import CapacityLimiter, to_thread
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from expertctl.engine.generation import MAX_STOP_TOKENS, StopRules
from expertctl.errors import InvalidPackageError, MediaTypeError, UsageError
from expertctl.routing.sampling_presets import LIMITS
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import convert_document


class FieldError(UsageError):
    """A field of a request is wrong; ``field`` is its path, such as ``messages[0].role``."""

    def __init__(self, message: str, *, field: str, hint: str = "") -> None:
        """Keep the message and the path; an empty one is the body itself."""
        super().__init__(message, hint=hint)
        self.field = field


IGNORED_HEADER = "x-expertctl-ignored"
MAX_REPORTED = 20
"""How many ignored fields an answer names."""
_MAX_NAME = 80
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NO_CONSTRAINTS = (
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
        _NO_CONSTRAINTS,
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
_NEUTRAL_VALUES: Mapping[str, tuple[JsonValue, ...]] = {
    "diagnostics": (None,),
    "inference_geo": (None,),
    "speed": (None, "standard"),
}
"""Known fields that only say how and where an answer is made; any other value is ignored."""


@dataclass(frozen=True, slots=True)
class _StructFields:
    """The fields of one type of objects."""

    names: frozenset[str]
    nested: Mapping[str, "_KnownPlace"]
    """The fields in which there are objects or lists of known types."""
    is_closed: bool


@dataclass(frozen=True, slots=True)
class _KnownPlace:
    """What can stand at one place of a body: an object of one of some types, or a list."""

    path: str
    """Such as ``messages[].content``; numbers of items are left out."""
    tag_field: str
    structs: Mapping[str, _StructFields]
    """Tag → type; the tag of a type without one is empty."""
    items: "_KnownPlace | None"
    max_items: int


@dataclass(slots=True)
class _UnknownFields:
    """The paths of unknown fields, each once and in order, one more than are told."""

    never_ignored: Mapping[str, str]
    paths: dict[str, None] = field(default_factory=dict)

    def add(self, path: str, name: str, value: JsonValue) -> None:
        reason = self.never_ignored.get(name)
        whole = f"{path}.{name}" if path else name
        if reason is not None and value not in (None, False, "", [], {}):
            raise FieldError(f"{whole}: {reason}", field=whole, hint="leave it out")
        if len(self.paths) <= MAX_REPORTED:
            self.paths[whole] = None


def remove_unknown_fields(
    body: JsonObject, kind: type, *, refused: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Remove from a body the fields that a type does not know; return their names.

    ``refused`` are further fields that would change what the answer is, and why.

    Raises:
        FieldError: for an unknown field that would change what the answer is.
    """
    found = _UnknownFields({**_NEVER_IGNORED, **refused})
    place = _find_root_place(kind)
    assert place is not None
    _remove(body, place, found)
    return tuple(found.paths)


def format_ignored_warning(ignored: Sequence[str]) -> tuple[str, ...]:
    """Return the warning of an answer; empty if no field was ignored."""
    if not ignored:
        return ()
    return (f"fields that this server does not implement were ignored: {_format_names(ignored)}",)


def build_ignored_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Return the headers of an answer; empty if no field was ignored."""
    return {IGNORED_HEADER: _format_names(ignored)} if ignored else {}


def _format_names(ignored: Sequence[str]) -> str:
    names = [_UNPRINTABLE.sub("?", name[:_MAX_NAME]) for name in ignored[:MAX_REPORTED]]
    return ", ".join([*names, *(["and more"] if len(ignored) > MAX_REPORTED else [])])


def _remove(value: JsonValue, place: _KnownPlace, found: _UnknownFields) -> None:
    if isinstance(value, dict):
        tag = value.get(place.tag_field, "")
        struct = place.structs.get(tag) if isinstance(tag, str) else None
        if struct is not None:
            _remove_from_struct(value, struct, place, found)
    elif isinstance(value, list) and place.items is not None and len(value) <= place.max_items:
        for item in value:  # a longer list is refused as a whole
            _remove(item, place.items, found)


def _remove_from_struct(
    value: JsonObject, struct: _StructFields, place: _KnownPlace, found: _UnknownFields
) -> None:
    if struct.is_closed:
        for name in [name for name in value if _is_ignored(name, value[name], struct)]:
            found.add(place.path, name, value.pop(name))
    for name, nested in struct.nested.items():
        if name in value:
            _remove(value[name], nested, found)


def _is_ignored(name: str, value: JsonValue, struct: _StructFields) -> bool:
    usual = _NEUTRAL_VALUES.get(name)
    return name not in struct.names or (usual is not None and value not in usual)


@lru_cache
def _find_root_place(kind: type) -> _KnownPlace | None:
    return _build_place(types.type_info(kind), "")


def _build_place(kind: types.Type, path: str) -> _KnownPlace | None:
    """Return what can stand at a place; None if nothing there has fields that are known."""
    options = list(_iter_options(kind))
    structs = [one for one in options if isinstance(one, types.StructType)]
    lists = [one for one in options if isinstance(one, types.ListType)]
    items = _build_place(lists[0].item_type, f"{path}[]") if lists else None
    most = lists[0].max_length if lists else None
    if not structs and items is None:
        return None
    return _KnownPlace(
        path=path,
        tag_field=next((one.tag_field for one in structs if one.tag_field), ""),
        structs={str(one.tag or ""): _build_struct(one, path) for one in structs},
        items=items,
        max_items=sys.maxsize if most is None else most,
    )


def _build_struct(kind: types.StructType, path: str) -> _StructFields:
    names = {one.encode_name for one in kind.fields}
    below = f"{path}." if path else ""
    places = {f.encode_name: _build_place(f.type, f"{below}{f.encode_name}") for f in kind.fields}
    return _StructFields(
        names=frozenset(names | ({kind.tag_field} if kind.tag_field else set())),
        nested={name: place for name, place in places.items() if place is not None},
        is_closed=kind.forbid_unknown_fields,
    )


def _iter_options(kind: types.Type) -> Iterator[types.Type]:
    if isinstance(kind, types.Metadata):
        yield from _iter_options(kind.type)
    elif isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from _iter_options(one)
    else:
        yield kind


JSON_MEDIA_TYPE = "application/json"
LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in a thread, one at a time, so as not to block the event loop."""
_Kind = TypeVar("_Kind")
_Result = TypeVar("_Result")
_LIMITERS: WeakKeyDictionary[object, CapacityLimiter] = WeakKeyDictionary()
_FLOAT = "got `float`"
_SCHEMA_HINT = "GET /openapi.json says what each field may be"
_ERROR_PATH = re.compile(r" - at `(?:key in )?\$?(.*)`$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[_Kind]):
    """A body that was read, and the names of its fields that were ignored."""

    value: _Kind
    ignored_fields: tuple[str, ...] = ()


async def read_body(request: Request, kind: type[_Kind]) -> _Kind:
    """Return the body of a request as a value of a kind.

    Raises:
        MediaTypeError: when its media type is not JSON.
        UsageError: when it is not a strict JSON object, or is incomplete.
        FieldError: when it does not have the shape; it names the field.
    """
    return await _read_and_parse(request, lambda data: parse_body(data, kind))


async def read_lenient_body(
    request: Request,
    kind: type[_Kind],
    *,
    strict: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> ParsedBody[_Kind]:
    """Return the body of a request whose unknown fields are ignored, unless it is ``strict``.

    ``refused`` are unknown fields that are not ignored, and why, besides those of every call.

    Raises as `read_body` does, and `FieldError` for an unknown field that cannot be ignored.
    """
    if strict:
        return ParsedBody(await read_body(request, kind))
    return await _read_and_parse(
        request, lambda data: parse_lenient_body(data, kind, refused=refused)
    )


async def _read_and_parse(request: Request, parse: Callable[[bytes], _Result]) -> _Result:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON_MEDIA_TYPE:
        raise MediaTypeError(
            f"the body must be {JSON_MEDIA_TYPE}", hint=f"send `Content-Type: {JSON_MEDIA_TYPE}`"
        )
    try:
        data = await request.body()
    except ClientDisconnect as error:
        raise UsageError("the body of the request did not come whole") from error
    if len(data) <= LARGE_BODY_BYTES:
        return parse(data)
    return await run_in_turn(partial(parse, data))


async def run_in_turn(work: Callable[[], _Result]) -> _Result:
    """Do work that would block the event loop in a thread, one call at a time."""
    return await to_thread.run_sync(work, limiter=_large_body_limiter())


def parse_body(data: bytes, kind: type[_Kind]) -> _Kind:
    """Read a JSON object as a value of a kind; raises as `read_body` does."""
    return _convert(_load_object(data), kind)


def parse_lenient_body(
    data: bytes, kind: type[_Kind], *, refused: Mapping[str, str] = MappingProxyType({})
) -> ParsedBody[_Kind]:
    """Read a JSON object without its unknown fields; raises as `read_lenient_body` does."""
    fields = _load_object(data)
    ignored = remove_unknown_fields(fields, kind, refused=refused)
    return ParsedBody(_convert(fields, kind), ignored)


def _load_object(data: bytes) -> JsonObject:
    try:
        return load_object(data, what="the body", max_bytes=len(data))
    except InvalidPackageError as error:
        raise UsageError(error.message, hint=f"send one JSON object; {_SCHEMA_HINT}") from error


def _convert(fields: JsonObject, kind: type[_Kind]) -> _Kind:
    try:
        return convert_document(fields, kind)
    except msgspec.ValidationError as error:
        if _FLOAT not in str(error):
            raise _to_field_error(error) from error
        return _convert_whole_floats(fields, kind, error)


def _convert_whole_floats(
    fields: JsonValue, kind: type[_Kind], first: msgspec.ValidationError
) -> _Kind:
    """Read again with whole floats as integers: in JSON Schema ``5.0`` is an integer."""
    try:
        return convert_document(_whole_floats_to_integers(fields), kind)
    except msgspec.ValidationError:
        raise _to_field_error(first) from first


def _to_field_error(error: msgspec.ValidationError) -> FieldError:
    place = _ERROR_PATH.search(str(error))
    fact = str(error)[: place.start()] if place else str(error)
    field = place[1].removeprefix(".") if place else ""
    where = f"`{field}` of the body" if field else "the body"
    return FieldError(f"{where}: {fact}", field=field, hint=_SCHEMA_HINT)


def _whole_floats_to_integers(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole_floats_to_integers(item) for item in value]
        case dict():
            return {key: _whole_floats_to_integers(item) for key, item in value.items()}
        case _:
            return value


def _large_body_limiter() -> CapacityLimiter:
    """Return the limiter that lets one large body of this event loop be read at a time."""
    loop = asyncio.get_running_loop()
    return _LIMITERS.setdefault(loop, CapacityLimiter(1))


MAX_TIMEOUT_MS = 86_400_000
"""A day."""
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]


def compute_deadline(timeout_ms: int | None, *, default: float | None) -> float | None:
    """Return a time of `time.monotonic`; ``usual`` seconds from now if none is given."""
    seconds = default if timeout_ms is None else timeout_ms / 1e3
    return None if seconds is None else time.monotonic() + seconds


_MIN_TOP_P = 1e-9
"""Stands for a ``top_p`` of 0: the likeliest token is always kept, here it alone."""
_MAX_TOKENS = int(LIMITS["max_tokens"][1])
TopK = Annotated[int, Meta(ge=-1, le=int(LIMITS["top_k"][1]))]
MinTokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
StopTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_STOP_TOKENS)
]


def field_limits(name: str) -> Meta:
    """Return the limits of a field."""
    low, high = LIMITS[name]
    return Meta(ge=low, le=high)


def normalise_top_k(given: int | None) -> int | None:
    """Return the effective ``top_k``; -1 switches it off, as 0 does."""
    return 0 if given == -1 else given


def make_stop_rules(
    *,
    min_tokens: int | None,
    ignore_eos: bool | None,
    stop_token_ids: Sequence[int] | None,
    max_tokens: int | None,
) -> StopRules:
    """Return when an answer may end.

    Raises:
        FieldError: when it may not end before it has to.
    """
    least = min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise FieldError(
            f"min_tokens {least} is more than max_tokens {max_tokens}", field="min_tokens"
        )
    return StopRules(least, bool(ignore_eos), frozenset(stop_token_ids or ()))


def normalise_top_p(given: float | None) -> float | None:
    """Return the effective ``top_p`` for the value that a client gives."""
    return _MIN_TOP_P if given == 0 else given
