"""The OpenAPI 3.1 document of an API, built from its operations and their types, and in words.

Schemas come from the types that read requests and write answers. A document whose schema is a file
is annotated with `refer_to_schema` instead; `ApiDescription.schemas` contains its schema.

`build_reference` describes such a document for people: text with code and links to schemas, which a
page renders as it likes.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
            form: JsonObject = {"schema": self._schemas[body]}
            if operation.example is not None:
                form["example"] = operation.example
            content: JsonObject = {JSON_MEDIA_TYPE: form}
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


Document = Mapping[str, Any]
"""An OpenAPI document, or a part of one, that `build_openapi` made."""
_GROUP_TITLES = {"openai": "OpenAI"}
_CODE = re.compile(r"`+([^`]+)`+")
_TYPE_NAMES = {"string": "text", "boolean": "true or false"}


@dataclass(frozen=True, slots=True)
class DescriptionPart:
    """A part of a description: plain text, code, or the name of a schema of the document."""

    text: str
    kind: Literal["text", "code", "schema"] = "text"


Description = tuple[DescriptionPart, ...]


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """A parameter, or a field of a schema."""

    name: str
    type: Description
    is_required: bool


@dataclass(frozen=True, slots=True)
class AnswerDescription:
    """What an operation returns with a status, beyond those that every request may get."""

    status: int
    meaning: Description
    type: Description


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDescription:
    """One operation: what it takes, what it returns, and a command that calls it."""

    id: str
    method: str
    path: str
    summary: Description
    is_public: bool
    """Whether it needs no key, although others do."""
    parameters: tuple[FieldDescription, ...]
    body: Description
    answers: tuple[AnswerDescription, ...]
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaDescription:
    """One schema: an object with its fields."""

    name: str
    meaning: Description
    fields: tuple[FieldDescription, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiReference:
    """An API in words; operations are grouped, schemas sorted by name."""

    title: str
    version: str
    summary: Description
    url: str
    groups: Mapping[str, tuple[OperationDescription, ...]]
    common: Mapping[int, Description]
    """Statuses that any request may get."""
    schemas: tuple[SchemaDescription, ...]


def build_reference(document: Document, api: ApiDescription) -> ApiReference:
    """Describe the document of an API."""
    groups: dict[str, list[OperationDescription]] = {}
    [server] = document["servers"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            described = _describe_operation(method.upper(), path, operation, server["url"], api)
            groups.setdefault(title_group(operation["tags"][0]), []).append(described)
    schemas = document["components"]["schemas"]
    return ApiReference(
        title=document["info"]["title"],
        version=document["info"]["version"],
        summary=split_code(document["info"]["description"]),
        url=server["url"],
        groups={title: tuple(some) for title, some in groups.items()},
        common={
            status: split_code(api.status_descriptions[status]) for status in api.common_statuses
        },
        schemas=tuple(_describe_component(name, schemas[name]) for name in sorted(schemas)),
    )


def title_group(tag: str) -> str:
    """Return the title of the operations with a tag."""
    return _GROUP_TITLES.get(tag, tag.capitalize())


def split_code(text: str) -> Description:
    """Return a text as a description; what is between backticks is code."""
    found = enumerate(_CODE.split(" ".join(text.split())))
    return tuple(DescriptionPart(part, "code" if n % 2 else "text") for n, part in found if part)


def describe_type(schema: Document) -> Description:
    """Describe the values that a JSON schema allows."""
    if "$ref" in schema:
        return (DescriptionPart(schema["$ref"].rpartition("/")[2], "schema"),)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return (*_join_options(map(describe_type, schema[several])), *_describe_use(schema))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return _join_options(describe_type({**schema, "type": one}) for one in kind)
    if "enum" in schema:
        options = ((DescriptionPart(json.dumps(one), "code"),) for one in schema["enum"])
        return (*_join_options(options), *_describe_use(schema))
    if kind == "array":
        items = describe_type(schema["items"]) if "items" in schema else ()
        return (DescriptionPart("list of " if items else "list"), *items)
    text = f"{_name_format(schema, kind)}{_describe_bounds(schema)}"
    return (DescriptionPart(text), *_describe_use(schema))


def describe_answer(content: Document) -> Description:
    """Describe the content of an answer, by media type; a stream of events comes last."""
    kinds = [
        describe_type(each["schema"]) for media, each in content.items() if media != EVENT_STREAM
    ]
    text = _join_options(kinds) or (DescriptionPart("no body"),)
    if EVENT_STREAM not in content:
        return text
    return (
        *text,
        DescriptionPart(", or events: "),
        *describe_type(content[EVENT_STREAM]["schema"]),
    )


def describe_fields(schema: Document) -> tuple[FieldDescription, ...]:
    """Describe the fields of an object."""
    required = schema.get("required", ())
    return tuple(
        FieldDescription(name, describe_type(value), name in required)
        for name, value in schema.get("properties", {}).items()
    )


def _describe_operation(
    method: str, path: str, operation: Document, url: str, api: ApiDescription
) -> OperationDescription:
    content = operation.get("requestBody", {}).get("content", {}).get(JSON_MEDIA_TYPE)
    keyed = operation["security"] != list(api.public_security)
    return OperationDescription(
        id=operation["operationId"],
        method=method,
        path=path,
        summary=split_code(operation["summary"]),
        is_public=not keyed and api.security != api.public_security,
        parameters=tuple(
            FieldDescription(
                one["name"], describe_type(one["schema"]), bool(one.get("required", False))
            )
            for one in operation["parameters"]
        ),
        body=describe_type(content["schema"]) if content else (),
        answers=tuple(
            AnswerDescription(
                int(status),
                split_code(answer["description"]),
                describe_answer(answer.get("content", {})),
            )
            for status, answer in operation["responses"].items()
            if int(status) not in api.common_statuses
        ),
        command=_write_command(
            method, f"{url}{path}", content and content.get("example"), keyed=keyed
        ),
    )


def _write_command(method: str, url: str, example: JsonValue, *, keyed: bool) -> str:
    """Return a command of curl; what stands for a value is in capitals."""
    words = [f"curl {re.sub(r'{(.*?)}', lambda found: found[1].upper(), url)}"]
    if method not in {"GET", "POST"}:
        words[0] = words[0].replace("curl", f"curl -X {method}")
    if keyed:
        words.append('-H "Authorization: Bearer $EXPERT_API_KEY"')
    if example is not None:
        words.append(f"-H 'Content-Type: {JSON_MEDIA_TYPE}'")
        words.append(f"-d {shlex.quote(json.dumps(example, ensure_ascii=False))}")
    return " \\\n  ".join(words)


def _describe_component(name: str, schema: Document) -> SchemaDescription:
    meaning = split_code(schema["description"])
    return SchemaDescription(name=name, meaning=meaning, fields=describe_fields(schema))


def _join_options(options: Iterable[Description]) -> Description:
    first, *others = [*options] or [()]
    return (*first, *(part for other in others for part in (DescriptionPart(" or "), *other)))


def _name_format(schema: Document, kind: str) -> str:
    if schema.get("format") == "date-time":
        return "time"
    return "base64" if "contentEncoding" in schema else _TYPE_NAMES.get(kind, kind)


def _describe_bounds(schema: Document) -> str:
    if "minLength" in schema or "maxLength" in schema:
        return f" of{_describe_range(schema.get('minLength'), schema.get('maxLength'))} characters"
    return _describe_range(schema.get("minimum"), schema.get("maximum"))


def _describe_range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        bounds = [f" at least {low}"] if low is not None else []
        return "".join([*bounds, f" at most {high}"] if high is not None else bounds)
    return f" {low} to {high}"


def _describe_use(schema: Document) -> Description:
    """Return what a value means, with examples and its default, after a colon."""
    examples = ", ".join(f"`{each}`" for each in schema.get("examples", ()))
    words = [schema["description"].rstrip(".")] if "description" in schema else []
    words += [f"such as {examples}"] if examples else []
    words += [f"`{schema['default']}` by default"] if schema.get("default") else []
    return (DescriptionPart(": "), *split_code("; ".join(words))) if words else ()
