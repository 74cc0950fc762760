"""The routes of ``/api/v1`` and its OpenAPI document, index documents, health checks and metrics.

``/tuf/targets/index/<ns>/<name>.json`` is the signed index document of a package, as written by the
last change of the package. Its digest is the ETag, so a client that has it gets a 304.

Each request to ``/readyz`` runs all checks again, so a missing or full disk is noticed at once.
``/healthz`` and ``/readyz`` are public and name problems without paths. ``/metrics`` is for admins,
and without a token for this machine itself if no proxy is in front of the registry.
"""

import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import msgspec
from anyio import to_thread
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.errors import (
    ExpertError,
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.http.openapi import ApiDescription, build_openapi
from expertctl.http.operation import JSON_MEDIA_TYPE, Operation, OperationRouter, read_body
from expertctl.http.server import is_loopback
from expertctl.reference import PackageName
from expertctl.schema.strict_json import JsonObject
from registry_server.access import rights
from registry_server.access.authentication import get_identity
from registry_server.access.rights import Action, Identity
from registry_server.api import namespaces, packages, people, search
from registry_server.api.schema import ApiContext, ApiOutput, ErrorBody, Read
from registry_server.database.tables import USERS
from registry_server.oci.blobs import matches_etag
from registry_server.operation.metrics import CONTENT_TYPE
from registry_server.publishing.index import load_signed_index
from registry_server.registry import Registry, check_index_key
from registry_server.settings import ServerSettings


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

        def read() -> Response:
            envelope = load_index(registry, request.state.identity, name)
            return _index_response(envelope, request.headers)

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


def _index_response(envelope: bytes, request_headers: Mapping[str, str]) -> Response:
    etag = f'"sha256:{hashlib.sha256(envelope).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
    if matches_etag(request_headers, etag):
        return Response(status_code=304, headers=headers)
    return Response(envelope, headers=headers, media_type="application/json")


OPERATIONS = (
    *ABOUT_OPERATIONS,
    *search.OPERATIONS,
    *packages.OPERATIONS,
    *namespaces.OPERATIONS,
    *people.OPERATIONS,
)
OPENAPI_PATH = "/api/v1/openapi.json"


_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def make_api_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the API."""
    document = _encode_openapi(registry.settings.public_url)
    router = OperationRouter(
        make_context=lambda request: ApiContext(registry, get_identity(request)),
        read_body=_read_operation_body,
        headers=_HEADERS,
    )

    async def describe(_: Request) -> Response:
        return Response(document, media_type=JSON_MEDIA_TYPE)

    return [Route(OPENAPI_PATH, describe, methods=["GET"]), *router.build_routes(OPERATIONS)]


@cache
def _encode_openapi(url: str) -> bytes:
    return msgspec.json.encode(build_openapi(API, OPERATIONS, url=url))


async def _read_operation_body(request: Request, operation: Operation) -> object:
    kind = operation.body_type
    assert kind is not None
    return await read_body(request, kind, openapi_path=OPENAPI_PATH)


@dataclass(frozen=True, slots=True)
class ReadinessCheck:
    """The result of a check; ``problem`` is for the log and may contain paths."""

    name: str
    fact: str
    problem: str | None

    @property
    def ok(self) -> bool:
        """Whether the check passed."""
        return self.problem is None


def probe_readiness(registry: Registry) -> tuple[ReadinessCheck, ...]:
    """Check everything that a publish needs."""
    return tuple(
        _run_probe(name, fact, probe, registry)
        for name, fact, probe in (
            ("database", "the database cannot be written", _probe_database),
            ("storage", "blobs cannot be written", _probe_storage),
            ("space", "there is too little free space", _probe_free_space),
            ("index_key", "the index key cannot be used", _probe_index_key),
        )
    )


def _run_probe(
    name: str, fact: str, probe: Callable[[Registry], str | None], registry: Registry
) -> ReadinessCheck:
    try:
        return ReadinessCheck(name, fact, probe(registry))
    except ExpertError as error:
        return ReadinessCheck(name, fact, error.message)
    except OSError as error:
        return ReadinessCheck(name, fact, str(error))


def _probe_database(registry: Registry) -> None:
    """Take the write lock and read a row, on the file that exists now."""
    if not registry.settings.database.exists():
        raise FileNotFoundError("the database file is missing")
    with registry.database.write() as connection:
        connection.execute(select(USERS.c.id).limit(1)).all()


def _probe_storage(registry: Registry) -> None:
    """Write and flush a byte in each folder; missing folders are not created."""
    for folder in (registry.settings.uploads, registry.settings.blobs):
        probe = folder / f".probe-{secrets.token_hex(8)}"
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)
            probe.unlink(missing_ok=True)


def _probe_free_space(registry: Registry) -> str | None:
    free = shutil.disk_usage(registry.settings.data).free
    floor = registry.settings.limits.free_bytes
    return None if free >= floor else f"{free} bytes are free, {floor} must be"


def _probe_index_key(registry: Registry) -> None:
    check_index_key(registry.settings.index_key, registry.index_key.public.key_id)


_LOG = logging.getLogger("registry_server.health")
_NO_STORE = {"Cache-Control": "no-store"}


def make_health_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes for the operator of the registry."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_NO_STORE)

    async def readyz(_: Request) -> Response:
        checks = await to_thread.run_sync(probe_readiness, registry)
        bad = [check for check in checks if not check.ok]
        for check in bad:
            fields = {"check": check.name, "problem": check.problem}
            _LOG.error("not ready", extra={"fields": fields})
        body = {
            "ready": not bad,
            "checks": {check.name: "ok" if check.ok else check.fact for check in checks},
        }
        return JSONResponse(body, 503 if bad else 200, _NO_STORE)

    async def metrics(request: Request) -> Response:
        _require_operator(request, unproxied=_has_no_proxy(registry.settings))
        text = await to_thread.run_sync(registry.metrics.render_exposition, registry.database)
        return Response(text, headers=_NO_STORE, media_type=CONTENT_TYPE)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def _has_no_proxy(settings: ServerSettings) -> bool:
    """Return whether no proxy is in front, so that a local connection is a local client."""
    return settings.url is None and not settings.trusted_proxies


def _require_operator(request: Request, *, unproxied: bool) -> None:
    """Require an admin's token, or a request from this machine without a proxy.

    Raises:
        UnauthenticatedError: when the request is anonymous.
        ForbiddenError: when the user is not an admin.
    """
    identity: Identity = request.state.identity
    if identity.admin and identity.covers(Action.ADMIN, None, None):
        return
    if identity.user_id is not None:
        raise ForbiddenError("metrics are for admins")
    peer = request.client.host if request.client else ""
    forwarded = {"x-forwarded-for", "forwarded", "x-real-ip", "via"} & set(request.headers)
    if forwarded or not (unproxied and is_loopback(peer)):
        raise UnauthenticatedError("metrics are for admins, and for the machine itself")
