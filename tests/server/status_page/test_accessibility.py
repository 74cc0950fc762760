"""Every page of the server has no violation that axe-core finds, whatever it shows."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.harness import EXPERTS, ServedPackages, write_routed_base
from tests.server.server_process import HomeServerProcess, create_api_key, run_home_server
from tests.server.status_page.browser import PNG, BrowserTab, run_browser
from tests.store.fixtures import HomeFixture

pytestmark = pytest.mark.all
AXE = "axe-core@4.14.1"
LOOKS = [(width, dark) for width in (390, 1280) for dark in (False, True)]
LIVE = "document.querySelector('#state').innerText === 'Live'"
READY = "document.querySelector('#state').innerText === 'Ready'"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core."""
    assert shutil.which("npm"), "apt-get install nodejs npm"
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", AXE]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserTab]:
    with run_browser(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


@pytest.fixture(scope="module")
def server(
    stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HomeServerProcess]:
    with run_home_server(stock.make_home(tmp_path_factory.mktemp("axe") / "home").root) as server:
        yield server


def check(tab: BrowserTab, axe: str, shot: Path) -> None:
    """Nothing is wrong with the page as it is now, and nothing is cut off at its right."""
    tab.evaluate(f"{axe};0")
    told = "({ id, nodes }) => [id, nodes.map((node) => node.html)]"
    run = f"axe.run(document).then(({{ violations }}) => violations.map({told}))"
    violations: Any = tab.evaluate(run)
    assert violations == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.screenshot(shot, whole=False).startswith(PNG)


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_status_page(
    width: int, dark: bool, server: HomeServerProcess, tab: BrowserTab, axe: str, tmp_path: Path
) -> None:
    tab.open(f"{server.url}/status", width=width, dark=dark)
    tab.wait_for(f"location.origin === '{server.url}' && {LIVE}")
    tab.wait_for("document.querySelector('#experts-part').offsetHeight > 0")
    check(tab, axe, tmp_path / "idle.png")
    body = {"prompt": "sort", "max_tokens": 5, "force_experts": [EXPERTS[0]]}
    httpx.post(f"{server.url}/v1/infer", json=body, timeout=60).raise_for_status()
    tab.wait_for("document.querySelector('#charts').innerText.includes('Jobs')")
    tab.wait_for("document.querySelector('#experts tbody').rows.length > 0")
    check(tab, axe, tmp_path / "busy.png")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_page_of_the_api(
    width: int, dark: bool, server: HomeServerProcess, tab: BrowserTab, axe: str, tmp_path: Path
) -> None:
    tab.open(f"{server.url}/docs", width=width, dark=dark)
    tab.wait_for("location.pathname === '/docs' && document.readyState === 'complete'")
    check(tab, axe, tmp_path / "docs.png")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_page_to_try_the_server(
    width: int, dark: bool, server: HomeServerProcess, tab: BrowserTab, axe: str, tmp_path: Path
) -> None:
    tab.open(f"{server.url}/chat", width=width, dark=dark)
    tab.wait_for(f"location.pathname === '/chat' && {READY}")
    check(tab, axe, tmp_path / "empty.png")
    tab.evaluate("document.querySelector('#who').open = true")
    tab.evaluate("document.querySelector('[value=named]').click()")
    tab.evaluate(f"document.querySelector('[value^={json.dumps(EXPERTS[0])}]').click()")
    tab.evaluate("document.querySelector('#message').focus()")
    tab.type_text("sort 3, 1, 2")
    tab.send_key("Enter", text="\r")
    tab.wait_for("document.querySelector('.plan code') !== null")
    tab.evaluate("document.querySelector('.plan').open = true")
    check(tab, axe, tmp_path / "answering.png")
    tab.evaluate("document.querySelector('#stop').click()")
    tab.wait_for(READY)
    tab.evaluate("document.querySelector('[value=named]').click()")
    tab.evaluate(f"document.querySelector('[value^={json.dumps(EXPERTS[0])}]').click()")
    tab.type_text("again")
    tab.send_key("Enter", text="\r")
    assert tab.read_text("#problem")
    check(tab, axe, tmp_path / "answered.png")


def test_pages_that_want_a_key(
    stock: ServedPackages, tab: BrowserTab, axe: str, tmp_path: Path
) -> None:
    home = stock.make_home(tmp_path / "keyed").root
    create_api_key(home, "axe")
    with run_home_server(home) as server:
        for page in ("status", "chat"):
            for width, dark in LOOKS:
                tab.open(f"{server.url}/{page}", width=width, dark=dark)
                tab.wait_for(
                    f"location.pathname === '/{page}' && document.activeElement.id === 'key'"
                )
                check(tab, axe, tmp_path / "key.png")


def test_the_status_page_of_routed_experts(tab: BrowserTab, axe: str, tmp_path: Path) -> None:
    user_home = HomeFixture(tmp_path / "home")
    user_home.bases.add(write_routed_base(tmp_path / "base"), name="routed")
    with run_home_server(user_home.root, "--moe-miss", "skip") as server:
        body = {"prompt": "sort 3, 1, 2", "max_tokens": 20}
        httpx.post(f"{server.url}/v1/infer", json=body, timeout=60).raise_for_status()
        for width, dark in LOOKS:
            tab.open(f"{server.url}/status", width=width, dark=dark)
            tab.wait_for(f"location.origin === '{server.url}' && {LIVE}")
            tab.wait_for("document.querySelector('#routed-layers tbody').rows.length > 0")
            check(tab, axe, tmp_path / "routed.png")
