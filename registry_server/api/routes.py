"""What this registry is: where a client begins, and the description of the API.

The OpenAPI 3.1 document, made from the operations and the types that check their requests.

``/tuf/targets/index/<ns>/<name>.json``: the signed index document of a package.

The bytes are those that the last change of the package wrote; their digest is the ETag, so a client
that has them is told so and gets nothing.

The routes of ``/api/v1``: every operation, and the document that describes them.
"""

import hashlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.errors import NotFoundError, UsageError
from expertctl.reference import PackageName
from expertctl.schema.strict_json import JsonObject, JsonValue
from registry_server.access import rights
from registry_server.access.rights import Action, Identity
from registry_server.api import namespaces, packages, people
from registry_server.api.operation import JSON, ApiContext, ApiOperation, ApiOutput, ErrorBody, Read
from registry_server.publishing.index import load_signed_index
from registry_server.registry import Registry


class IndexKeyFacts(ApiOutput, frozen=True):
    """The key that signs index documents; believe it only as somebody tells you its id."""

    key_id: str
    public_key: str


class RegistryFacts(ApiOutput, frozen=True):
    """A registry; ``read`` is who may read namespaces that do not say so themselves."""

    name: str
    version: str
    url: str
    read: Read
    index_key: IndexKeyFacts


def about(context: ApiContext) -> RegistryFacts:
    """Say what this registry is."""
    settings, key = context.registry.settings, context.registry.index_key.public
    index_key = IndexKeyFacts(key.key_id, key.pem().decode())
    read: Read = "public" if settings.read == "public" else "token"
    return RegistryFacts("expertctl registry", __version__, settings.public_url, read, index_key)


ABOUT_OPERATIONS = (ApiOperation("GET", "/api/v1/", about, "registry", anonymous=True),)


COMMON_STATUSES = (400, 401, 408, 413, 414, 415, 421, 429, 431, 500, 503, 507)
"""Statuses that any request may get, whatever it asks for."""

_STATUS_DESCRIPTIONS = {
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
_API_DESCRIPTION = (
    "People, rights and packages of a registry. Blobs and manifests are at `/v2/`, as the OCI "
    "distribution specification says; index documents at `/tuf/targets/index/`."
)
Schemas = Mapping[type[Struct], JsonObject]

_REF_TEMPLATE = "#/components/schemas/{name}"
_SECURITY_SCHEMES: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token, `xpt_…`."},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "A token as the password; the user name is not looked at.",
    },
}


def build_openapi(operations: Sequence[ApiOperation], *, url: str) -> JsonObject:
    """Return the document for these operations of the registry at ``url``."""
    kinds: list[type[Struct]] = list(dict.fromkeys([*_list_struct_types(operations), ErrorBody]))
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF_TEMPLATE)
    schemas: Schemas = dict(zip(kinds, references, strict=True))
    paths: dict[str, JsonValue] = {}
    for operation in operations:
        of_path = paths.setdefault(operation.path, {})
        assert isinstance(of_path, dict)
        of_path[operation.method.lower()] = _describe_operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "expertctl registry",
            "version": __version__,
            "description": _API_DESCRIPTION,
        },
        "servers": [{"url": url}],
        "paths": paths,
        "components": {"schemas": dict(components), "securitySchemes": _SECURITY_SCHEMES},
    }


def list_statuses(operation: ApiOperation) -> list[int]:
    """Return every status that an operation can answer with."""
    return sorted({operation.status, *COMMON_STATUSES, *operation.errors})


def _list_struct_types(operations: Iterable[ApiOperation]) -> Iterator[type[Struct]]:
    for operation in operations:
        if "body" in operation.input_types:
            yield operation.input_types["body"]
        if operation.response_type is not None:
            yield operation.response_type


def _describe_operation(operation: ApiOperation, schemas: Schemas) -> JsonObject:
    secrets: list[JsonValue] = [{"bearer": []}, {"basic": []}]
    described: JsonObject = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [*secrets, {}] if operation.anonymous else secrets,
        "parameters": list(_describe_parameters(operation)),
        "responses": {
            str(status): _describe_response(operation, status, schemas)
            for status in list_statuses(operation)
        },
    }
    if "body" in operation.input_types:
        schema = schemas[operation.input_types["body"]]
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _describe_parameters(operation: ApiOperation) -> Iterator[JsonObject]:
    for place in ("path", "query"):
        if place not in operation.input_types:
            continue
        kind = operation.input_types[place]
        properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        for name, schema in properties.items():
            required = place == "path"
            yield {"name": name, "in": place, "required": required, "schema": schema}


def _describe_response(operation: ApiOperation, status: int, schemas: Schemas) -> JsonObject:
    answer: JsonObject = {"description": _STATUS_DESCRIPTIONS[status]}
    kind = operation.response_type if status == operation.status else ErrorBody
    if kind is not None:
        answer["content"] = {JSON: {"schema": schemas[kind]}}
    return answer


def make_index_routes(registry: Registry) -> list[BaseRoute]:
    """Return the address of index documents."""

    async def index(request: Request) -> Response:
        name = _parse_package_name(request.path_params["namespace"], request.path_params["name"])
        known = request.headers.get("if-none-match", "")

        def read() -> Response:
            return _index_response(load_index(registry, request.state.identity, name), known)

        return await run_in_threadpool(read)  # hashing a large document also takes a while

    return [Route("/tuf/targets/index/{namespace}/{name}.json", index, methods=["GET"])]


def load_index(registry: Registry, identity: Identity, name: PackageName) -> bytes:
    """Return the signed index document of a package.

    Raises:
        UnauthenticatedError: when nobody is named and the namespace is not public.
        ForbiddenError: when the token may not read there.
        NotFoundError: when there is no such package.
    """
    with registry.database.read() as connection:
        rights.authorise(connection, identity, Action.READ, name.namespace, name.name)
        envelope = load_signed_index(connection, name)
    if envelope is None:
        raise NotFoundError(f"there is no package {name}")
    return envelope


def _parse_package_name(namespace: str, name: str) -> PackageName:
    try:
        return PackageName.parse(f"{namespace}/{name}")
    except UsageError as error:
        raise NotFoundError("there is no index document at this address") from error


def _index_response(envelope: bytes, if_none_match: str) -> Response:
    etag = f'"sha256:{hashlib.sha256(envelope).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
    if (
        etag in {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        or if_none_match == "*"
    ):
        return Response(status_code=304, headers=headers)
    return Response(envelope, headers=headers, media_type="application/json")


OPERATIONS = (
    *ABOUT_OPERATIONS,
    *packages.OPERATIONS,
    *namespaces.OPERATIONS,
    *people.OPERATIONS,
)
OPENAPI_PATH = "/api/v1/openapi.json"


def make_api_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the API."""
    document = msgspec.json.encode(build_openapi(OPERATIONS, url=registry.settings.public_url))

    async def describe(_: Request) -> Response:
        return Response(document, media_type=JSON)

    paths = dict.fromkeys(operation.path for operation in OPERATIONS)
    return [
        Route(OPENAPI_PATH, describe, methods=["GET"]),
        *(
            Route(path, _make_endpoint(path, registry), methods=_list_methods(path))
            for path in paths
        ),
    ]


def _list_methods(path: str) -> list[str]:
    return [operation.method for operation in OPERATIONS if operation.path == path]


def _make_endpoint(
    path: str, registry: Registry
) -> Callable[[Request], Coroutine[None, None, Response]]:
    by_method: dict[str, ApiOperation] = {o.method: o for o in OPERATIONS if o.path == path}

    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await by_method[method].respond(request, registry)

    return endpoint
