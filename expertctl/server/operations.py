"""All operations of the generation server, their OpenAPI document, and the routes for operators.

``/health``, ``/healthz``, ``/readyz`` and ``/version`` are public. ``/healthz`` says that the
process answers; ``/health``, which clients of other inference servers poll, and ``/readyz`` say
that requests are accepted. ``/metrics`` names experts and their load, so it needs a key where the
server does.

The status page is fed by ``/status/data`` and ``/status/experts``. Sizes are in bytes, times in
seconds. Counts are since the start, so the difference of two readings shows what happened in
between. The page contains nothing secret, so it is public; its data needs a key if the server
requires keys. The page loads nothing from other sites and runs only its own scripts.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from anyio import to_thread
from msgspec import json
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.engine.serving.request import AdapterStatus, EngineSnapshot, ExpertJobCounts
from expertctl.errors import UnknownAddressError
from expertctl.http.openapi import ApiDescription, build_openapi
from expertctl.http.operation import (
    JSON_MEDIA_TYPE,
    NO_STORE,
    OPENAPI_PATH,
    RETRY_SECONDS,
    Operation,
    Reply,
)
from expertctl.schema.strict_json import JsonObject, JsonValue
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
        keyed: msgspec.json.encode(
            build_openapi(describe_api(keyed=keyed), OPERATIONS, url=url, strict=strict)
        )
        for keyed in (False, True)
    }

    async def describe(_: Request) -> Response:
        return Response(by_keyed[service.keys.are_required], media_type=JSON_MEDIA_TYPE)

    return [Route(OPENAPI_PATH, describe, methods=["GET"])]


MAX_LISTED = 200
"""Maximum number of experts listed; the others are only counted."""


def list_experts_in_memory(experts: Sequence[AdapterStatus], counts: ExpertJobCounts) -> JsonObject:
    """Return the number of usable experts, and those whose weights are in memory, by name."""
    here = sorted((one for one in experts if one.in_memory), key=lambda one: one.expert.ref)
    listed = list[JsonValue](_describe_expert(one, counts) for one in here[:MAX_LISTED])
    able = sum(one.fits and not one.expert.revoked for one in experts)
    return {"able": able, "in_memory": len(here), "listed": listed}


def _describe_expert(here: AdapterStatus, counts: ExpertJobCounts) -> JsonObject:
    ref = here.expert.ref
    return {"ref": ref, "size": here.expert.stored.size, "requests": counts.get(ref)}


def describe_routed_experts(now: EngineSnapshot) -> JsonObject | None:
    """Return the ``routed`` object; None if the base has no routed experts.

    Layers are listed only while counting is on; `/moe` can turn it off.
    """
    if now.routed is None:
        return None
    residence, did = now.routed.residence, now.routed.activity
    return {
        "miss": residence.miss,
        "cold": residence.cold,
        "experts": residence.total,
        "whole": residence.is_whole,
        "in_memory": residence.blocks,
        "loads": did.loads,
        "read_bytes": did.read_bytes,
        "waited": did.waited_ms / 1e3,
        "mass": did.router_weight,
        "skipped": did.skipped_weight,
        "layers": _list_layers(now, experts=residence.experts),
    }


def _list_layers(now: EngineSnapshot, *, experts: int) -> list[JsonValue]:
    if now.observed is None or now.observed.mode == "off":
        return []
    return [
        {
            "layer": number,
            "hits": layer.hits,
            "misses": layer.misses,
            "swaps": layer.swaps,
            "resident": now.resident_experts.get(number, experts),
            "experts": experts,
        }
        for number, layer in now.observed.layers.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTotals:
    """The number of answers that had a first token, and their summed time to it."""

    count: int
    seconds: float

    def to_json(self) -> JsonObject:
        """Return the ``ttft`` object."""
        return {"count": self.count, "seconds": self.seconds}


def build_figures(now: EngineSnapshot, first_tokens: FirstTokenTotals) -> JsonObject:
    """Return the figures of a snapshot, by subject."""
    kv_held = now.held["kv"]
    return {
        "jobs": _describe_jobs(now),
        "tokens": {
            "prompt": now.counts.prompt_tokens,
            "reused": now.totals.reused_tokens,
            "answer": now.counts.step_rows,
        },
        "steps": {"count": now.counts.steps, "rows": now.counts.step_rows},
        "ttft": first_tokens.to_json(),
        "memory": {
            "limit": now.limit,
            "peak": now.peak,
            "held": {str(purpose): size for purpose, size in now.held.items()},
        },
        "kv": {
            "limit": now.kv_limit,
            "in_use": now.kv_in_use,
            "kept": max(0, kv_held - now.kv_in_use),
            "kept_limit": now.kv_kept_limit,
        },
        "tiers": {tier: dict(asdict(traffic)) for tier, traffic in now.traffic.items()},
        "experts": _list_active_experts(now),
        "routed": describe_routed_experts(now),
    }


def _describe_jobs(now: EngineSnapshot) -> JsonObject:
    totals = now.totals
    return {
        "waiting": now.waiting,
        "preparing": now.preparing,
        "running": now.running,
        "rows": now.rows,
        "finished": totals.finished,
        "failed": totals.failed,
        "cancelled": totals.cancelled,
        "refused": totals.refused,
    }


def _list_active_experts(now: EngineSnapshot) -> list[JsonValue]:
    """List the experts of running sequences and prepared jobs, busiest first.

    An expert counts once per plan, however often the plan names it.
    """
    running, prepared = _count_experts(now.running_plans), _count_experts(now.waiting_plans)
    busiest = sorted(running | prepared, key=lambda ref: (-running[ref], -prepared[ref], ref))
    return [
        {
            "ref": ref,
            "running": running[ref],
            "prepared": prepared[ref],
            "requests": now.totals.experts.get(ref),
        }
        for ref in busiest
    ]


def _count_experts(plans: Iterable[tuple[str, ...]]) -> Counter[str]:
    return Counter(ref for plan in plans for ref in set(plan))


STATUS_PATH = "/status"
PAGE = "page.html"
FILES: Mapping[str, str] = {
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "elements.js": "text/javascript",
    "figures.js": "text/javascript",
    "numbers.js": "text/javascript",
    "routed.js": "text/javascript",
    "sample.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
"""The static files of the page → their media types."""
STATUS_PUBLIC_PATHS = (STATUS_PATH, *(f"{STATUS_PATH}/{name}" for name in FILES))
"""Paths that a browser loads before the user can enter a key."""
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
    "Cache-Control": "no-cache",
}
_FOLDER = Path(__file__).parent / "static"


def build_status_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the page, its files and data; ``/`` redirects to the page."""
    numbers = _StatusEndpoints(service)
    return [
        Route("/", _redirect_to_page, methods=["GET"]),
        Route(STATUS_PATH, _serve_page, methods=["GET"]),
        Route(f"{STATUS_PATH}/data", numbers.read_figures, methods=["GET"]),
        Route(f"{STATUS_PATH}/experts", numbers.experts, methods=["GET"]),
        Route(f"{STATUS_PATH}/{{name}}", _serve_file, methods=["GET"]),
    ]


class _StatusEndpoints:
    """Serves the figures of the engine; a random id identifies this run of the server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._run_id, self._started_at = secrets.token_hex(8), time.monotonic()

    async def read_figures(self, _: Request) -> Response:
        """Return the current figures."""
        return _json_response(await to_thread.run_sync(self._build_document))

    async def experts(self, _: Request) -> Response:
        """Return the experts installed and in memory; may wait for a plan in progress."""
        engine = self._service.engine
        experts = await asyncio.wrap_future(engine.list_experts())
        return _json_response(
            list_experts_in_memory(experts, engine.take_snapshot().totals.experts)
        )

    def _build_document(self) -> JsonObject:
        engine = self._service.engine
        count, seconds = self._service.metrics.read_first_token_totals()
        return {
            "version": __version__,
            "base": engine.base_name,
            "context": engine.context,
            "queue": self._service.settings.engine.batching.queue,
            "run": self._run_id,
            "uptime": time.monotonic() - self._started_at,
            **build_figures(engine.take_snapshot(), FirstTokenTotals(count=count, seconds=seconds)),
        }


def _json_response(document: JsonObject) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return Response(json.encode(document), headers=headers, media_type="application/json")


async def _redirect_to_page(_: Request) -> Response:
    return RedirectResponse(STATUS_PATH, 307, HEADERS)


async def _serve_page(_: Request) -> Response:
    return Response(_read_static(PAGE), headers=HEADERS, media_type="text/html")


async def _serve_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise UnknownAddressError("there is nothing at this address")
    return Response(_read_static(name), headers=HEADERS, media_type=FILES[name])


@cache
def _read_static(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
