"""The generation server as one ASGI application, made from the areas below this folder.

An error inside becomes an answer here, in the shape of the API that was asked.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from expertctl.errors import ExpertError, NotFoundError, UsageError
from expertctl.server.error_bodies import error_response
from expertctl.server.service import Service

LEFT = 499
"""The status, in the log alone, of a request whose client went away before the answer."""


def create_app(service: Service) -> Starlette:
    """Return the application of an engine that is open; who opened it closes it."""
    app = Starlette(
        routes=_routes(service),
        exception_handlers={
            ExpertError: _refused,
            HTTPException: _unrouted,
            ClientDisconnect: _left,
        },
    )
    app.state.service = service
    app.router.redirect_slashes = False
    return app


def _routes(service: Service) -> list[BaseRoute]:
    return []


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExpertError)
    return error_response(error, request.scope)


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        fact = UsageError(f"{request.method} is not allowed here")
        answer = error_response(fact, request.scope, status=405)
        answer.headers["Allow"] = (error.headers or {}).get("Allow", "")
        return answer
    return error_response(NotFoundError("there is nothing at this address"), request.scope)


async def _left(request: Request, _: Exception) -> Response:
    return Response(status_code=LEFT)
