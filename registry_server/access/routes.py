"""``/token``: where container clients change a token for a session limited to what they ask.

The flow of docker's token authentication: a 401 names this address as its realm, the client asks
here with Basic, or without a login, and goes back with the session as its bearer token.
"""

from datetime import UTC, datetime

from anyio import to_thread
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import ForbiddenError, NotFoundError, UnauthenticatedError
from registry_server.access import rights
from registry_server.access.authentication import identity_of
from registry_server.access.identity import Identity, Scope
from registry_server.access.sessions import SECONDS, SessionKey, asked_scopes
from registry_server.registry import Registry


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the token endpoint."""
    key = SessionKey.derive(registry.index_key)

    async def token(request: Request) -> Response:
        identity = identity_of(request)
        asked = asked_scopes(request.query_params.getlist("scope"))
        granted = await to_thread.run_sync(_granted, registry, identity, asked)
        return _answer(key.issue(identity, granted))

    return [Route("/token", token, methods=["GET"])]


def _granted(registry: Registry, identity: Identity, asked: list[Scope]) -> list[Scope]:
    """What is not allowed is left out silently, as the protocol demands."""
    with registry.database.read() as connection:
        return [scope for scope in asked if _allows(connection, identity, scope)]


def _allows(connection: Connection, identity: Identity, scope: Scope) -> bool:
    assert scope.namespace is not None
    try:
        rights.authorise(connection, identity, scope.action, scope.namespace, scope.package)
    except (UnauthenticatedError, ForbiddenError, NotFoundError):
        return False
    return True


def _answer(secret: str) -> Response:
    now = datetime.now(UTC).replace(microsecond=0, tzinfo=None).isoformat()
    body = {"token": secret, "access_token": secret, "expires_in": SECONDS, "issued_at": f"{now}Z"}
    return JSONResponse(body, headers={"Cache-Control": "no-store"})
