"""The status page, its files, and the numbers that it asks for.

The page holds nothing secret, so anybody may load it; the numbers need a key if the server demands
keys. The page loads nothing from elsewhere and runs no script but its own.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from anyio import to_thread
from msgspec import json
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.errors import UnknownAddressError
from expertctl.schema.strict_json import JsonObject
from expertctl.server.service import Service
from expertctl.server.status_page.figures import FirstTokens, figures
from expertctl.server.status_page.residents import residents

PATH = "/status"
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
"""The files beside the page, with their media types."""
OPEN = (PATH, *(f"{PATH}/{name}" for name in FILES))
"""Paths that a browser loads before a user can type a key."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
    "Cache-Control": "no-cache",
}
_FOLDER = Path(__file__).parent / "static"


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the page, its files and numbers; ``/`` redirects to the page."""
    numbers = _Numbers(service)
    return [
        Route("/", _to_page, methods=["GET"]),
        Route(PATH, _page, methods=["GET"]),
        Route(f"{PATH}/data", numbers.now, methods=["GET"]),
        Route(f"{PATH}/experts", numbers.experts, methods=["GET"]),
        Route(f"{PATH}/{{name}}", _file, methods=["GET"]),
    ]


class _Numbers:
    """Reads the numbers of the engine; an id tells one run of the server from another."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._run, self._began = secrets.token_hex(8), time.monotonic()

    async def now(self, _: Request) -> Response:
        """Answer with the numbers of this moment."""
        return _json(await to_thread.run_sync(self._read))

    async def experts(self, _: Request) -> Response:
        """Answer with the experts installed and in memory; this may wait for a plan."""
        engine = self._service.engine
        experts = await asyncio.wrap_future(engine.experts())
        return _json(residents(experts, engine.snapshot().totals.experts))

    def _read(self) -> JsonObject:
        engine = self._service.engine
        count, seconds = self._service.metrics.first_tokens()
        return {
            "version": __version__,
            "base": engine.base_name,
            "context": engine.context,
            "queue": self._service.settings.batch.queue,
            "run": self._run,
            "uptime": time.monotonic() - self._began,
            **figures(engine.snapshot(), FirstTokens(count=count, seconds=seconds)),
        }


def _json(document: JsonObject) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return Response(json.encode(document), headers=headers, media_type="application/json")


async def _to_page(_: Request) -> Response:
    return RedirectResponse(PATH, 307, HEADERS)


async def _page(_: Request) -> Response:
    return Response(_bytes_of(PAGE), headers=HEADERS, media_type="text/html")


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise UnknownAddressError("there is nothing at this address")
    return Response(_bytes_of(name), headers=HEADERS, media_type=FILES[name])


@cache
def _bytes_of(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
