"""The public pages of the registry: home, browsing, search, packages, publishing, and errors.

They show the documents of the API with the same rights. Without the right to read a namespace, a
page is the same 404 as if the namespace did not exist. The pages for the user of a login are in
`account`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlencode

import msgspec
from anyio import to_thread
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from expertctl.digest import Digest
from expertctl.errors import (
    ExpertError,
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.reference import PackageName, Reference
from expertctl.schema.manifest import Manifest
from expertctl.schema.validation import convert_document, decode_json
from registry_server.access import rights
from registry_server.access.authentication import get_identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import Action, Identity
from registry_server.api.namespaces import describe_namespace
from registry_server.api.packages import FileFacts, describe_package, describe_version
from registry_server.api.schema import ApiContext
from registry_server.api.search import (
    KINDS,
    MAX_OFFSET,
    MAX_QUERY,
    PackageCount,
    SearchQuery,
    count_by_base,
    count_by_kind,
    count_by_namespace,
    find_packages,
    load_stats,
)
from registry_server.errors import is_program_path
from registry_server.registry import Registry
from registry_server.web.rendering import (
    MAX_README_CHARACTERS,
    SECURITY_HEADERS,
    STATIC_FILES,
    check_link,
    read_static_file,
    render_error_page,
    render_markdown,
    render_page,
    replace_control_characters,
)

README = "README.md"
_RESULTS_PER_PAGE = 20
_HOME_RESULTS = 8
_HOME_COUNTS = 12
_BROWSE_COUNTS = 30
_COUNTS_PER_PAGE = 100
_MAX_VERSIONS = 100
_Handler = Callable[[Request], Awaitable[Response]]
PageView = Callable[[Registry, Request], Response]
_CountQuery = Callable[..., list[PackageCount]]
_FACETS: dict[str, tuple[str, _CountQuery]] = {
    "namespaces": ("Namespaces", count_by_namespace),
    "bases": ("Base models", count_by_base),
}


@dataclass(frozen=True, slots=True)
class PackageLink:
    """The name of another package, and the path of its page if it is in this registry."""

    text: str
    path: str | None


class FallbackRoute(Route):
    """Matches all paths without another route, except those of programs."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a page; paths of programs get their own errors."""
        if is_program_path(str(scope.get("path", ""))):
            return Match.NONE, {}
        return super().matches(scope)


def make_page_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the public pages."""
    views: tuple[tuple[str, PageView], ...] = (
        ("/", _show_home),
        ("/browse", _show_browse),
        ("/browse/{facet}", _show_facet),
        ("/search", _show_search),
        ("/publish", _show_publish),
        ("/namespaces/{namespace}", show_namespace),
        ("/packages/{namespace}/{name}", _show_package),
        ("/packages/{namespace}/{name}/{version}", _show_package),
        ("/static/{name}", _show_static),
    )
    return [Route(path, make_handler(registry, view), methods=["GET"]) for path, view in views]


def make_fallback_route(registry: Registry) -> BaseRoute:
    """Return the route of all other paths."""
    return FallbackRoute("/{path:path}", make_handler(registry, _show_not_found), methods=["GET"])


def make_handler(registry: Registry, view: PageView) -> _Handler:
    """Return an endpoint that builds a page in a thread, and shows errors as pages."""

    async def handle(request: Request) -> Response:
        try:
            return await to_thread.run_sync(partial(view, registry, request))
        except ExpertError as error:
            return render_error_page(registry, request, error)

    return handle


def _show_home(registry: Registry, request: Request) -> Response:
    identity = get_identity(request)
    with registry.database.read() as connection:
        values: dict[str, object] = {
            "popular": find_packages(
                connection, identity, SearchQuery(limit=_HOME_RESULTS)
            ).results,
            "counts": load_stats(connection, identity),
            **_load_counts(connection, identity, limit=_HOME_COUNTS),
        }
    return render_page(registry, "home.html", request, values)


def _load_counts(connection: Connection, identity: Identity, *, limit: int) -> dict[str, object]:
    return {
        "kinds": count_by_kind(connection, identity),
        "bases": count_by_base(connection, identity, limit=limit),
        "namespaces": count_by_namespace(connection, identity, limit=limit),
    }


def _show_browse(registry: Registry, request: Request) -> Response:
    identity = get_identity(request)
    with registry.database.read() as connection:
        values = _load_counts(connection, identity, limit=_BROWSE_COUNTS)
        counts = load_stats(connection, identity)
    return render_page(registry, "browse.html", request, {**values, "counts": counts})


def _show_facet(registry: Registry, request: Request) -> Response:
    facet = request.path_params["facet"]
    if facet not in _FACETS:
        raise NotFoundError("there is nothing at this address")
    (title, count), offset = _FACETS[facet], read_offset(request)
    identity, wanted = get_identity(request), _COUNTS_PER_PAGE + 1
    with registry.database.read() as connection:
        found = count(connection, identity, limit=wanted, offset=offset)
    values: dict[str, object] = {
        "facet": facet,
        "title": title,
        "rows": found[:_COUNTS_PER_PAGE],
        **_make_page_links(
            request.url.path,
            {},
            offset=offset,
            size=_COUNTS_PER_PAGE,
            has_more=len(found) == wanted and offset + _COUNTS_PER_PAGE < MAX_OFFSET,
        ),
    }
    return render_page(registry, "facet.html", request, values)


def read_offset(request: Request) -> int:
    """Return the number of rows before the requested page of a list.

    Raises:
        UsageError: when the query parameter ``cursor`` is not one of a link to a page.
    """
    text = request.query_params.get("cursor", "0")
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) >= MAX_OFFSET:
        raise UsageError("there is no such page of results")
    return int(text)


def _make_page_links(
    path: str, parameters: dict[str, str], *, offset: int, size: int, has_more: bool
) -> dict[str, object]:
    """Return the variables ``previous`` and ``next`` of a list; None at its ends."""
    given = {name: value for name, value in parameters.items() if value}

    def link(cursor: int) -> str:
        pairs = urlencode({**given, "cursor": str(cursor)} if cursor else given)
        return f"{path}?{pairs}" if pairs else path

    return {
        "previous": link(max(0, offset - size)) if offset else None,
        "next": link(offset + size) if has_more else None,
    }


def _show_search(registry: Registry, request: Request) -> Response:
    asked = {
        name: request.query_params.get(name, "") for name in ("q", "namespace", "base", "kind")
    }
    if len(asked["q"]) > MAX_QUERY:
        raise UsageError(f"search for at most {MAX_QUERY} characters")
    with registry.database.read() as connection:
        listed = _list_page(connection, request, "/search", asked)
        bases = count_by_base(connection, get_identity(request), limit=_COUNTS_PER_PAGE)
    known = [count.name for count in bases]
    chosen = [asked["base"]] if asked["base"] and asked["base"] not in known else []
    values = {"query": asked["q"], "asked": asked, "kinds": KINDS, "bases": [*chosen, *known]}
    return render_page(registry, "search.html", request, {**values, **listed})


def _list_page(
    connection: Connection, request: Request, path: str, asked: dict[str, str]
) -> dict[str, object]:
    """Return the variables of a list of packages with links to the pages before and after it."""
    offset = read_offset(request)
    cursor = str(offset) if offset else ""
    try:
        wanted = {**asked, "limit": _RESULTS_PER_PAGE, "cursor": cursor}
        query = convert_document(wanted, SearchQuery)
    except msgspec.ValidationError as error:
        raise UsageError("there is no such search") from error
    found = find_packages(connection, get_identity(request), query)
    links = _make_page_links(
        path,
        asked if path == "/search" else {},
        offset=offset,
        size=_RESULTS_PER_PAGE,
        has_more=found.next is not None,
    )
    return {"results": found.results, "total": found.total, "first": offset + 1, **links}


def _show_publish(registry: Registry, request: Request) -> Response:
    return render_page(registry, "publish.html", request, {})


def show_namespace(registry: Registry, request: Request) -> Response:
    """Show the packages, keys and members of a namespace; owners can change the members."""
    identity, name = get_identity(request), request.path_params["namespace"]
    with registry.database.read() as connection:
        row = authorise_page(connection, identity, name)
        values: dict[str, object] = {
            "space": describe_namespace(ApiContext(registry, identity), connection, row),
            "may_manage": identity.covers(Action.MANAGE, row.name)
            and rights.has_right(connection, identity, Action.MANAGE, row),
            **_list_page(connection, request, request.url.path, {"namespace": row.name}),
        }
    return render_page(registry, "namespace.html", request, values)


def authorise_page(
    connection: Connection, identity: Identity, namespace: str, package: str | None = None
) -> NamespaceRow:
    """Return a namespace that ``identity`` may read.

    Raises:
        NotFoundError: when there is none, or it may not; the response is the same.
    """
    try:
        return rights.authorise(connection, identity, Action.READ, namespace, package)
    except (UnauthenticatedError, ForbiddenError, NotFoundError) as error:
        raise NotFoundError(f"there is no such {'package' if package else 'namespace'}") from error


def _show_package(registry: Registry, request: Request) -> Response:
    identity, path_params = get_identity(request), request.path_params
    name = _parse_package_name(path_params["namespace"], path_params["name"])
    offset = read_offset(request)
    with registry.database.read() as connection:
        authorise_page(connection, identity, name.namespace, name.name)
        try:
            package = describe_package(connection, identity, name)
        except NotFoundError as error:
            raise NotFoundError("there is no such package") from error
        version = path_params.get("version") or package.latest or package.versions[0].version
        release = describe_version(connection, identity, name, version)
    manifest = decode_json(release.manifest, Manifest)
    composition = manifest.composition
    values = {
        "package": package,
        "versions": package.versions[offset : offset + _MAX_VERSIONS],
        **_make_page_links(
            request.url.path,
            {},
            offset=offset,
            size=_MAX_VERSIONS,
            has_more=offset + _MAX_VERSIONS < min(len(package.versions), MAX_OFFSET),
        ),
        "yanked_count": sum(row.yanked is not None for row in package.versions),
        "downloads": sum(row.downloads for row in package.versions),
        "namespace": name.namespace,
        "short": name.name,
        "release": release,
        "manifest": manifest,
        "files": release.files,
        "readme": _render_readme(registry, release.files),
        "homepage": check_link(manifest.homepage),
        "requires": [_make_link(text, name) for text in composition.requires],
        "conflicts": [_make_link(text, name) for text in composition.conflicts],
    }
    return render_page(registry, "package.html", request, values)


def _parse_package_name(namespace: str, name: str) -> PackageName:
    try:
        return PackageName.parse(f"{namespace}/{name}")
    except ExpertError as error:
        raise NotFoundError("there is no such package") from error


def _make_link(text: str, own: PackageName) -> PackageLink:
    """Return a link to a package of this registry, or the name of a package elsewhere."""
    reference = Reference.parse(text)
    path = f"/packages/{reference.package}"
    return PackageLink(
        text, path if reference.registry is None and reference.package != own else None
    )


def _render_readme(registry: Registry, files: list[FileFacts]) -> str | None:
    found = next((file for file in files if file.path == README), None)
    if found is None:
        return None
    with registry.storage.open(Digest.parse(found.digest)) as stream:
        data = stream.read(4 * MAX_README_CHARACTERS)
    return render_markdown(replace_control_characters(data.decode("utf-8", "replace")))


def _show_static(_: Registry, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC_FILES:
        raise NotFoundError("there is nothing at this address")
    caching = {"Cache-Control": "public, max-age=86400"}
    return Response(
        read_static_file(name), 200, {**SECURITY_HEADERS, **caching}, STATIC_FILES[name]
    )


def _show_not_found(_: Registry, __: Request) -> Response:
    raise NotFoundError("there is nothing at this address")
