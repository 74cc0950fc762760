"""``/healthz``, ``/readyz`` and ``/metrics``.

The first two are for anybody. Metrics name experts and how busy they are, so they want a key where
the server does.
"""

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.engine.serving.snapshot import Snapshot
from expertctl.server.metrics import CONTENT_TYPE
from expertctl.server.service import Service
from expertctl.server.statuses import RETRY_SECONDS

_FRESH = {"Cache-Control": "no-store"}


def routes(service: Service) -> list[BaseRoute]:
    """Return the addresses for the operator of the server."""

    def read() -> tuple[str, Snapshot] | None:
        return service.engine.base_name, service.engine.snapshot()

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_FRESH)

    async def readyz(_: Request) -> Response:
        readiness = service.readiness
        body = msgspec.to_builtins(readiness.document)
        again = {} if readiness.is_ready else {"Retry-After": str(RETRY_SECONDS)}
        return JSONResponse(body, 200 if readiness.is_ready else 503, {**_FRESH, **again})

    async def metrics(_: Request) -> Response:
        text = await to_thread.run_sync(service.metrics.exposition, read)
        return Response(text, headers=_FRESH, media_type=CONTENT_TYPE)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
