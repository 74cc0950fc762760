"""The OpenAPI 3.1 document of an API, built from its operations and their types.

Schemas come from the types that read requests and write answers. A document whose schema is a file
is annotated with `refer_to_schema` instead; `ApiDescription.schemas` contains its schema.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Meta, Struct

from expertctl import __version__
from expertctl.http.operation import JSON_MEDIA_TYPE, Operation, StructType
from expertctl.schema.strict_json import JsonObject, JsonValue

_REFERENCE_FORMAT = "#/components/schemas/{name}"
_TEXT_SCHEMA: JsonObject = {"type": "string"}
EVENT_STREAM = "text/event-stream"
_PARAMETER_PLACES = ("path", "query")
Schemas = Mapping[StructType, JsonObject]


def make_reference(name: str) -> JsonObject:
    """Return a reference to another schema of the document."""
    return {"$ref": _REFERENCE_FORMAT.format(name=name)}


def refer_to_schema(name: str) -> Meta:
    """Return the annotation of a type whose schema is that of ``name`` in the document."""
    return Meta(extra_json_schema=make_reference(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDescription:
    """What the OpenAPI document of a server contains besides its operations."""

    title: str
    description: str
    common_statuses: tuple[int, ...]
    """Statuses that any request may get."""
    status_descriptions: Mapping[int, str]
    list_error_types: Callable[[str], Sequence[StructType]]
    """Returns the types of error bodies at a path."""
    security_schemes: JsonObject
    security: Sequence[JsonValue]
    """How requests are authenticated."""
    public_security: Sequence[JsonValue]
    """The same for public operations."""
    name_operation: Callable[[str], str] = str
    """Returns the id of the operation of a handler, by the handler's name."""
    first_types: tuple[StructType, ...] = ()
    """Types whose schemas come before those of the operations."""
    schemas: Mapping[str, JsonObject] = field(default_factory=dict)
    """Further schemas, by name."""

    def list_statuses(self, operation: Operation) -> list[int]:
        """Return every status that an operation can return."""
        return sorted({operation.status, *self.common_statuses, *operation.errors})


def build_openapi(
    api: ApiDescription, operations: Sequence[Operation], *, url: str, strict: bool = True
) -> JsonObject:
    """Build the OpenAPI document of the server at ``url``.

    Unless ``strict``, bodies whose unknown fields are ignored allow further properties.
    """
    builder = _DocumentBuilder(api, operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": api.title, "version": __version__, "description": api.description},
        "servers": [{"url": url}],
        "paths": builder.build_paths(),
        "components": {
            "schemas": {**builder.build_components(strict=strict), **api.schemas},
            "securitySchemes": api.security_schemes,
        },
    }


class _DocumentBuilder:
    """Builds the parts of one document."""

    def __init__(self, api: ApiDescription, operations: Sequence[Operation]) -> None:
        self._api, self._operations = api, operations
        kinds = list(dict.fromkeys(self._iter_struct_types()))
        references, self._components = msgspec.json.schema_components(
            kinds, ref_template=_REFERENCE_FORMAT
        )
        self._schemas: Schemas = dict(zip(kinds, references, strict=True))

    def _iter_struct_types(self) -> Iterator[StructType]:
        yield from self._api.first_types
        for operation in self._operations:
            answers = (kind for kinds in operation.response_types.values() for kind in kinds)
            for kind in (operation.body_type, *answers, *operation.referenced_types):
                if isinstance(kind, type) and issubclass(kind, Struct):
                    yield kind
        for operation in self._operations:
            yield from self._api.list_error_types(operation.path)

    def build_components(self, *, strict: bool) -> Mapping[str, JsonObject]:
        """Return the schemas of all types, by name."""
        if strict:
            return self._components
        bodies = [one.body_type for one in self._operations if one.allows_unknown_fields]
        open_schemas = [self._schemas[kind] for kind in bodies if kind is not None]
        return _allow_unknown_properties(self._components, open_schemas)

    def build_paths(self) -> dict[str, JsonValue]:
        """Return the descriptions of all operations, by path and method."""
        paths: dict[str, JsonValue] = {}
        for operation in self._operations:
            of_path = paths.setdefault(operation.path_template, {})
            assert isinstance(of_path, dict)
            of_path[operation.method.lower()] = self._describe_operation(operation)
        return paths

    def _describe_operation(self, operation: Operation) -> JsonObject:
        api = self._api
        described: JsonObject = {
            "operationId": api.name_operation(operation.name),
            "summary": operation.summary,
            "tags": [operation.tag],
            "security": list(api.public_security if operation.is_public else api.security),
            "parameters": [*_iter_parameters(operation), *operation.parameters],
            "responses": {
                str(status): self._describe_response(operation, status)
                for status in api.list_statuses(operation)
            },
        }
        if (body := operation.body_type) is not None:
            content: JsonObject = {JSON_MEDIA_TYPE: {"schema": self._schemas[body]}}
            described["requestBody"] = {"required": True, "content": content}
        return described

    def _describe_response(self, operation: Operation, status: int) -> JsonObject:
        answer: JsonObject = {"description": self._api.status_descriptions[status]}
        errors = [self._schemas[kind] for kind in self._api.list_error_types(operation.path)]
        if status not in {operation.status, *operation.same_form_statuses}:
            return {**answer, "content": {JSON_MEDIA_TYPE: {"schema": _any_of(errors)}}}
        content: dict[str, JsonValue] = {}
        for media_type, kinds in operation.response_types.items():
            forms = [self._resolve_schema(kind) for kind in kinds]
            if media_type == EVENT_STREAM:  # an error may end the stream
                forms += errors
            content[media_type] = {"schema": _any_of(forms)}
        return {**answer, "content": content} if content else answer

    def _resolve_schema(self, kind: Any) -> JsonObject:
        for meta in getattr(kind, "__metadata__", ()):
            if isinstance(meta, Meta) and "$ref" in (meta.extra_json_schema or {}):
                return dict(meta.extra_json_schema or {})
        return _TEXT_SCHEMA if kind is str else self._schemas[kind]


def _iter_parameters(operation: Operation) -> Iterator[JsonObject]:
    for place in _PARAMETER_PLACES:
        if (kind := operation.input_types.get(place)) is None:
            continue
        properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        for name, schema in properties.items():
            required = place == "path"
            yield {"name": name, "in": place, "required": required, "schema": schema}


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
            return {place.removeprefix(_REFERENCE_FORMAT.format(name=""))}
        case dict():
            return set[str]().union(*(_find_references(one) for one in node.values()))
        case list():
            return set[str]().union(*(_find_references(one) for one in node))
        case _:
            return set()


def _reopen_schema(schema: JsonObject) -> JsonObject:
    closed = schema.get("additionalProperties") is False
    return {k: v for k, v in schema.items() if not (closed and k == "additionalProperties")}


def _any_of(schemas: Sequence[JsonObject]) -> JsonObject:
    first, *others = schemas
    return {"anyOf": list[JsonValue](schemas)} if others else first
