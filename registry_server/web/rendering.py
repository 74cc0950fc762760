"""How the pages of the registry are made: READMEs as HTML, templates, headers and static files.

Templates escape all values, and headers forbid frames, content of other sites and all scripts but
the one of this registry, which adds buttons that copy commands; the pages work without it.

READMEs are untrusted. Each of two layers is sufficient: markdown-it renders CommonMark and tables
with raw HTML disabled and links to the web only, and nh3 allows only the tags below. Images are
replaced by their description, because loading them would reveal readers to other sites.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import nh3
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from expertctl import __version__
from expertctl.errors import ExpertError
from expertctl.package.evaluation import summarise_evaluation
from registry_server.access.browser_session import FormKey
from registry_server.access.rights import ANONYMOUS, Identity
from registry_server.errors import get_status, is_program_path, list_error_headers
from registry_server.registry import Registry

MAX_README_CHARACTERS = 60_000
"""The worst README of this length takes about a second of processor time, once."""

_CACHED_READMES = 64
"""Maximum number of rendered READMEs in memory."""

_ALLOWED_TAGS = {
    *("h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "pre", "code", "em", "strong"),
    *("s", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span"),
}
_ALLOWED_ATTRIBUTES = {
    "a": {"href"},
    "ol": {"start"},
    "span": {"class"},
    "pre": {"tabindex"},
    "table": {"tabindex"},
}
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
    parser.add_render_rule("table_open", _render_table)
    parser.add_render_rule("fence", _render_code)
    parser.add_render_rule("code_block", _render_code)
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


def _render_table(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Render the beginning of a table, which scrolls: the keyboard must reach it."""
    return '<table tabindex="0">'


def _render_code(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Render a block of code, which scrolls too."""
    return f'<pre tabindex="0"><code>{escape(tokens[index].content)}</code></pre>\n'


def _render_heading(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Render a heading one level below the heading of the page."""
    token = tokens[index]
    level = min(int(token.tag[1:]) + 1, 6)
    return f"<h{level}>" if token.nesting > 0 else f"</h{level}>\n"


_WEB_FOLDER = Path(__file__).parent
_CONTENT_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # not no-referrer, which makes the Origin of forms null
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
}
STATIC_FILES: Mapping[str, str] = {
    "style.css": "text/css",
    "copy.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""The static files of the pages → their media types."""

LOCAL_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~/?=&%+-]{0,500}")
"""What a login may lead to: a path, and a query, of this registry."""
_WORD = "[a-z0-9-]{1,64}"
_NAMED_PATH = re.compile(
    rf"/(?:(?:packages|namespaces)/)?(?P<words>{_WORD}(?:/{_WORD})?)(?:/[^/]*)?"
)
_ALLOWED_CONTROLS = {"\n", "\t", "\N{ZERO WIDTH JOINER}", "\N{ZERO WIDTH NON-JOINER}"}
_KIND_NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA³", "soft_prompt": "soft prompt"}
_UNITS = ("kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class SiteContext:
    """Facts about the registry that every page can show."""

    name: str
    host: str
    url: str
    fingerprint: str
    private: bool
    version: str
    style: str
    script: str

    @classmethod
    def create(cls, registry: Registry) -> "SiteContext":
        """Return the facts of a registry; its URL comes from the settings, never from a header."""
        settings = registry.settings
        return cls(
            name=replace_control_characters(settings.display_name),
            host=urlsplit(settings.public_url).netloc,
            url=settings.public_url,
            fingerprint=registry.index_key.public.key_id,
            private=settings.read != "public",
            version=__version__,
            style=_hash_static_file("style.css"),
            script=_hash_static_file("copy.js"),
        )


def render_page(
    registry: Registry,
    template: str,
    request: HTTPConnection,
    values: Mapping[str, object],
    *,
    status: int = 200,
) -> Response:
    """Render a page; ``values`` are the variables of its template.

    Browsers do not keep pages of a login, so that after a logout nobody sees them by going back.
    """
    state = request.scope.get("state", {})
    user: Identity = state.get("identity", ANONYMOUS)
    has_session = bool(state.get("session"))
    shared = {"site": SiteContext.create(registry), "user": user, "has_session": has_session}
    shared["form_key"] = FormKey.read_session(request).derive()
    html = _build_environment().get_template(template).render({**shared, **values})
    caching = "no-store" if has_session else "private, no-cache"
    headers = {"Cache-Control": caching, "Vary": "Authorization, Cookie"}
    return HTMLResponse(html, status, {**SECURITY_HEADERS, **headers})


def render_error_page(
    registry: Registry, request: HTTPConnection, error: ExpertError, *, status: int | None = None
) -> Response:
    """Render the page of an error; where there is nothing, it offers a search."""
    status = status or get_status(error)
    path = str(request.scope.get("path", "/"))
    values = {
        "code": status,
        "message": error.message,
        "hint": error.hint,
        "path": path if LOCAL_PATH.fullmatch(path) else "/account",
        "words": _guess_words(path),
    }
    response = render_page(registry, "error.html", request, values, status=status)
    response.headers.update(list_error_headers(error))
    return response


def _guess_words(path: str) -> str:
    """Return what to search for instead of a path that leads nowhere; empty if it has no words."""
    match = _NAMED_PATH.fullmatch(path)
    return " ".join(match.group("words").replace("/", " ").split()) if match else ""


def prefers_html(scope: Scope) -> bool:
    """Return whether a request comes from a browser that expects a page."""
    wanted = Headers(scope=scope).get("accept", "")
    return not is_program_path(str(scope["path"])) and "text/html" in wanted


@cache
def read_static_file(name: str) -> bytes:
    """Return the bytes of one of `STATIC_FILES`."""
    assert name in STATIC_FILES
    return (_WEB_FOLDER / "static" / name).read_bytes()


@cache
def _hash_static_file(name: str) -> str:
    return hashlib.sha256(read_static_file(name)).hexdigest()[:12]


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
        "kind_name": lambda kind: _KIND_NAMES.get(kind, kind),
        "number": lambda number: f"{number:,}",
        "brief": lambda digest: f"{digest.partition(':')[2][:12]}…",
        "summarised": summarise_evaluation,
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
