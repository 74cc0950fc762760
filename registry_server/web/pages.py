"""Pages as answers: templates filled in with everything escaped, under headers that allow little.

No scripts, no cookies, nothing from elsewhere, no frames: what somebody publishes is text here.
"""

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from expertctl import __version__
from expertctl.errors import ExpertError
from expertctl.package.evaluation_summary import summarise
from registry_server.access.identity import Identity
from registry_server.registry import Registry
from registry_server.statuses import retry_after, status_of

_FOLDER = Path(__file__).parent
_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
}
MACHINES = ("/v2", "/api", "/tuf", "/token")
"""Addresses of programs: what goes wrong there is told in their language."""

STATIC: Mapping[str, str] = {"style.css": "text/css", "icon.svg": "image/svg+xml"}
"""The files beside the pages, with their media types."""

_KEPT = {"\n", "\t", "\N{ZERO WIDTH JOINER}", "\N{ZERO WIDTH NON-JOINER}"}
_UNITS = ("kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Site:
    """What every page knows of the registry."""

    host: str
    url: str
    fingerprint: str
    private: bool
    version: str
    style: str

    @classmethod
    def of(cls, registry: Registry) -> "Site":
        """Return the facts of a registry; its address is that of the settings, never a header's."""
        settings = registry.settings
        return cls(
            host=urlsplit(settings.public_url).netloc,
            url=settings.public_url,
            fingerprint=registry.index_key.public.key_id,
            private=settings.read != "public",
            version=__version__,
            style=hashlib.sha256(static_file("style.css")).hexdigest()[:12],
        )


def page(
    registry: Registry,
    template: str,
    identity: Identity,
    values: Mapping[str, object],
    *,
    status: int = 200,
) -> Response:
    """Return a page; ``values`` are what its template names."""
    found = _environment().get_template(template)
    html = found.render(site=Site.of(registry), user=identity.name, **values)
    caching = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
    return HTMLResponse(html, status, {**HEADERS, **caching})


def error_page(registry: Registry, identity: Identity, error: ExpertError) -> Response:
    """Return the page of an error; with 401 a browser asks for name and token."""
    status = status_of(error)
    values = {"code": status, "message": error.message, "hint": error.hint}
    response = page(registry, "error.html", identity, values, status=status)
    if status == 401:
        response.headers["WWW-Authenticate"] = 'Basic realm="expertctl registry", charset="UTF-8"'
    if (seconds := retry_after(error)) is not None:
        response.headers["Retry-After"] = str(seconds)
    return response


def wants_page(scope: Scope) -> bool:
    """Tell whether a browser asks for something that people look at."""
    path = str(scope["path"])
    if any(path == start or path.startswith(f"{start}/") for start in MACHINES):
        return False
    return scope["method"] in {"GET", "HEAD"} and "text/html" in Headers(scope=scope).get(
        "accept", ""
    )


@cache
def static_file(name: str) -> bytes:
    """Return the bytes of one of `STATIC`."""
    assert name in STATIC
    return (_FOLDER / "static" / name).read_bytes()


def shown(text: str) -> str:
    """Replace what could reorder or hide other text: control and formatting characters."""
    return "".join(c if _is_harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_harmless(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind not in {"Cc", "Cf", "Cs", "Co"} or character in _KEPT


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shown": shown,
        "size": _size,
        "day": lambda moment: moment[:10],
        "brief": lambda digest: f"{digest.partition(':')[2][:12]}…",
        "summarised": summarise,
        "gain": lambda value: f"{value:+.3g}",
        "count": _count,
    }
    return environment


def _size(size: int) -> str:
    """Return bytes in powers of 1000: ``12.3 MB``."""
    value, unit = float(size), "B"
    for larger in _UNITS:
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
