"""READMEs as HTML: written by anybody, shown to everybody.

Two fences, each enough on its own: markdown-it renders CommonMark and tables with raw HTML off and
links to the web only, and nh3 lets through the tags below and nothing else. Pictures become
their description: loading one from elsewhere would reveal who reads the page.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from urllib.parse import urlsplit

import nh3
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape

MAX_CHARACTERS = 60_000
"""The worst text of that length takes a processor about a second, once."""

_KEPT = 64
"""How many READMEs are kept as HTML."""

_TAGS = {
    *("h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "pre", "code", "em", "strong"),
    *("s", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span"),
}
_ATTRIBUTES = {"a": {"href"}, "ol": {"start"}, "span": {"class"}}
_SCHEMES = {"http", "https"}


def render(text: str) -> Markup:
    """Return a README as HTML that is safe within a page; what is too long is cut."""
    return _rendered(text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…")


@lru_cache(_KEPT)
def _rendered(text: str) -> Markup:
    html = str(_parser().render(text))
    safe = nh3.clean(
        html,
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        url_schemes=_SCHEMES,
        link_rel="nofollow noopener noreferrer",
        strip_comments=True,
    )
    return Markup(safe)  # noqa: S704  # the one place where HTML is not escaped: it was cleaned


def safe_link(address: str | None) -> str | None:
    """Return an address that a page may link to: of the web, absolute, and nothing else."""
    if not address or not address.isprintable() or " " in address:
        return None
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    return address if parts.scheme in _SCHEMES and parts.hostname else None


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 20, "linkify": False})
    parser.enable("table").enable("strikethrough")
    parser.validateLink = lambda url: True  # type: ignore[method-assign]  # `_linked` drops bad ones
    parser.add_render_rule("link_open", _linked)
    parser.add_render_rule("image", _described)
    parser.add_render_rule("heading_open", _lowered)
    parser.add_render_rule("heading_close", _lowered)
    return parser


def _linked(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Keep the text of every link, the address only where it leads to the web."""
    address = safe_link(str(tokens[index].attrGet("href") or ""))
    return f'<a href="{escape(address)}">' if address else "<a>"


def _described(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Show the description of a picture in its place."""
    text = renderer.renderInlineAsText(tokens[index].children or [], options, env)
    return f'<span class="picture">{escape(text or "picture")}</span>'


def _lowered(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """Begin below the heading of the page."""
    token = tokens[index]
    level = min(int(token.tag[1:]) + 1, 6)
    return f"<h{level}>" if token.nesting > 0 else f"</h{level}>\n"
