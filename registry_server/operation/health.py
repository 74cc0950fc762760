"""``/healthz``, ``/readyz`` and ``/metrics``.

The first two are for anybody and name what is wrong without a path. Metrics are for
admins; without a token only for this machine itself, where no proxy stands before the registry.
"""

import logging

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import ForbiddenError, UnauthenticatedError
from expertctl.http.listening import is_loopback
from registry_server.access.identity import Action, Identity
from registry_server.operation.metrics import CONTENT_TYPE
from registry_server.operation.readiness import look
from registry_server.registry import Registry
from registry_server.settings import ServerSettings

_LOG = logging.getLogger("registry_server.health")
_FRESH = {"Cache-Control": "no-store"}


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the addresses for whoever runs the registry."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_FRESH)

    async def readyz(_: Request) -> Response:
        checks = await to_thread.run_sync(look, registry)
        bad = [check for check in checks if not check.ok]
        for check in bad:
            fields = {"check": check.name, "problem": check.problem}
            _LOG.error("not ready", extra={"fields": fields})
        body = {
            "ready": not bad,
            "checks": {check.name: "ok" if check.ok else check.fact for check in checks},
        }
        return JSONResponse(body, 503 if bad else 200, _FRESH)

    async def metrics(request: Request) -> Response:
        _demand_operator(request, alone=_stands_alone(registry.settings))
        text = await to_thread.run_sync(registry.metrics.exposition, registry.database)
        return Response(text, headers=_FRESH, media_type=CONTENT_TYPE)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def _stands_alone(settings: ServerSettings) -> bool:
    """Tell whether no proxy passes requests on: then a local connection is a local client."""
    return settings.url is None and not settings.trusted_proxies


def _demand_operator(request: Request, *, alone: bool) -> None:
    """Demand an admin's token, or a request of this machine that no proxy can have passed on.

    Raises:
        UnauthenticatedError: when nobody is named.
        ForbiddenError: when it is somebody else.
    """
    identity: Identity = request.state.identity
    if identity.admin and identity.covers(Action.ADMIN, None, None):
        return
    if identity.user_id is not None:
        raise ForbiddenError("metrics are for admins")
    peer = request.client.host if request.client else ""
    forwarded = {"x-forwarded-for", "forwarded", "x-real-ip", "via"} & set(request.headers)
    if forwarded or not (alone and is_loopback(peer)):
        raise UnauthenticatedError("metrics are for admins, and for the machine itself")
