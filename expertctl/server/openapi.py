"""``/openapi.json``: the OpenAPI 3.1 document, built from the types that validate requests.

The schemas of the answers of `run --json`, `/v1/infer` and `/v1/route` are files in ``schemas``
instead; each contains a plan, as do answers of the other APIs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from expertctl import __version__
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.schema.validation import find_schema
from expertctl.server.request_body import JSON_MEDIA_TYPE
from expertctl.server.responses import AnthropicError, OpenAIError, OwnError, list_error_types

REFERENCE_FORMAT = "#/components/schemas/{name}"


def make_reference(name: str) -> JsonObject:
    """Return a reference to another schema of the document."""
    return {"$ref": REFERENCE_FORMAT.format(name=name)}


PlanDocument = Annotated[dict[str, Any], Meta(extra_json_schema=make_reference("Plan"))]
"""A plan in the form of `Plan.to_json`."""


class PromptTokensRead(Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, and how many of them were reused from an earlier one."""

    prompt: int
    reused: int


class StartedEvent(Struct, frozen=True, kw_only=True):
    """``started``: the plan is made and prefill begins."""

    job_id: str
    submitted_at: str
    plan: PlanDocument
    tokens: PromptTokensRead


class PieceEvent(Struct, frozen=True, kw_only=True):
    """``piece``: the next part of the text."""

    text: str


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


EVENT_STREAM = "text/event-stream"
Method = Literal["GET", "POST", "DELETE"]
StructType = type[Struct]
Schemas = Mapping[StructType, JsonObject]

COMMON_STATUSES = (400, 401, 403, 408, 413, 414, 415, 421, 429, 431, 500, 503)
"""Statuses that any request may get."""
_MEANINGS = {
    200: "Done.",
    202: "Accepted; not finished yet.",
    204: "Done; no content.",
    400: "The request is invalid.",
    401: "An API key is required: it is missing, wrong, expired or revoked.",
    403: "The request comes from a page of another site, the key lacks the right, or an expert is "
    "not signed by a trusted key.",
    404: "Not found, or not visible to the caller.",
    405: "The method is not allowed; `Allow` lists those that are.",
    408: "The body arrived too slowly, or the deadline passed before any answer.",
    413: "The body is too large.",
    414: "The path is too long.",
    415: "The media type of the body is not supported.",
    421: "The `Host` header names another server.",
    422: "Experts do not fit the base or each other, or the answer does not fit into memory.",
    429: "Too many requests or tokens, or a full queue; `Retry-After` says when to retry.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The base is being loaded, or the server is shutting down.",
}
_DESCRIPTION = (
    "Generation with experts, through OpenAI's chat completions and completions, Anthropic's "
    "messages, and a native API."
)
_SECURITY_SCHEMES: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, `xpk_…`."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


_SECURITY: list[JsonValue] = [{"bearer": []}, {"key": []}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method and a path, with the types of its body and answers.

    ``answer`` is a type, or a JSON Schema if no type fits. ``events`` are the types of the data of
    events, sent instead with ``stream`` in the body. ``errors`` are statuses beyond
    `COMMON_STATUSES`.
    """

    method: Method
    path: str
    name: str
    summary: str
    tag: str
    body: StructType | None = None
    lenient: bool = False
    """Whether unknown fields of the body are ignored unless the server is strict."""
    parameters: tuple[JsonObject, ...] = ()
    """Parameters other than those in the path."""
    answer: StructType | JsonObject | None = None
    other_answers: tuple[StructType, ...] = ()
    """Further types of a successful answer."""
    media_type: str = JSON_MEDIA_TYPE
    status: int = 200
    events: tuple[StructType | JsonObject, ...] = ()
    referenced_types: tuple[StructType, ...] = ()
    """Types that other types refer to only by name."""
    errors: tuple[int, ...] = ()
    same_form_statuses: tuple[int, ...] = ()
    """Error statuses whose body has the type of the successful answer."""
    is_public: bool = False
    """Whether it works without a key."""


def build_openapi(
    operations: Sequence[Operation], *, url: str, keyed: bool, strict: bool = False
) -> JsonObject:
    """Build the OpenAPI document of the server at ``url``.

    ``keyed``: keys are required; ``strict``: unknown fields are refused everywhere.
    """
    kinds = list(dict.fromkeys(_iter_types(operations)))
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE_FORMAT)
    schemas: Schemas = dict(zip(kinds, references, strict=True))
    bodies = [schemas[one.body] for one in operations if one.lenient and one.body is not None]
    components = components if strict else _allow_unknown_properties(components, bodies)
    paths: dict[str, JsonValue] = {}
    for operation in operations:
        of_path = paths.setdefault(operation.path, {})
        assert isinstance(of_path, dict)
        of_path[operation.method.lower()] = _describe_operation(operation, schemas, keyed=keyed)
    return {
        "openapi": "3.1.0",
        "info": {"title": "expertctl serve", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": url}],
        "paths": paths,
        "components": {
            "schemas": {**components, **load_file_schemas()},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def list_statuses(operation: Operation) -> list[int]:
    """Return every status that an operation can return."""
    return sorted({operation.status, *COMMON_STATUSES, *operation.errors})


def _allow_unknown_properties(
    components: Mapping[str, JsonObject], bodies: Iterable[JsonObject]
) -> dict[str, JsonObject]:
    """Allow further properties in all schemas that are part of the given bodies."""
    waiting, open_names = list[JsonValue](bodies), set[str]()
    while waiting:
        for name in _find_references(waiting.pop()) - open_names:
            open_names.add(name)
            waiting.append(components[name])
    return {
        name: _reopen_schema(schema) if name in open_names else schema
        for name, schema in components.items()
    }


def _find_references(node: JsonValue) -> set[str]:
    """Return the names of the components that a schema refers to."""
    match node:
        case {"$ref": str(place)}:
            return {place.removeprefix(REFERENCE_FORMAT.format(name=""))}
        case dict():
            return set[str]().union(*(_find_references(one) for one in node.values()))
        case list():
            return set[str]().union(*(_find_references(one) for one in node))
        case _:
            return set()


def _reopen_schema(schema: JsonObject) -> JsonObject:
    closed = schema.get("additionalProperties") is False
    return {k: v for k, v in schema.items() if not (closed and k == "additionalProperties")}


def _iter_types(operations: Iterable[Operation]) -> Iterator[StructType]:
    yield from (OwnError, OpenAIError, AnthropicError)
    for operation in operations:
        answers = (
            operation.answer,
            *operation.other_answers,
            *operation.events,
            *operation.referenced_types,
        )
        yield from (kind for kind in (operation.body, *answers) if isinstance(kind, type))


def _describe_operation(operation: Operation, schemas: Schemas, *, keyed: bool) -> JsonObject:
    described: JsonObject = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": _SECURITY if keyed and not operation.is_public else [{}],
        "parameters": [*_iter_path_parameters(operation.path), *operation.parameters],
        "responses": {
            str(status): _describe_response(operation, status, schemas)
            for status in list_statuses(operation)
        },
    }
    if operation.body is not None:
        schema = schemas[operation.body]
        described["requestBody"] = {
            "required": True,
            "content": {JSON_MEDIA_TYPE: {"schema": schema}},
        }
    return described


def _iter_path_parameters(path: str) -> Iterator[JsonObject]:
    for segment in path.split("/"):
        if segment.startswith("{"):
            schema: JsonObject = {"type": "string", "minLength": 1}
            yield {"name": segment[1:-1], "in": "path", "required": True, "schema": schema}


def _describe_response(operation: Operation, status: int, schemas: Schemas) -> JsonObject:
    answer: JsonObject = {"description": _MEANINGS[status]}
    errors = [schemas[kind] for kind in list_error_types(operation.path)]
    if status not in {operation.status, *operation.same_form_statuses}:
        return {**answer, "content": {JSON_MEDIA_TYPE: {"schema": _any_of(errors)}}}
    content: dict[str, JsonValue] = {}
    if operation.answer is not None:
        forms = [
            _resolve_schema(one, schemas) for one in (operation.answer, *operation.other_answers)
        ]
        content[operation.media_type] = {"schema": _any_of(forms)}
    if operation.events:
        events = [_resolve_schema(one, schemas) for one in operation.events]
        content[EVENT_STREAM] = {"schema": _any_of([*events, *errors])}
    return {**answer, "content": content} if content else answer


def _resolve_schema(form: StructType | JsonObject, schemas: Schemas) -> JsonObject:
    return schemas[form] if isinstance(form, type) else form


def _any_of(schemas: Sequence[JsonObject]) -> JsonObject:
    first, *others = schemas
    return {"anyOf": list[JsonValue](schemas)} if others else first
