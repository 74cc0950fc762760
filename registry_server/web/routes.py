"""The pages: home, search, a package, a version, and what is shown when there is none.

They show what the API answers, to the same people: whoever may not read a namespace gets the same
page as for one that does not exist.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlencode

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from expertctl.digest import Digest
from expertctl.errors import ExpertError, NotFoundError, UnauthenticatedError, UsageError
from expertctl.reference import PackageName, Reference
from expertctl.schema.manifest import Manifest
from expertctl.schema.shape import shape, shape_json
from registry_server.access.authentication import identity_of
from registry_server.api.operation import Context
from registry_server.api.package_pages import FileFacts, package_page, version_page
from registry_server.api.packages import stats
from registry_server.api.search import MAX_QUERY, SearchQuery, find_packages
from registry_server.registry import Registry
from registry_server.web.markdown import MAX_CHARACTERS, render, safe_link
from registry_server.web.pages import (
    HEADERS,
    MACHINES,
    STATIC,
    error_page,
    page,
    shown,
    static_file,
)

README = "README.md"
_LISTED = 20
_ON_HOME = 8
_VERSIONS = 100
_Handler = Callable[[Request], Awaitable[Response]]
_Show = Callable[[Registry, Request], Response]


@dataclass(frozen=True, slots=True)
class Link:
    """How a package names another, and that one's page when it is in this registry."""

    text: str
    path: str | None


class Elsewhere(Route):
    """Every address that no other route answers, but for those of programs."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Leave addresses of programs to the errors that they understand."""
        path = str(scope.get("path", ""))
        if any(path == start or path.startswith(f"{start}/") for start in MACHINES):
            return Match.NONE, {}
        return super().matches(scope)


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the pages; the last one answers every other address."""
    shows: tuple[tuple[str, _Show], ...] = (
        ("/", _home),
        ("/search", _search),
        ("/login", _login),
        ("/packages/{namespace}/{name}", _package),
        ("/packages/{namespace}/{name}/{version}", _package),
    )
    pages = [Route(path, _handler(registry, show), methods=["GET"]) for path, show in shows]
    static = Route("/static/{name}", _handler(registry, _static), methods=["GET"])
    elsewhere = Elsewhere("/{path:path}", _handler(registry, _nothing), methods=["GET"])
    return [*pages, static, elsewhere]


def _handler(registry: Registry, show: _Show) -> _Handler:
    """Run what makes a page in a thread, and tell an error as a page."""

    async def handle(request: Request) -> Response:
        try:
            return await to_thread.run_sync(partial(show, registry, request))
        except ExpertError as error:
            return error_page(registry, identity_of(request), error)

    return handle


def _home(registry: Registry, request: Request) -> Response:
    identity = identity_of(request)
    with registry.database.read() as connection:
        found = find_packages(connection, identity, SearchQuery(limit=_ON_HOME))
    counts = stats(Context(registry, identity))
    return page(registry, "home.html", identity, {"recent": found.results, "counts": counts})


def _search(registry: Registry, request: Request) -> Response:
    identity = identity_of(request)
    query, cursor = (request.query_params.get(name, "") for name in ("q", "cursor"))
    if len(query) > MAX_QUERY:
        raise UsageError(f"search for {MAX_QUERY} characters at most")
    wanted = {"q": query, "limit": _LISTED, "cursor": cursor}
    try:
        asked = shape(wanted, SearchQuery)
    except msgspec.ValidationError as error:
        raise UsageError("there is no such page of results") from error
    with registry.database.read() as connection:
        found = find_packages(connection, identity, asked)
    more = f"/search?{urlencode({'q': query, 'cursor': found.next})}" if found.next else None
    values: dict[str, object] = {"query": query, "results": found.results, "next": more}
    return page(registry, "search.html", identity, values)


def _login(_: Registry, request: Request) -> Response:
    """Have a browser ask for a token, which it then sends with every page."""
    if identity_of(request).user_id is None:
        raise UnauthenticatedError("log in to see what is not for everybody")
    return RedirectResponse("/", 303, {"Cache-Control": "no-store"})


def _package(registry: Registry, request: Request) -> Response:
    identity, asked = identity_of(request), request.path_params
    name = _name_of(asked["namespace"], asked["name"])
    with registry.database.read() as connection:
        package = package_page(connection, identity, name)
        version = asked.get("version") or package.latest or package.versions[0].version
        release = version_page(connection, identity, name, version)
    manifest = shape_json(release.manifest, Manifest)
    composition = manifest.composition
    values = {
        "package": package,
        "versions": package.versions[:_VERSIONS],
        "namespace": name.namespace,
        "short": name.name,
        "release": release,
        "manifest": manifest,
        "files": release.files,
        "readme": _readme(registry, release.files),
        "homepage": safe_link(manifest.homepage),
        "requires": [_link(text, name) for text in composition.requires],
        "conflicts": [_link(text, name) for text in composition.conflicts],
    }
    return page(registry, "package.html", identity, values)


def _name_of(namespace: str, name: str) -> PackageName:
    try:
        return PackageName.parse(f"{namespace}/{name}")
    except ExpertError as error:
        raise NotFoundError("there is no such package") from error


def _link(text: str, own: PackageName) -> Link:
    """Return a link to a package of this registry; one of another is only named."""
    reference = Reference.parse(text)
    path = f"/packages/{reference.package}"
    return Link(text, path if reference.registry is None and reference.package != own else None)


def _readme(registry: Registry, files: list[FileFacts]) -> str | None:
    found = next((file for file in files if file.path == README), None)
    if found is None:
        return None
    with registry.storage.open(Digest.parse(found.digest)) as stream:
        data = stream.read(4 * MAX_CHARACTERS)
    return render(shown(data.decode("utf-8", "replace")))


def _static(_: Registry, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise NotFoundError("there is nothing at this address")
    caching = {"Cache-Control": "public, max-age=86400"}
    return Response(static_file(name), 200, {**HEADERS, **caching}, STATIC[name])


def _nothing(_: Registry, __: Request) -> Response:
    raise NotFoundError("there is nothing at this address")
