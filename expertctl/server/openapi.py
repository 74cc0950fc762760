"""``/openapi.json``: the OpenAPI 3.1 document, made from the types that check requests."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

from expertctl import __version__
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.body import JSON
from expertctl.server.documents import REFERENCE, documents
from expertctl.server.error_bodies import AnthropicError, OpenAIError, OwnError, error_kinds

EVENTS = "text/event-stream"
Method = Literal["GET", "POST", "DELETE"]
Kind = type[Struct]
Schemas = Mapping[Kind, JsonObject]

ALWAYS = (400, 401, 403, 408, 413, 414, 415, 421, 429, 431, 500, 503)
"""Statuses that any request may get, whatever it asks for."""
_MEANINGS = {
    200: "Done.",
    202: "Taken; it is not done yet.",
    204: "Done; there is nothing to say.",
    400: "The request is not as it must be.",
    401: "An API key is needed, or the one that came is wrong, expired or revoked.",
    403: "A page of another site asks, a key asks for what it may not do, or an expert is not "
    "signed by a key that is trusted.",
    404: "There is no such thing, as far as the caller may know.",
    405: "The address takes other methods; `Allow` names them.",
    408: "The body came too slowly; or the time that was given was over before any answer.",
    413: "The body is too large.",
    414: "The path is too long.",
    415: "The body is in a form that is not read here.",
    421: "This server has another name.",
    422: "It does not fit: experts to the base or each other, or the answer into memory.",
    429: "Too many requests or tokens, or a full queue; `Retry-After` says when to come again.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The base is being loaded, or the server ends.",
}
_ABOUT = (
    "Generation with experts, as chat completions and completions of OpenAI, messages of "
    "Anthropic, and an API of its own."
)
_SECRETS: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, `xpk_…`."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


_SHOWN: list[JsonValue] = [{"bearer": []}, {"key": []}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method and a path, what it takes and what it answers.

    ``answer`` is a type, or a JSON Schema if no type fits. With ``stream`` in the body, ``events``
    come instead: the types of their data. ``errors`` are the statuses beyond those that every
    operation can have.
    """

    method: Method
    path: str
    name: str
    summary: str
    tag: str
    body: Kind | None = None
    lenient: bool = False
    """Whether unknown fields of the body are ignored, unless the server is strict."""
    parameters: tuple[JsonObject, ...] = ()
    """Parameters besides those in the path."""
    answer: Kind | JsonObject | None = None
    also: tuple[Kind, ...] = ()
    """Other forms of the answer."""
    media_type: str = JSON
    status: int = 200
    events: tuple[Kind | JsonObject, ...] = ()
    parts: tuple[Kind, ...] = ()
    """Types that are part of answers, but that their types only refer to by name."""
    errors: tuple[int, ...] = ()
    same: tuple[int, ...] = ()
    """Error statuses whose answers have the form of the successful one."""
    open: bool = False
    """Whether it needs no key."""


def openapi(
    operations: Sequence[Operation], *, url: str, keyed: bool, strict: bool = False
) -> JsonObject:
    """Return the OpenAPI document of the server at ``url``.

    ``keyed``: it demands keys; ``strict``: it refuses unknown fields everywhere.
    """
    kinds = list(dict.fromkeys(_kinds(operations)))
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schemas: Schemas = dict(zip(kinds, references, strict=True))
    bodies = [schemas[one.body] for one in operations if one.lenient and one.body is not None]
    components = components if strict else _opened(components, bodies)
    paths: dict[str, JsonValue] = {}
    for operation in operations:
        of_path = paths.setdefault(operation.path, {})
        assert isinstance(of_path, dict)
        of_path[operation.method.lower()] = _described(operation, schemas, keyed=keyed)
    return {
        "openapi": "3.1.0",
        "info": {"title": "expertctl serve", "version": __version__, "description": _ABOUT},
        "servers": [{"url": url}],
        "paths": paths,
        "components": {
            "schemas": {**components, **documents()},
            "securitySchemes": _SECRETS,
        },
    }


def statuses(operation: Operation) -> list[int]:
    """Return every status that an operation can answer with."""
    return sorted({operation.status, *ALWAYS, *operation.errors})


def _opened(
    components: Mapping[str, JsonObject], bodies: Iterable[JsonObject]
) -> dict[str, JsonObject]:
    """Let the schemas that are part of some bodies have further properties."""
    waiting, open_names = list[JsonValue](bodies), set[str]()
    while waiting:
        for name in _names_in(waiting.pop()) - open_names:
            open_names.add(name)
            waiting.append(components[name])
    return {
        name: _without_end(schema) if name in open_names else schema
        for name, schema in components.items()
    }


def _names_in(node: JsonValue) -> set[str]:
    """Return the names of the components that a schema refers to."""
    match node:
        case {"$ref": str(place)}:
            return {place.removeprefix(REFERENCE.format(name=""))}
        case dict():
            return set[str]().union(*(_names_in(one) for one in node.values()))
        case list():
            return set[str]().union(*(_names_in(one) for one in node))
        case _:
            return set()


def _without_end(schema: JsonObject) -> JsonObject:
    closed = schema.get("additionalProperties") is False
    return {k: v for k, v in schema.items() if not (closed and k == "additionalProperties")}


def _kinds(operations: Iterable[Operation]) -> Iterator[Kind]:
    yield from (OwnError, OpenAIError, AnthropicError)
    for operation in operations:
        answers = (operation.answer, *operation.also, *operation.events, *operation.parts)
        yield from (kind for kind in (operation.body, *answers) if isinstance(kind, type))


def _described(operation: Operation, schemas: Schemas, *, keyed: bool) -> JsonObject:
    described: JsonObject = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": _SHOWN if keyed and not operation.open else [{}],
        "parameters": [*_parameters(operation.path), *operation.parameters],
        "responses": {
            str(status): _answer(operation, status, schemas) for status in statuses(operation)
        },
    }
    if operation.body is not None:
        schema = schemas[operation.body]
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _parameters(path: str) -> Iterator[JsonObject]:
    for segment in path.split("/"):
        if segment.startswith("{"):
            schema: JsonObject = {"type": "string", "minLength": 1}
            yield {"name": segment[1:-1], "in": "path", "required": True, "schema": schema}


def _answer(operation: Operation, status: int, schemas: Schemas) -> JsonObject:
    answer: JsonObject = {"description": _MEANINGS[status]}
    errors = [schemas[kind] for kind in error_kinds(operation.path)]
    if status not in {operation.status, *operation.same}:
        return {**answer, "content": {JSON: {"schema": _one_of(errors)}}}
    content: dict[str, JsonValue] = {}
    if operation.answer is not None:
        forms = [_schema(one, schemas) for one in (operation.answer, *operation.also)]
        content[operation.media_type] = {"schema": _one_of(forms)}
    if operation.events:
        events = [_schema(one, schemas) for one in operation.events]
        content[EVENTS] = {"schema": _one_of([*events, *errors])}
    return {**answer, "content": content} if content else answer


def _schema(form: Kind | JsonObject, schemas: Schemas) -> JsonObject:
    return schemas[form] if isinstance(form, type) else form


def _one_of(schemas: Sequence[JsonObject]) -> JsonObject:
    first, *others = schemas
    return {"anyOf": list[JsonValue](schemas)} if others else first
