"""``/health``, ``/healthz``, ``/readyz``, ``/version`` and ``/metrics``.

All but the last are for anybody. ``/healthz`` tells that the process answers; ``/health``, which
clients of other inference servers wait for, and ``/readyz`` tell that it takes requests. Metrics
name experts and how busy they are, so they want a key where the server does.
"""

from typing import Literal

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.engine.serving.snapshot import Snapshot
from expertctl.server.metrics import CONTENT_TYPE
from expertctl.server.reply import json_reply
from expertctl.server.service import Service
from expertctl.server.statuses import RETRY_SECONDS

_FRESH = {"Cache-Control": "no-store"}


class HealthDocument(msgspec.Struct, frozen=True):
    """Whether requests are answered."""

    status: Literal["ok", "unavailable"]


class VersionDocument(msgspec.Struct, frozen=True):
    """The version of the server."""

    version: str


def routes(service: Service) -> list[BaseRoute]:
    """Return the addresses for the operator of the server."""

    def read() -> tuple[str, Snapshot] | None:
        return service.engine.base_name, service.engine.snapshot()

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_FRESH)

    async def health(_: Request) -> Response:
        ready = service.readiness.is_ready
        again = {} if ready else {"Retry-After": str(RETRY_SECONDS)}
        body = HealthDocument("ok" if ready else "unavailable")
        return json_reply(body, status=200 if ready else 503, headers=again)

    async def version(_: Request) -> Response:
        return json_reply(VersionDocument(__version__))

    async def readyz(_: Request) -> Response:
        readiness = service.readiness
        body = msgspec.to_builtins(readiness.document)
        again = {} if readiness.is_ready else {"Retry-After": str(RETRY_SECONDS)}
        return JSONResponse(body, 200 if readiness.is_ready else 503, {**_FRESH, **again})

    async def metrics(_: Request) -> Response:
        text = await to_thread.run_sync(service.metrics.exposition, read)
        return Response(text, headers=_FRESH, media_type=CONTENT_TYPE)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
