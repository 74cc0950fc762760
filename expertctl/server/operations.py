"""All operations of the generation server, their OpenAPI document, and the routes for operators.

``/health``, ``/healthz``, ``/readyz`` and ``/version`` are public. ``/healthz`` says that the
process answers; ``/health``, which clients of other inference servers poll, and ``/readyz`` say
that requests are accepted. ``/metrics`` names experts and their load, so it needs a key where the
server does.
"""

from dataclasses import replace
from functools import cache
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.engine.serving.request import EngineSnapshot
from expertctl.http.openapi import ApiDescription, build_openapi
from expertctl.http.operation import (
    JSON_MEDIA_TYPE,
    NO_STORE,
    OPENAPI_PATH,
    RETRY_SECONDS,
    Operation,
    Reply,
)
from expertctl.schema.strict_json import JsonObject
from expertctl.server import models
from expertctl.server.anthropic import routes as anthropic
from expertctl.server.metrics import CONTENT_TYPE
from expertctl.server.native import routes as native
from expertctl.server.openai import routes as openai
from expertctl.server.request_body import build_router, load_file_schemas
from expertctl.server.responses import AnthropicError, OpenAIError, OwnError, list_error_types
from expertctl.server.service import ReadinessDocument, Service


class HealthDocument(msgspec.Struct, frozen=True):
    """Whether requests are accepted."""

    status: Literal["ok", "unavailable"]


class VersionDocument(msgspec.Struct, frozen=True):
    """The version of the server."""

    version: str


def build_health_routes(service: Service) -> list[BaseRoute]:
    """Return the routes for the operator of the server."""
    router = build_router(HealthEndpoints(service), strict=service.settings.strict_fields)
    return router.build_routes(_HEALTH_OPERATIONS)


class HealthEndpoints:
    """Handles the requests for the operator of the server."""

    def __init__(self, service: Service) -> None:
        """Describe the state of ``service``."""
        self._service = service

    async def is_healthy(self) -> Reply[HealthDocument]:
        """Check whether requests are accepted, as on other inference servers."""
        ready = self._service.readiness.is_ready
        document = HealthDocument("ok" if ready else "unavailable")
        return Reply(document) if ready else _reply_unavailable(document)

    async def read_version(self) -> VersionDocument:
        """Return the version of the server."""
        return VersionDocument(__version__)

    async def is_alive(self) -> PlainTextResponse:
        """Check that the server answers."""
        return PlainTextResponse("ok\n", headers=NO_STORE)

    async def is_ready(self) -> Reply[ReadinessDocument]:
        """Check whether jobs are accepted."""
        document = self._service.readiness.document
        return Reply(document) if document.ready else _reply_unavailable(document)

    def read_metrics(self) -> PlainTextResponse:
        """Return the metrics, in the text format of Prometheus."""
        text = self._service.metrics.render(self._take_snapshot)
        return PlainTextResponse(text, headers=NO_STORE, media_type=CONTENT_TYPE)

    def _take_snapshot(self) -> tuple[str, EngineSnapshot] | None:
        engine = self._service.engine
        return engine.base_name, engine.take_snapshot()


_Document = TypeVar("_Document")


def _reply_unavailable(document: _Document) -> Reply[_Document]:
    return Reply(document, {"Retry-After": str(RETRY_SECONDS)}, 503)


_HEALTH_OPERATIONS = (
    Operation(
        "GET",
        "/health",
        HealthEndpoints.is_healthy,
        "operation",
        same_form_statuses=(503,),
        is_public=True,
    ),
    Operation("GET", "/version", HealthEndpoints.read_version, "operation", is_public=True),
    Operation("GET", "/healthz", HealthEndpoints.is_alive, "operation", is_public=True),
    Operation(
        "GET",
        "/readyz",
        HealthEndpoints.is_ready,
        "operation",
        same_form_statuses=(503,),
        is_public=True,
    ),
    Operation("GET", "/metrics", HealthEndpoints.read_metrics, "operation"),
)
OPERATIONS = (
    *openai.OPERATIONS,
    *models.OPERATIONS,
    *anthropic.OPERATIONS,
    *native.OPERATIONS,
    *_HEALTH_OPERATIONS,
)
PUBLIC_PATHS = frozenset({one.path for one in OPERATIONS if one.is_public} | {OPENAPI_PATH})
"""Paths that need neither a key nor a ready engine; they reveal nothing secret."""
_NO_SECURITY: tuple[JsonObject, ...] = ({},)
_COMMON_STATUSES = (400, 401, 403, 408, 413, 414, 415, 421, 429, 431, 500, 503)
_STATUS_DESCRIPTIONS = {
    200: "Done.",
    202: "Accepted; not finished yet.",
    400: "The request is invalid.",
    401: "An API key is required: it is missing, wrong, expired or revoked.",
    403: "The request comes from a page of another site, the key lacks the right, or an expert is "
    "not signed by a trusted key.",
    404: "Not found, or not visible to the caller.",
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
_SECURITY_SCHEMES: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, `xpk_…`."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe_api(*, keyed: bool) -> ApiDescription:
    """Return the description of the API; ``keyed``: keys are required."""
    described = ApiDescription(
        title="expertctl serve",
        description="Generation with experts, through OpenAI's chat completions and completions, "
        "Anthropic's messages, and a native API.",
        common_statuses=_COMMON_STATUSES,
        status_descriptions=_STATUS_DESCRIPTIONS,
        list_error_types=list_error_types,
        security_schemes=_SECURITY_SCHEMES,
        security=({"bearer": []}, {"key": []}),
        public_security=_NO_SECURITY,
        name_operation=_to_camel_case,
        first_types=(OwnError, OpenAIError, AnthropicError),
        schemas=load_file_schemas(),
    )
    return described if keyed else replace(described, security=_NO_SECURITY)


def _to_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def build_openapi_routes(service: Service) -> list[BaseRoute]:
    """Return the route of the OpenAPI document."""
    url, strict = service.settings.public_url, service.settings.strict_fields
    by_keyed = {
        keyed: _encode_openapi(keyed=keyed, url=url, strict=strict) for keyed in (False, True)
    }

    async def describe(_: Request) -> Response:
        return Response(by_keyed[service.keys.are_required], media_type=JSON_MEDIA_TYPE)

    return [Route(OPENAPI_PATH, describe, methods=["GET"])]


@cache
def _encode_openapi(*, keyed: bool, url: str, strict: bool) -> bytes:
    document = build_openapi(describe_api(keyed=keyed), OPERATIONS, url=url, strict=strict)
    return msgspec.json.encode(document)
