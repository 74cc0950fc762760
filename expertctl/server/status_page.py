"""The status page, its static files, and ``/status/data`` and ``/status/experts``, which feed it.

Sizes are in bytes, times in seconds. Counts are since the start, so the difference of two readings
shows what happened in between.

The page contains nothing secret, so it is public; its data needs a key if the server requires keys.
The page loads nothing from other sites and runs only its own scripts.
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
from msgspec import json
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.engine.serving.request import AdapterStatus, EngineSnapshot, ExpertJobCounts
from expertctl.errors import UnknownAddressError
from expertctl.schema.strict_json import JsonObject, JsonValue
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
PUBLIC_PATHS = (STATUS_PATH, *(f"{STATUS_PATH}/{name}" for name in FILES))
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


def build_routes(service: Service) -> list[BaseRoute]:
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
