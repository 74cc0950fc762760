"""The documentation as a site: complete, without dead links, and with nothing from elsewhere."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.server.status_page.browser import BrowserTab, run_browser

pytestmark = pytest.mark.all
ROOT = Path(__file__).parents[2]
MAX_SCREENSHOT_BYTES = 150_000
SHOWN = ("index.html", "readme.html", "reference/settings.html", "adr/0018-cuda.html")


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files, and logs no requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class References(HTMLParser):
    """Collects what a page loads and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a":
            self.links += [values["href"]] if values.get("href") else []
        else:
            named = ("src", "href", "data", "poster", "srcset", "action")
            self.loaded += [values[name] for name in named if values.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` does; a warning is an error."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    result = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, References]:
    return {
        path: References(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }


def is_outside(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50
    assert [page for page in pages if not (site / page).with_suffix(".html").is_file()] == []
    for name in ("readme", "changelog", "security", "benchmarks", "typescript-client"):
        assert (site / f"{name}.html").is_file()


def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, References]) -> None:
    outside = {address for page in pages.values() for address in page.loaded if is_outside(address)}
    assert outside == set()
    for path in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import\s*)['\"]?([^'\")]+)", path.read_text("utf-8"))
        assert [each for each in addresses if is_outside(each)] == [], path


def test_every_link_leads_to_a_page_and_its_section(
    site: Path, pages: dict[Path, References]
) -> None:
    problems = []
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            section = unquote(parts.fragment)
            if not target.is_file():
                problems.append(f"{path.relative_to(site)}: {link}")
            elif section and target in pages and section not in pages[target].ids:
                problems.append(f"{path.relative_to(site)}: no section {link}")
    assert problems == []


def test_files_that_pages_link_to_are_the_ones_of_the_repository(site: Path) -> None:
    copies = [path for path in (site / "files").rglob("*") if path.is_file()]
    assert len(copies) > 5
    for path in copies:
        assert path.read_bytes() == (ROOT / path.relative_to(site / "files")).read_bytes()


def test_screenshots_are_small_and_shown(pages: dict[Path, References]) -> None:
    shown = {Path(address).name for page in pages.values() for address in page.loaded}
    images = sorted((ROOT / "docs" / "images").glob("*.png"))
    assert len(images) >= 3
    for image in images:
        assert image.stat().st_size < MAX_SCREENSHOT_BYTES
        assert image.name in shown


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserTab]:
    with run_browser(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


@pytest.mark.parametrize("page", SHOWN)
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_a_browser_shows_a_page_and_asks_nobody_else(
    page: str, width: int, dark: bool, address: str, tab: BrowserTab
) -> None:
    tab.asked.clear()
    tab.complaints.clear()
    tab.open(f"{address}/{page}", width=width, dark=dark)
    tab.wait_for(f"location.href.endsWith('{page}') && document.readyState === 'complete'")
    shown = "document.documentElement.scrollWidth <= innerWidth"
    assert tab.wait_for(shown), "the page is wider than the window"
    assert tab.evaluate("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
    asked = [url for url in tab.asked if not url.startswith((address, "data:"))]
    assert (asked, tab.complaints) == ([], [])


def test_the_search_finds_a_page(address: str, tab: BrowserTab) -> None:
    tab.open(f"{address}/index.html", width=1280)
    tab.wait_for("document.readyState === 'complete'")
    tab.evaluate("document.querySelector('.md-search__input').focus()")
    tab.type_text("minimum_release_age")
    found = "document.querySelector('.md-search-result__link')?.href ?? ''"
    assert "settings.html" in tab.wait_for(found) or "install-from" in tab.evaluate(found)
