"""The OpenAPI 3.1 document, made from the operations and the types that check their requests."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from expertctl import __version__
from expertctl.schema.strict_json import JsonObject, JsonValue
from registry_server.api.operation import JSON, Operation
from registry_server.api.wire import ErrorAnswer

ALWAYS = (400, 401, 408, 413, 414, 415, 421, 429, 431, 500, 503, 507)
"""Statuses that any request may get, whatever it asks for."""

_MEANINGS = {
    200: "Done.",
    201: "Made.",
    204: "Done; there is nothing to say.",
    400: "The request is not as it must be.",
    401: "A token is needed, or the one that came is wrong, expired or revoked.",
    403: "The token, or its user, may not do this; or a quota is used up.",
    404: "There is no such thing, as far as the caller may know.",
    408: "The body came too slowly.",
    409: "It clashes with what is there.",
    413: "The body is too large.",
    414: "The path is too long.",
    415: "The body is in a form that is not read here.",
    421: "This registry has another name.",
    429: "Too many requests; `Retry-After` says when to come again.",
    431: "The headers are too large.",
    500: "The registry failed.",
    503: "The registry cannot reach its data; `Retry-After` says when to come again.",
    507: "The disk of the registry is full.",
}
_ABOUT = (
    "People, rights and packages of a registry. Blobs and manifests are at `/v2/`, as the OCI "
    "distribution specification says; index documents at `/tuf/targets/index/`."
)
Schemas = Mapping[type[Struct], JsonObject]

_REFERENCE = "#/components/schemas/{name}"
_SECRETS: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token, `xpt_…`."},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "A token as the password; the user name is not looked at.",
    },
}


def openapi(operations: Sequence[Operation], *, url: str) -> JsonObject:
    """Return the document for these operations of the registry at ``url``."""
    kinds: list[type[Struct]] = list(dict.fromkeys([*_kinds(operations), ErrorAnswer]))
    references, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schemas: Schemas = dict(zip(kinds, references, strict=True))
    paths: dict[str, JsonValue] = {}
    for operation in operations:
        of_path = paths.setdefault(operation.path, {})
        assert isinstance(of_path, dict)
        of_path[operation.method.lower()] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "expertctl registry", "version": __version__, "description": _ABOUT},
        "servers": [{"url": url}],
        "paths": paths,
        "components": {"schemas": dict(components), "securitySchemes": _SECRETS},
    }


def statuses(operation: Operation) -> list[int]:
    """Return every status that an operation can answer with."""
    return sorted({operation.status, *ALWAYS, *operation.errors})


def _kinds(operations: Iterable[Operation]) -> Iterator[type[Struct]]:
    for operation in operations:
        if "body" in operation.inputs:
            yield operation.inputs["body"]
        if operation.answer is not None:
            yield operation.answer


def _described(operation: Operation, schemas: Schemas) -> JsonObject:
    secrets: list[JsonValue] = [{"bearer": []}, {"basic": []}]
    described: JsonObject = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [*secrets, {}] if operation.anonymous else secrets,
        "parameters": list(_parameters(operation)),
        "responses": {
            str(status): _answer(operation, status, schemas) for status in statuses(operation)
        },
    }
    if "body" in operation.inputs:
        schema = schemas[operation.inputs["body"]]
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _parameters(operation: Operation) -> Iterator[JsonObject]:
    for place in ("path", "query"):
        if place not in operation.inputs:
            continue
        kind = operation.inputs[place]
        properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        for name, schema in properties.items():
            required = place == "path"
            yield {"name": name, "in": place, "required": required, "schema": schema}


def _answer(operation: Operation, status: int, schemas: Schemas) -> JsonObject:
    answer: JsonObject = {"description": _MEANINGS[status]}
    kind = operation.answer if status == operation.status else ErrorAnswer
    if kind is not None:
        answer["content"] = {JSON: {"schema": schemas[kind]}}
    return answer
