"""A path with a slash at its end means the same as the path without it.

Some clients add one. They are answered at once: a redirect would make most of them send a GET.
"""

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """ASGI middleware that removes one slash from the end of a path."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``; the path was checked before."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path.endswith("/") and path.rstrip("/"):
            scope = {**scope, "path": path[:-1]}
            if raw := scope.get("raw_path"):
                scope["raw_path"] = raw[:-1]
        await self._app(scope, receive, send)
