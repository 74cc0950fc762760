"""The pages of the registry: home, search, packages and versions, and error pages.

They show the documents of the API with the same rights: without the right to read a namespace, the
page is the same as if it did not exist. Templates escape all values, and headers forbid scripts,
frames and content of other sites; there are no cookies.

READMEs are untrusted. Each of two layers is sufficient: markdown-it renders CommonMark and tables
with raw HTML disabled and links to the web only, and nh3 allows only the tags below. Images are
replaced by their description, because loading them would reveal readers to other sites.
"""

import hashlib
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import msgspec
import nh3
from anyio import to_thread
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from expertctl import __version__
from expertctl.digest import Digest
from expertctl.errors import ExpertError, NotFoundError, UnauthenticatedError, UsageError
from expertctl.package.evaluation import summarise_evaluation
from expertctl.reference import PackageName, Reference
from expertctl.schema.manifest import Manifest
from expertctl.schema.validation import convert_document, decode_json
from registry_server.access.authentication import get_identity
from registry_server.access.rights import Identity
from registry_server.api.packages import (
    MAX_QUERY,
    FileFacts,
    SearchQuery,
    describe_package,
    describe_version,
    find_packages,
    stats,
)
from registry_server.api.schema import ApiContext
from registry_server.errors import get_retry_after, get_status
from registry_server.registry import Registry

MAX_README_CHARACTERS = 60_000
"""The worst README of this length takes about a second of processor time, once."""

_CACHED_READMES = 64
"""Maximum number of rendered READMEs in memory."""

_ALLOWED_TAGS = {
    *("h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "pre", "code", "em", "strong"),
    *("s", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span"),
}
_ALLOWED_ATTRIBUTES = {"a": {"href"}, "ol": {"start"}, "span": {"class"}}
_ALLOWED_SCHEMES = {"http", "https"}


def render_markdown(text: str) -> Markup:
    """Render a README as HTML that is safe within a page; a long one is truncated."""
    return _render_cached(
        text if len(text) <= MAX_README_CHARACTERS else f"{text[:MAX_README_CHARACTERS]}…"
    )


@lru_cache(_CACHED_READMES)
def _render_cached(text: str) -> Markup:
    html = str(_build_parser().render(text))
    safe = nh3.clean(
        html,
        tags=_ALLOWED_TAGS,
        attributes=_ALLOWED_ATTRIBUTES,
        url_schemes=_ALLOWED_SCHEMES,
        link_rel="nofollow noopener noreferrer",
        strip_comments=True,
    )
    return Markup(safe)  # noqa: S704  # sanitised HTML, the only text that is not escaped


def check_link(address: str | None) -> str | None:
    """Return a URL if a page may link to it: absolute, and of the web."""
    if not address or not address.isprintable() or " " in address:
        return None
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    return address if parts.scheme in _ALLOWED_SCHEMES and parts.hostname else None


@cache
def _build_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 20, "linkify": False})
    parser.enable("table").enable("strikethrough")
    parser.validateLink = lambda url: True  # type: ignore[method-assign]  # `_linked` drops bad ones
    parser.add_render_rule("link_open", _render_link_open)
    parser.add_render_rule("image", _render_image)
    parser.add_render_rule("heading_open", _render_heading)
    parser.add_render_rule("heading_close", _render_heading)
    return parser


def _render_link_open(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Render the text of a link, and its URL only if it leads to the web."""
    address = check_link(str(tokens[index].attrGet("href") or ""))
    return f'<a href="{escape(address)}">' if address else "<a>"


def _render_image(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Render the description of an image instead of the image."""
    text = renderer.renderInlineAsText(tokens[index].children or [], options, env)
    return f'<span class="picture">{escape(text or "picture")}</span>'


def _render_heading(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Render a heading one level below the heading of the page."""
    token = tokens[index]
    level = min(int(token.tag[1:]) + 1, 6)
    return f"<h{level}>" if token.nesting > 0 else f"</h{level}>\n"


_WEB_FOLDER = Path(__file__).parent
_CONTENT_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
}
API_PREFIXES = ("/v2", "/api", "/tuf", "/token")
"""Path prefixes of programs, whose errors are not pages."""

STATIC_FILES: Mapping[str, str] = {"style.css": "text/css", "icon.svg": "image/svg+xml"}
"""The static files of the pages → their media types."""

_ALLOWED_CONTROLS = {"\n", "\t", "\N{ZERO WIDTH JOINER}", "\N{ZERO WIDTH NON-JOINER}"}
_UNITS = ("kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class SiteContext:
    """Facts about the registry that every page can show."""

    host: str
    url: str
    fingerprint: str
    private: bool
    version: str
    style: str

    @classmethod
    def create(cls, registry: Registry) -> "SiteContext":
        """Return the facts of a registry; its URL comes from the settings, never from a header."""
        settings = registry.settings
        return cls(
            host=urlsplit(settings.public_url).netloc,
            url=settings.public_url,
            fingerprint=registry.index_key.public.key_id,
            private=settings.read != "public",
            version=__version__,
            style=hashlib.sha256(read_static_file("style.css")).hexdigest()[:12],
        )


def render_page(
    registry: Registry,
    template: str,
    identity: Identity,
    values: Mapping[str, object],
    *,
    status: int = 200,
) -> Response:
    """Render a page; ``values`` are the variables of its template."""
    found = _build_environment().get_template(template)
    html = found.render(site=SiteContext.create(registry), user=identity.name, **values)
    caching = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
    return HTMLResponse(html, status, {**SECURITY_HEADERS, **caching})


def render_error_page(registry: Registry, identity: Identity, error: ExpertError) -> Response:
    """Render the page of an error; a 401 makes the browser ask for a name and a token."""
    status = get_status(error)
    values = {"code": status, "message": error.message, "hint": error.hint}
    response = render_page(registry, "error.html", identity, values, status=status)
    if status == 401:
        response.headers["WWW-Authenticate"] = 'Basic realm="expertctl registry", charset="UTF-8"'
    if (seconds := get_retry_after(error)) is not None:
        response.headers["Retry-After"] = str(seconds)
    return response


def prefers_html(scope: Scope) -> bool:
    """Return whether a request comes from a browser that expects a page."""
    path = str(scope["path"])
    if any(path == start or path.startswith(f"{start}/") for start in API_PREFIXES):
        return False
    return scope["method"] in {"GET", "HEAD"} and "text/html" in Headers(scope=scope).get(
        "accept", ""
    )


@cache
def read_static_file(name: str) -> bytes:
    """Return the bytes of one of `STATIC`."""
    assert name in STATIC_FILES
    return (_WEB_FOLDER / "static" / name).read_bytes()


def replace_control_characters(text: str) -> str:
    """Replace control and formatting characters, which could reorder or hide other text."""
    return "".join(c if _is_safe_character(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_safe_character(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind not in {"Cc", "Cf", "Cs", "Co"} or character in _ALLOWED_CONTROLS


@cache
def _build_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_WEB_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shown": replace_control_characters,
        "size": _format_size,
        "day": lambda moment: moment[:10],
        "brief": lambda digest: f"{digest.partition(':')[2][:12]}…",
        "summarised": summarise_evaluation,
        "gain": lambda value: f"{value:+.3g}",
        "count": _format_count,
    }
    return environment


def _format_size(size: int) -> str:
    """Format bytes in powers of 1000: ``12.3 MB``."""
    value, unit = float(size), "B"
    for larger in _UNITS:
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


README = "README.md"
_RESULTS_PER_PAGE = 20
_HOME_RESULTS = 8
_MAX_VERSIONS = 100
_Handler = Callable[[Request], Awaitable[Response]]
_PageView = Callable[[Registry, Request], Response]


@dataclass(frozen=True, slots=True)
class PackageLink:
    """The name of another package, and the path of its page if it is in this registry."""

    text: str
    path: str | None


class FallbackRoute(Route):
    """Matches all paths without another route, except those of programs."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a page; paths of programs get their own errors."""
        path = str(scope.get("path", ""))
        if any(path == start or path.startswith(f"{start}/") for start in API_PREFIXES):
            return Match.NONE, {}
        return super().matches(scope)


def make_page_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the pages; the last one matches all other paths."""
    shows: tuple[tuple[str, _PageView], ...] = (
        ("/", _show_home),
        ("/search", _show_search),
        ("/login", _show_login),
        ("/packages/{namespace}/{name}", _show_package),
        ("/packages/{namespace}/{name}/{version}", _show_package),
    )
    pages = [Route(path, _make_handler(registry, show), methods=["GET"]) for path, show in shows]
    static = Route("/static/{name}", _make_handler(registry, _show_static), methods=["GET"])
    elsewhere = FallbackRoute(
        "/{path:path}", _make_handler(registry, _show_not_found), methods=["GET"]
    )
    return [*pages, static, elsewhere]


def _make_handler(registry: Registry, show: _PageView) -> _Handler:
    """Return an endpoint that builds a page in a thread, and shows errors as pages."""

    async def handle(request: Request) -> Response:
        try:
            return await to_thread.run_sync(partial(show, registry, request))
        except ExpertError as error:
            return render_error_page(registry, get_identity(request), error)

    return handle


def _show_home(registry: Registry, request: Request) -> Response:
    identity = get_identity(request)
    with registry.database.read() as connection:
        found = find_packages(connection, identity, SearchQuery(limit=_HOME_RESULTS))
    counts = stats(ApiContext(registry, identity))
    return render_page(registry, "home.html", identity, {"recent": found.results, "counts": counts})


def _show_search(registry: Registry, request: Request) -> Response:
    identity = get_identity(request)
    query, cursor = (request.query_params.get(name, "") for name in ("q", "cursor"))
    if len(query) > MAX_QUERY:
        raise UsageError(f"search for at most {MAX_QUERY} characters")
    wanted = {"q": query, "limit": _RESULTS_PER_PAGE, "cursor": cursor}
    try:
        asked = convert_document(wanted, SearchQuery)
    except msgspec.ValidationError as error:
        raise UsageError("there is no such page of results") from error
    with registry.database.read() as connection:
        found = find_packages(connection, identity, asked)
    more = f"/search?{urlencode({'q': query, 'cursor': found.next})}" if found.next else None
    values: dict[str, object] = {"query": query, "results": found.results, "next": more}
    return render_page(registry, "search.html", identity, values)


def _show_login(_: Registry, request: Request) -> Response:
    """Make the browser ask for a token, which it then sends with every request."""
    if get_identity(request).user_id is None:
        raise UnauthenticatedError("log in to see content that is not public")
    return RedirectResponse("/", 303, {"Cache-Control": "no-store"})


def _show_package(registry: Registry, request: Request) -> Response:
    identity, path_params = get_identity(request), request.path_params
    name = _parse_package_name(path_params["namespace"], path_params["name"])
    with registry.database.read() as connection:
        package = describe_package(connection, identity, name)
        version = path_params.get("version") or package.latest or package.versions[0].version
        release = describe_version(connection, identity, name, version)
    manifest = decode_json(release.manifest, Manifest)
    composition = manifest.composition
    values = {
        "package": package,
        "versions": package.versions[:_MAX_VERSIONS],
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
    return render_page(registry, "package.html", identity, values)


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
