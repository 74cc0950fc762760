"""READMEs are written by anybody: what comes out is text, tables and links, never a program."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_server.web.rendering import MAX_README_CHARACTERS, check_link, render_markdown

ALLOWED = {
    *("h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "pre", "code", "em", "strong"),
    *("s", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span"),
}


class ParsedHtml(HTMLParser):
    """What a browser would find in a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(str(html))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " " if tag in {"td", "th", "p", "span", "dd"} else ""

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def links(self) -> list[str | None]:
        return [attributes["href"] for tag, attributes in self.tags if "href" in attributes]


def check_harmless(html: str) -> ParsedHtml:
    seen = ParsedHtml(html)
    for tag, attributes in seen.tags:
        assert tag in ALLOWED
        assert set(attributes) <= {"href", "rel", "class", "start", "tabindex"}
        if "href" in attributes:
            assert (attributes["href"] or "").startswith(("http://", "https://"))
            assert attributes["rel"] == "nofollow noopener noreferrer"
    return seen


ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<math><mtext></form><form><mglyph><svg><mtext><style><path id='</style><img onerror=a src>'>",
    "<a href='javascript:alert(1)'>x</a>",
    "<style>@import 'http://evil.example'</style>",
    "<base href='//evil.example'>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](&#x6A;avascript&colon;alert(1))",
    "[x](%6Aavascript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](<java\nscript:alert(1)>)",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](//evil.example)",
    "[x](/\\evil.example)",
    "[x](file:///etc/passwd)",
    "<javascript:alert(1)>",
    "<data:text/html,x>",
    "[x]\n\n[x]: javascript:alert(1)",
    "[x][y]\n\n[y]: <data:text/html,1> 'title'",
    '[x](https://ok.example "onmouseover=alert(1)")',
    '[x](https://ok.example/"onmouseover="alert(1))',
    "[x](https://ok.example/<script>)",
    "![x](javascript:alert(1))",
    "![<script>alert(1)</script>](https://evil.example/x.png)",
    "![x](https://evil.example/pixel.png)",
    '```"onload=alert(1)\ncode\n```',
    "```<script>\n</code></pre><script>alert(1)</script>\n```",
    "| <script>alert(1)</script> |\n|---|\n| <img src=x onerror=alert(1)> |",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<!-- --><script>alert(1)</script><!-- -->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "# <script>alert(1)</script>\n\n<http://a.b/'><script>alert(1)</script>",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_no_readme_runs_anything_in_a_browser(text: str) -> None:
    """Attack 83: stored XSS through markdown, javascript: links, percent-encoding."""
    html = render_markdown(text)
    seen = check_harmless(html)
    assert not [link for link in seen.links if "evil" in (link or "")]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*ATTACKS, "[", "](", ")", "`", "<", ">", "\n", "\\", "&"])))
def test_no_mix_of_attacks_does_either(pieces: list[str]) -> None:
    check_harmless(render_markdown("".join(pieces)))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_is_a_readme(text: str) -> None:
    check_harmless(render_markdown(text))


def test_what_people_write_is_kept() -> None:
    html = render_markdown(
        "# Name\n\nSome *text*, **strong**, ~~old~~, `code`.\n\n- a\n\n3. c\n\n> q\n\n---\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx < y\n```\n\n<https://a.example/?b=1&c=2>"
    )
    seen = check_harmless(html)
    tags = {tag for tag, _ in seen.tags}
    assert {"h2", "em", "strong", "s", "code", "ul", "ol", "blockquote", "hr", "table"} <= tags
    assert "h1" not in tags
    assert seen.links == ["https://a.example/?b=1&c=2"]
    assert "x < y" in seen.text


def test_a_picture_is_its_description() -> None:
    seen = ParsedHtml(
        render_markdown(
            "![build passing](https://evil.example/badge.svg) ![](https://evil.example)"
        )
    )
    assert seen.text.strip() == "build passing  picture"
    assert seen.links == []


def test_headings_stay_below_that_of_the_page() -> None:
    tags = [tag for tag, _ in ParsedHtml(render_markdown("# a\n\n## b\n\n###### c")).tags]
    assert tags == ["h2", "h3", "h6"]


def test_a_link_to_nowhere_keeps_its_text() -> None:
    seen = ParsedHtml(render_markdown("[the licence](LICENSE)"))
    assert (seen.links, seen.text.strip()) == ([], "the licence")


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, "*a " * 20_000, ">" * 50_000, "- " * 20_000, "`" * 60_000, "[a](" * 10_000],
    ids=lambda text: text[:4],
)
def test_deep_nesting_ends(text: str) -> None:
    assert len(render_markdown(text)) < 20 * MAX_README_CHARACTERS


def test_more_than_fits_is_cut() -> None:
    assert len(render_markdown("word " * MAX_README_CHARACTERS)) < 2 * MAX_README_CHARACTERS


@pytest.mark.parametrize(
    ("address", "safe"),
    [
        ("https://example.com/a?b=c#d", True),
        ("http://example.com", True),
        ("HTTPS://EXAMPLE.COM", True),
        (None, False),
        ("", False),
        ("example.com", False),
        ("/local", False),
        ("//example.com", False),
        ("https://", False),
        ("https:///path", False),
        ("javascript:alert(1)//https://a.b", False),
        ("data:text/html,x", False),
        ("https://a.b/ c", False),
        ("https://a.b/\nc", False),
        ("https://a.b/\u202ec", False),
        ("https://[::1", False),
    ],
)
def test_a_link_leads_to_the_web_or_nowhere(address: str | None, safe: bool) -> None:
    assert check_link(address) == (address if safe else None)
