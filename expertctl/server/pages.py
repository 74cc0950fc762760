"""The pages for browsers: the status page with its data, a page to try the server, and the API.

The pages contain nothing secret, so they are public; what they show comes from the API and from
``/status/data`` and ``/status/experts``, which need a key if the server requires keys. They load
nothing from other sites and run only our own scripts; the page of the API runs none.

Of the figures of the status page, sizes are in bytes and times in seconds. Counts are since the
start, so the difference of two readings shows what happened in between.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from anyio import to_thread
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from msgspec import json
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.engine.serving.request import AdapterStatus, EngineSnapshot, ExpertJobCounts
from expertctl.errors import UnknownAddressError
from expertctl.http.openapi import build_openapi, build_reference
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.operations import OPERATIONS, describe_api
from expertctl.server.service import Service

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


STATUS_PATH, CHAT_PATH, DOCS_PATH = "/status", "/chat", "/docs"
STATIC_PATH = "/static"
FILES: Mapping[str, str] = {
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "chat.js": "text/javascript",
    "elements.js": "text/javascript",
    "figures.js": "text/javascript",
    "numbers.js": "text/javascript",
    "routed.js": "text/javascript",
    "sample.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
"""The static files of the pages → their media types."""
PUBLIC_PATHS = frozenset(
    {"/", STATUS_PATH, CHAT_PATH, DOCS_PATH, *(f"{STATIC_PATH}/{name}" for name in FILES)}
)
"""Paths that a browser loads before the user can enter a key."""
_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": f"{_POLICY}; script-src 'self'; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
    "Cache-Control": "no-cache",
}
_DOCS_HEADERS = {**HEADERS, "Content-Security-Policy": _POLICY}
"""Of a page without scripts."""
_FOLDER = Path(__file__).parent


def build_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the pages, their files and data; ``/`` redirects to the status page."""
    numbers, docs = _StatusEndpoints(service), _DocsEndpoint(service)
    return [
        Route("/", _redirect_to_status, methods=["GET"]),
        Route(STATUS_PATH, _serve_status_page, methods=["GET"]),
        Route(f"{STATUS_PATH}/data", numbers.read_figures, methods=["GET"]),
        Route(f"{STATUS_PATH}/experts", numbers.experts, methods=["GET"]),
        Route(CHAT_PATH, _serve_chat_page, methods=["GET"]),
        Route(DOCS_PATH, docs.serve_page, methods=["GET"]),
        Route(f"{STATIC_PATH}/{{name}}", _serve_file, methods=["GET"]),
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


class _DocsEndpoint:
    """Serves the OpenAPI document as a page; it changes with the first API key."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pages: dict[bool, bytes] = {}

    async def serve_page(self, _: Request) -> Response:
        """Return the page."""
        keyed = self._service.keys.are_required
        if keyed not in self._pages:
            self._pages[keyed] = await to_thread.run_sync(self._render, keyed)
        return Response(self._pages[keyed], headers=_DOCS_HEADERS, media_type="text/html")

    def _render(self, keyed: bool) -> bytes:
        settings, api = self._service.settings, describe_api(keyed=keyed)
        document = build_openapi(
            api, OPERATIONS, url=settings.public_url, strict=settings.strict_fields
        )
        return _render_page("docs", api=build_reference(document, api))


async def _redirect_to_status(_: Request) -> Response:
    return RedirectResponse(STATUS_PATH, 307, HEADERS)


async def _serve_status_page(_: Request) -> Response:
    return _page_response("status")


async def _serve_chat_page(_: Request) -> Response:
    return _page_response("chat")


async def _serve_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise UnknownAddressError("there is nothing at this address")
    return Response(_read_static(name), headers=HEADERS, media_type=FILES[name])


@cache
def _read_static(name: str) -> bytes:
    return (_FOLDER / "static" / name).read_bytes()


def _page_response(name: str) -> Response:
    return Response(_render_static_page(name), headers=HEADERS, media_type="text/html")


@cache
def _render_static_page(name: str) -> bytes:
    return _render_page(name)


def _render_page(name: str, **values: object) -> bytes:
    template = _load_templates().get_template(f"{name}.html")
    return template.render(page=name, **values).encode()


@cache
def _load_templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
