"""What a request to the registry must be like: its names, its pages, and how large a body may be.

Only writing needs a page of our own: a foreign page cannot see what it makes a browser read.
"""

from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from expertctl.http.limits import STALL_SECONDS, Bounds, Refusal, RequestLimits, names_of
from expertctl.http.listening import is_loopback
from registry_server.errors import error_response
from registry_server.settings import Limits, ServerSettings


def request_limits(
    app: ASGIApp, settings: ServerSettings, *, stall_seconds: float = STALL_SECONDS
) -> RequestLimits:
    """Guard the application of a registry."""
    bounds = Bounds(
        names=names_of(settings.host, settings.public_url),
        addresses=not is_loopback(settings.host),
        origins=frozenset({settings.public_url}),
        body_limit=partial(_body_limit, settings.limits),
        refuse=partial(_refused, settings),
        whose="this registry",
        host_hint="set `url` in registry.toml to the address that users see",
        origin_hint="set `url` in registry.toml to the address of the page that asks",
        stall_seconds=stall_seconds,
    )
    return RequestLimits(app, bounds)


def _body_limit(limits: Limits, path: str) -> int | None:
    """Return how many bytes a route takes; blobs have a limit and a quota of their own."""
    if path.startswith("/v2/"):
        if "/blobs/uploads/" in path:
            return None
        if "/manifests/" in path:
            return limits.manifest_bytes
    return limits.body_bytes


def _refused(settings: ServerSettings, refusal: Refusal, scope: Scope) -> Response:
    return error_response(refusal.error, scope, settings, status=refusal.status)
