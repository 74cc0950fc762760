"""Request bodies as typed values: strict JSON, unknown fields, deadlines and sampling fields.

The size of a body and the pace of its upload are checked earlier, by `expertctl.server.middleware`.

Clients send fields of the APIs they were written for and cannot be told to leave them out. An
unknown field that only affects how the answer is delivered, stored or paid for is removed before
validation and reported in the answer's ``warnings`` and in the header `IGNORED_HEADER`. One that
would change the answer itself (a grammar, an image) is refused by name unless its value is empty.
The types of the bodies define what is known: objects of types that forbid unknown fields are
examined at any depth; what a type leaves open (tool schemas, metadata) is not.

There are no sampling defaults here: `expertctl.routing.request` decides what a client
leaves open, for every API.
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

from expertctl.engine.generation import MAX_STOP_TOKENS
from expertctl.errors import InvalidPackageError, MediaTypeError, UsageError
from expertctl.routing.request import LIMITS
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import convert_document


class FieldError(UsageError):
    """A field of a request is invalid; ``field`` is its path, such as ``messages[0].role``."""

    def __init__(self, message: str, *, field: str, hint: str = "") -> None:
        """Store the message and the field's path, which is empty for the body itself."""
        super().__init__(message, hint=hint)
        self.field = field


IGNORED_HEADER = "x-expertctl-ignored"
MAX_REPORTED = 20
"""Maximum number of ignored fields named in an answer."""
_MAX_NAME = 80
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NO_CONSTRAINTS = (
    "constrained generation is not supported; use response_format, which is checked afterwards"
)
_ONLY_TEXT = "only text input is supported"
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
        "tokens cannot be required or excluded",
    ),
    "chat_template": "the chat template is that of the base or of an expert",
    "mcp_servers": "this server does not run tools itself",
    "output_format": "use output_config.format, which is checked afterwards",
    "prompt_embeds": _ONLY_TEXT,
    "response_format": "this call does not support it; use a chat completion",
}
"""Unknown field → why it cannot be ignored: it would change the answer."""
_NEUTRAL_VALUES: Mapping[str, tuple[JsonValue, ...]] = {
    "diagnostics": (None,),
    "inference_geo": (None,),
    "speed": (None, "standard"),
}
"""Known delivery fields → supported values; any other value is ignored."""


@dataclass(frozen=True, slots=True)
class _StructFields:
    """The fields of one struct type."""

    names: frozenset[str]
    nested: Mapping[str, "_KnownPlace"]
    """The fields that hold objects or lists of known types."""
    is_closed: bool


@dataclass(frozen=True, slots=True)
class _KnownPlace:
    """What one place of a body can hold: an object of one of several types, or a list."""

    path: str
    """Such as ``messages[].content``, without item indices."""
    tag_field: str
    structs: Mapping[str, _StructFields]
    """Tag → type; empty tag for an untagged type."""
    items: "_KnownPlace | None"
    max_items: int


@dataclass(slots=True)
class _UnknownFields:
    """The paths of unknown fields, in order, without duplicates, one more than is reported."""

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
    """Remove the fields of a body that a type does not know; return their paths.

    ``refused`` maps further fields that would change the answer to the reason.

    Raises:
        FieldError: for an unknown field that would change the answer.
    """
    found = _UnknownFields({**_NEVER_IGNORED, **refused})
    place = _find_root_place(kind)
    assert place is not None
    _remove(body, place, found)
    return tuple(found.paths)


def format_ignored_warning(ignored: Sequence[str]) -> tuple[str, ...]:
    """Return the warning about ignored fields; empty if there are none."""
    if not ignored:
        return ()
    return (f"fields that this server does not implement were ignored: {_format_names(ignored)}",)


def build_ignored_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Return the response header of ignored fields; empty if there are none."""
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
        for item in value:  # a longer list fails validation anyway
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
    """Return what a place can hold; None if nothing there has known fields."""
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
"""Longer bodies are parsed in a thread, one at a time, to keep the event loop free."""
_Kind = TypeVar("_Kind")
_Result = TypeVar("_Result")
_LIMITERS: WeakKeyDictionary[object, CapacityLimiter] = WeakKeyDictionary()
_FLOAT = "got `float`"
_SCHEMA_HINT = "GET /openapi.json describes every field"
_ERROR_PATH = re.compile(r" - at `(?:key in )?\$?(.*)`$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[_Kind]):
    """A parsed body, and the paths of its ignored fields."""

    value: _Kind
    ignored_fields: tuple[str, ...] = ()


async def read_body(request: Request, kind: type[_Kind]) -> _Kind:
    """Read and parse the body of a request as a value of ``kind``.

    Raises:
        MediaTypeError: when its media type is not JSON.
        UsageError: when it is incomplete or not a strict JSON object.
        FieldError: when it does not match the type; names the field.
    """
    return await _read_and_parse(request, lambda data: parse_body(data, kind))


async def read_lenient_body(
    request: Request,
    kind: type[_Kind],
    *,
    strict: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> ParsedBody[_Kind]:
    """Read a body like `read_body`, but ignore unknown fields unless ``strict``.

    ``refused`` maps further unknown fields that are refused instead to the reason.

    Raises like `read_body`, and `FieldError` for an unknown field that cannot be ignored.
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
        raise UsageError("the request body is incomplete") from error
    if len(data) <= LARGE_BODY_BYTES:
        return parse(data)
    return await run_in_turn(partial(parse, data))


async def run_in_turn(work: Callable[[], _Result]) -> _Result:
    """Run blocking work in a thread, one call at a time."""
    return await to_thread.run_sync(work, limiter=_large_body_limiter())


def parse_body(data: bytes, kind: type[_Kind]) -> _Kind:
    """Parse a JSON object as a value of ``kind``; raises like `read_body`."""
    return _convert(_load_object(data), kind)


def parse_lenient_body(
    data: bytes, kind: type[_Kind], *, refused: Mapping[str, str] = MappingProxyType({})
) -> ParsedBody[_Kind]:
    """Parse a JSON object without its unknown fields; raises like `read_lenient_body`."""
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
    """Convert again with whole floats as integers: in JSON Schema ``5.0`` is an integer."""
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
    """Return the limiter of this event loop: one large body at a time."""
    loop = asyncio.get_running_loop()
    return _LIMITERS.setdefault(loop, CapacityLimiter(1))


MAX_TIMEOUT_MS = 86_400_000
"""A day."""
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]


def compute_deadline(timeout_ms: int | None, *, default: float | None) -> float | None:
    """Return a deadline in `time.monotonic` seconds; ``default`` seconds from now if not given."""
    seconds = default if timeout_ms is None else timeout_ms / 1e3
    return None if seconds is None else time.monotonic() + seconds


_MIN_TOP_P = 1e-9
"""Replaces a ``top_p`` of 0: only the most likely token, which is always kept, remains."""
_MAX_TOKENS = int(LIMITS["max_tokens"][1])
TopK = Annotated[int, Meta(ge=-1, le=int(LIMITS["top_k"][1]))]
MinTokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
StopTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_STOP_TOKENS)
]


def field_limits(name: str) -> Meta:
    """Return the limits of a sampling field as a type constraint."""
    low, high = LIMITS[name]
    return Meta(ge=low, le=high)


def normalise_top_k(given: int | None) -> int | None:
    """Return the effective ``top_k``; -1 disables it, as 0 does."""
    return 0 if given == -1 else given


def normalise_top_p(given: float | None) -> float | None:
    """Return the effective ``top_p``; see `_MIN_TOP_P`."""
    return _MIN_TOP_P if given == 0 else given
