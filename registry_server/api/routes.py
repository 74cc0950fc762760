"""What this registry is: where a client begins, and the description of the API.

The OpenAPI 3.1 document, made from the operations and the types that check their requests.

``/tuf/targets/index/<ns>/<name>.json``: the signed index document of a package.

The bytes are those that the last change of the package wrote; their digest is the ETag, so a client
that has them is told so and gets nothing.

The routes of ``/api/v1``: every operation, and the document that describes them.
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
from expertctl.http.operation import Operation, OperationRouter
from expertctl.http.request_body import JSON_MEDIA_TYPE, read_body
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


ABOUT_OPERATIONS = (Operation("GET", "/api/v1/", about, "registry", is_public=True),)


_COMMON_STATUSES = (400, 401, 408, 413, 414, 415, 421, 429, 431, 500, 503, 507)
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
_SECRETS: tuple[JsonObject, ...] = ({"bearer": []}, {"basic": []})
API = ApiDescription(
    title="expertctl registry",
    description="People, rights and packages of a registry. Blobs and manifests are at `/v2/`, as "
    "the OCI distribution specification says; index documents at `/tuf/targets/index/`.",
    common_statuses=_COMMON_STATUSES,
    status_descriptions=_STATUS_DESCRIPTIONS,
    list_error_types=lambda _: (ErrorBody,),
    security_schemes={
        "bearer": {"type": "http", "scheme": "bearer", "description": "A token, `xpt_…`."},
        "basic": {
            "type": "http",
            "scheme": "basic",
            "description": "A token as the password; the user name is not looked at.",
        },
    },
    security=_SECRETS,
    public_security=(*_SECRETS, {}),
)


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
