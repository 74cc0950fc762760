"""Health checks and metrics: ``/healthz``, ``/readyz`` and ``/metrics``.

Each request to ``/readyz`` runs all checks again, so a missing or full disk is noticed at once. The
first two are public and name problems without paths. Metrics are for admins, and without a token
for this machine itself if no proxy is in front of the registry.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from anyio import to_thread
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import ExpertError, ForbiddenError, UnauthenticatedError
from expertctl.http.server import is_loopback
from registry_server.access.rights import Action, Identity
from registry_server.database.tables import USERS
from registry_server.operation.metrics import CONTENT_TYPE
from registry_server.registry import Registry, check_index_key
from registry_server.settings import ServerSettings


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
