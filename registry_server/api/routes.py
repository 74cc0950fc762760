"""The routes of ``/api/v1`` and its OpenAPI document, and the index documents of packages.

``/tuf/targets/index/<ns>/<name>.json`` is the signed index document of a package, as written by the
last change of the package. Its digest is the ETag, so a client that has it gets a 304.
"""

import hashlib

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.errors import NotFoundError, UsageError
from expertctl.http.openapi import ApiDescription, build_openapi
from expertctl.http.operation import JSON_MEDIA_TYPE, Operation, OperationRouter, read_body
from expertctl.reference import PackageName
from expertctl.schema.strict_json import JsonObject
from registry_server.access import rights
from registry_server.access.authentication import get_identity
from registry_server.access.rights import Action, Identity
from registry_server.api import namespaces, packages, people
from registry_server.api.schema import ApiContext, ApiOutput, ErrorBody, Read
from registry_server.publishing.index import load_signed_index
from registry_server.registry import Registry


class IndexKeyFacts(ApiOutput, frozen=True):
    """The key that signs index documents; trust it only if its id came from elsewhere."""

    key_id: str
    public_key: str


class RegistryFacts(ApiOutput, frozen=True):
    """A registry; ``read`` is the default read access of namespaces."""

    name: str
    version: str
    url: str
    read: Read
    index_key: IndexKeyFacts


def about(context: ApiContext) -> RegistryFacts:
    """Describe this registry."""
    settings, key = context.registry.settings, context.registry.index_key.public
    index_key = IndexKeyFacts(key.key_id, key.pem().decode())
    read: Read = "public" if settings.read == "public" else "token"
    return RegistryFacts("expertctl registry", __version__, settings.public_url, read, index_key)


ABOUT_OPERATIONS = (Operation("GET", "/api/v1/", about, "registry", is_public=True),)


_COMMON_STATUSES = (400, 401, 408, 413, 414, 415, 421, 429, 431, 500, 503, 507)
_STATUS_DESCRIPTIONS = {
    200: "Done.",
    201: "Created.",
    204: "Done; no content.",
    400: "The request is invalid.",
    401: "A token is required: it is missing, wrong, expired or revoked.",
    403: "The token or its user lacks the right, or a quota is exceeded.",
    404: "Not found, or not visible to the caller.",
    408: "The body arrived too slowly.",
    409: "It conflicts with what exists.",
    413: "The body is too large.",
    414: "The path is too long.",
    415: "The media type or encoding of the body is not supported.",
    421: "The `Host` header names another server.",
    429: "Too many requests; `Retry-After` says when to retry.",
    431: "The headers are too large.",
    500: "The registry failed.",
    503: "The registry cannot access its data; `Retry-After` says when to retry.",
    507: "The disk of the registry is full.",
}
_SECRETS: tuple[JsonObject, ...] = ({"bearer": []}, {"basic": []})
API = ApiDescription(
    title="expertctl registry",
    description="Users, rights and packages of a registry. Blobs and manifests are at `/v2/`, by "
    "the OCI distribution specification; index documents at `/tuf/targets/index/`.",
    common_statuses=_COMMON_STATUSES,
    status_descriptions=_STATUS_DESCRIPTIONS,
    list_error_types=lambda _: (ErrorBody,),
    security_schemes={
        "bearer": {"type": "http", "scheme": "bearer", "description": "A token, `xpt_…`."},
        "basic": {
            "type": "http",
            "scheme": "basic",
            "description": "A token as the password; the user name is ignored.",
        },
    },
    security=_SECRETS,
    public_security=(*_SECRETS, {}),
)


def make_index_routes(registry: Registry) -> list[BaseRoute]:
    """Return the route of index documents."""

    async def index(request: Request) -> Response:
        name = _parse_package_name(request.path_params["namespace"], request.path_params["name"])
        known = request.headers.get("if-none-match", "")

        def read() -> Response:
            return _index_response(load_index(registry, request.state.identity, name), known)

        return await run_in_threadpool(read)  # hashing a large document also takes time

    return [Route("/tuf/targets/index/{namespace}/{name}.json", index, methods=["GET"])]


def load_index(registry: Registry, identity: Identity, name: PackageName) -> bytes:
    """Return the signed index document of a package.

    Raises:
        UnauthenticatedError: when the request is anonymous and the namespace is not public.
        ForbiddenError: when the token may not read the namespace.
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


_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def make_api_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the API."""
    url = registry.settings.public_url
    document = msgspec.json.encode(build_openapi(API, OPERATIONS, url=url))
    router = OperationRouter(
        make_context=lambda request: ApiContext(registry, get_identity(request)),
        read_body=_read_operation_body,
        headers=_HEADERS,
    )

    async def describe(_: Request) -> Response:
        return Response(document, media_type=JSON_MEDIA_TYPE)

    return [Route(OPENAPI_PATH, describe, methods=["GET"]), *router.build_routes(OPERATIONS)]


async def _read_operation_body(request: Request, operation: Operation) -> object:
    kind = operation.body_type
    assert kind is not None
    return await read_body(request, kind, openapi_path=OPENAPI_PATH)
