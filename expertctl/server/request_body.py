"""Request bodies of the generation server: unknown fields, deadlines and sampling fields.

Clients send fields of the APIs they were written for and cannot be told to leave them out. An
unknown field that only affects how the answer is delivered, stored or paid for is removed before
validation and reported in the answer's ``warnings`` and in the header `IGNORED_HEADER`. One that
would change the answer itself (a grammar, an image) is refused by name unless its value is empty.
The types of the bodies define what is known: objects of types that forbid unknown fields are
examined at any depth; what a type leaves open (tool schemas, metadata) is not.

There are no sampling defaults here: `expertctl.routing.request` decides what a client
leaves open, for every API.

The schemas of some documents are files in ``schemas``: the answers of `run --json`, `/v1/infer` and
`/v1/route`, the plan that each contains, as do answers of the other APIs, and the counters of
routed experts.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec.inspect as types
from msgspec import Meta
from starlette.requests import Request

from expertctl.engine.generation import MAX_STOP_TOKENS
from expertctl.http.openapi import make_reference, refer_to_schema
from expertctl.http.operation import (
    FieldError,
    Operation,
    OperationRouter,
    ParsedBody,
    convert_body,
    load_body,
    read_and_parse,
    read_body,
)
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.schema.validation import find_schema
from expertctl.user_request import LIMITS

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
EXAMPLE_PROMPT = "Sort these numbers: 41, 17, 23"
EXAMPLE_MESSAGE: JsonObject = {"role": "user", "content": EXAMPLE_PROMPT}
"""For the examples of the OpenAPI document."""


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
            raise FieldError.at(whole, f"{reason}", hint="leave it out")
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
    neutral = _NEUTRAL_VALUES.get(name)
    return name not in struct.names or (neutral is not None and value not in neutral)


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


_Kind = TypeVar("_Kind")


def build_router(endpoints: object, *, strict: bool) -> OperationRouter:
    """Return the router of operations whose handlers are methods of ``endpoints``."""
    return OperationRouter(
        make_context=lambda _: endpoints, read_body=partial(read_operation_body, strict=strict)
    )


async def read_operation_body(request: Request, operation: Operation, *, strict: bool) -> object:
    """Read and parse the body of a request as an operation declares it.

    A `ParsedBody` ignores unknown fields unless ``strict``. Those in ``refused_fields`` of its
    type, a mapping to the reason, are refused like other fields that would change the answer.

    Raises like `expertctl.http.operation.read_body`, and `FieldError` for an unknown field that
    cannot be ignored.
    """
    kind = operation.body_type
    assert kind is not None
    if not operation.allows_unknown_fields:
        return await read_body(request, kind)
    if strict:
        return ParsedBody(await read_body(request, kind))
    refused = getattr(kind, "refused_fields", {})
    return await read_and_parse(request, partial(parse_lenient_body, kind=kind, refused=refused))


def parse_lenient_body(
    data: bytes, kind: type[_Kind], *, refused: Mapping[str, str] = MappingProxyType({})
) -> ParsedBody[_Kind]:
    """Parse a JSON object without its unknown fields; raises like `read_operation_body`."""
    fields = load_body(data)
    ignored = remove_unknown_fields(fields, kind, refused=refused)
    return ParsedBody(convert_body(fields, kind), ignored)


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


PlanDocument = Annotated[dict[str, Any], refer_to_schema("Plan")]
"""A plan in the form of `Plan.to_json`."""
InferAnswer = Annotated[dict[str, Any], refer_to_schema("InferAnswer")]
RouteAnswer = Annotated[dict[str, Any], refer_to_schema("RouteAnswer")]
MoeActivity = Annotated[dict[str, Any], refer_to_schema("MoeActivity")]


def load_file_schemas() -> Mapping[str, JsonObject]:
    """Return the schemas from files by their names in the OpenAPI document."""
    infer, route = _load_schema("infer"), _load_schema("route")
    properties = infer["properties"]
    assert isinstance(properties, dict)
    plan = properties["plan"]
    assert isinstance(plan, dict)
    return {
        "InferAnswer": _describe_schema(
            infer, "An answer, with everything known about how it was generated."
        ),
        "RouteAnswer": _describe_schema(route, "The plan for a prompt, and why."),
        "Plan": _describe_schema(
            plan, "Which experts answer, their weights, and the sampling parameters."
        ),
        **_load_activity_schemas(),
    }


def _load_activity_schemas() -> Mapping[str, JsonObject]:
    """Return the schema of the activity document, with the schema of its layers separate."""
    schema = _load_schema("moe-activity")
    defs = schema.pop("$defs")
    assert isinstance(defs, dict)
    parts = {f"#/$defs/{name}": part for name, part in defs.items()}
    layer = _inline_references(parts["#/$defs/layer"], parts)
    parts["#/$defs/layer"] = make_reference("MoeLayer")
    activity = _inline_references(schema, parts)
    assert isinstance(layer, dict)
    assert isinstance(activity, dict)
    return {
        "MoeActivity": _describe_schema(
            activity,
            "The routed-expert counters; with nothing counted, only `enabled`, `mode`, "
            "`schema` and `layers`.",
        ),
        "MoeLayer": _describe_schema(
            layer, "One layer. Hot experts were in memory; `cold` lanes wait for the others."
        ),
    }


def _inline_references(node: JsonValue, parts: Mapping[str, JsonValue]) -> JsonValue:
    """Replace references in a schema by the parts they name, recursively."""
    match node:
        case {"$ref": str(name)} if name in parts:
            return _inline_references(parts[name], parts)
        case dict():
            return {key: _inline_references(value, parts) for key, value in node.items()}
        case list():
            return [_inline_references(value, parts) for value in node]
        case _:
            return node


def _describe_schema(schema: JsonObject, words: str) -> JsonObject:
    """Add a description to a schema; replace a plan in it by the shared schema of plans."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    shared: dict[str, JsonValue] = {"plan": make_reference("Plan")} if "plan" in properties else {}
    rest = {name: value for name, value in schema.items() if name not in {"$schema", "$id"}}
    return {**rest, "description": words, "properties": {**properties, **shared}}


def _load_schema(name: str) -> JsonObject:
    schema: JsonObject = json.loads(find_schema(name).read_text(encoding="utf-8"))
    return schema
