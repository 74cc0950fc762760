"""What the registry counts and logs of its requests, and how it says that it failed."""

import secrets

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from expertctl.errors import ExpertError
from expertctl.http.request_log import Exchange, RequestLog, route_of
from registry_server.access.identity import ANONYMOUS, Identity
from registry_server.errors import error_response
from registry_server.operation.log import REQUESTS
from registry_server.registry import Registry
from registry_server.web.pages import error_page, wants_page


def request_log(app: ASGIApp, registry: Registry) -> RequestLog:
    """Watch the application of a registry."""
    return RequestLog(app, RegistryWatch(registry))


class RegistryWatch:
    """Counts in the metrics of the registry."""

    log = REQUESTS
    id_headers: tuple[str, ...] = ("X-Request-Id",)

    def __init__(self, registry: Registry) -> None:
        """Watch the requests to one registry."""
        self.registry = registry

    def new_id(self) -> str:
        """Return the id of a request."""
        return secrets.token_hex(8)

    def begun(self) -> None:
        """Count a request that is being answered."""
        self.registry.metrics.running.inc()

    def ended(self, scope: Scope, exchange: Exchange) -> None:
        """Count and log a request that was answered."""
        self.registry.metrics.running.dec()
        identity = scope["state"].get("identity")
        self.registry.metrics.answered(
            method=scope["method"],
            route=route_of(scope),
            status=exchange.status,
            seconds=exchange.seconds,
            received=exchange.received,
            sent=exchange.sent,
        )
        fields = exchange.fields(scope) | {
            "user": identity.name if isinstance(identity, Identity) else None,
            "address": _address(scope, identity),
        }
        REQUESTS.info("request", extra={"fields": fields})

    def apology(self, scope: Scope, exchange: Exchange) -> Response:
        """Return the answer to an unexpected error."""
        hint = f"tell whoever runs this registry the request {exchange.id}"
        error = ExpertError("the registry failed to answer this", hint=hint)
        if wants_page(scope):
            return error_page(self.registry, ANONYMOUS, error)
        return error_response(error, scope, self.registry.settings)


def _address(scope: Scope, identity: object) -> str | None:
    if isinstance(identity, Identity) and identity.address:
        return identity.address
    client = scope.get("client")
    return str(client[0]) if client else None
