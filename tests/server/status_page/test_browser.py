"""The status page in a real browser, of a real server with real load."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.server.harness import BASE, EXPERTS, ServedPackages, write_routed_base
from tests.server.server_process import HomeServerProcess, create_api_key, run_home_server
from tests.server.status_page.browser import PNG, BrowserTab, run_browser
from tests.store.fixtures import HomeFixture

pytestmark = pytest.mark.all
LIVE = "document.querySelector('#state').innerText === 'Live'"
CLIENTS = 6


@pytest.fixture(scope="module")
def home(stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stock.make_home(tmp_path_factory.mktemp("status") / "home").root


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[HomeServerProcess]:
    with run_home_server(home) as server:
        yield server


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserTab]:
    with run_browser(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


@pytest.fixture(autouse=True)
def _forget(tab: BrowserTab) -> None:
    tab.open("about:blank")  # the page of the test before asks a server that has ended
    tab.complaints.clear()
    tab.asked.clear()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep several clients asking for as long as the block goes on."""
    over = threading.Event()

    def ask(number: int) -> None:
        body = {
            "prompt": f"sort {number}",
            "max_tokens": 60,
            "force_experts": [EXPERTS[number % 3]],
        }
        while not over.is_set():
            httpx.post(f"{url}/v1/infer", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
    for one in asking:
        one.result()


def check_no_complaints(tab: BrowserTab, url: str) -> None:
    """Nothing was complained of, and nobody else was asked for anything."""
    assert tab.complaints == []
    ours = (f"{url}/status", f"{url}/static/")
    assert {address for address in tab.asked if not address.startswith(ours)} <= {f"{url}/"}


def test_a_server_that_was_never_asked_says_what_to_do(
    server: HomeServerProcess, tab: BrowserTab
) -> None:
    tab.open(f"{server.url}/")
    tab.wait_for(LIVE)
    assert tab.evaluate("location.pathname") == "/status"
    assert "No request has come yet" in tab.read_text("main")
    command = tab.read_text("#example")
    assert f"{server.url}/v1/infer" in command
    body = re.search(r"-d '(.*)'", command)
    assert body
    answer = httpx.post(f"{server.url}/v1/infer", json=json.loads(body[1]), timeout=60)
    assert answer.status_code == 200
    tab.wait_for("document.querySelector('#idle').hidden")
    check_no_complaints(tab, server.url)


def test_an_idle_server_shows_no_chart_without_anything_in_it(
    stock: ServedPackages, tab: BrowserTab, tmp_path: Path
) -> None:
    titles = "[...document.querySelectorAll('#charts h2')].map((title) => title.innerText)"
    seen = "[...document.querySelectorAll('#tiles .tile')].filter((tile) => tile.offsetHeight)"
    with run_home_server(stock.make_home(tmp_path / "idle").root) as server:
        tab.open(f"{server.url}/status")
        tab.wait_for(f"location.origin === '{server.url}' && {LIVE}")
        assert tab.evaluate(titles) == ["Memory by owner"]
        assert tab.evaluate(f"{seen}.length") == 3
        assert tab.evaluate("document.querySelector('#totals').offsetHeight") == 0
        body = {"prompt": "sort", "max_tokens": 5, "force_experts": [EXPERTS[0]]}
        httpx.post(f"{server.url}/v1/infer", json=body, timeout=60).raise_for_status()
        tab.wait_for(f"{titles}.includes('Jobs')")
        assert tab.evaluate(f"{seen}.length") == 6
        assert "finished" in tab.read_text("#totals")
        tab.open(f"{server.url}/status")
        tab.wait_for(f"performance.now() < 60000 && {LIVE}")
        assert tab.evaluate(titles) == ["Memory by owner", "Keys and values"]
        assert "No request is running" in tab.read_text("#quiet")


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_load_is_seen_in_numbers_and_curves(
    width: int, dark: bool, server: HomeServerProcess, tab: BrowserTab, tmp_path: Path
) -> None:
    with load(server.url):
        tab.open(f"{server.url}/status", width=width, dark=dark)
        tab.wait_for("document.querySelectorAll('.line[d*=L]').length >= 6")
        tab.wait_for("document.querySelector('#experts tbody').rows.length >= 3")
        tab.wait_for(
            r"/[1-9]\d* ms|\d s/.test(document.querySelector('figure:nth-child(5)').innerText)"
        )
        data = tab.screenshot(tmp_path / "page.png")
    assert data[:8] == PNG
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown = tab.read_text("main")
    assert re.search(r"Answers\n[\d,.]+ tok/s", shown)
    assert re.search(r"Memory\n[\d.]+ [kM]B\n\d+ % of 67.1 MB", shown)
    for name in EXPERTS:
        assert f"{name}@1.0.0" in tab.read_text("#experts")
    assert BASE in tab.read_text("header")
    unnamed = [line for line in shown.splitlines() if "NaN" in line or "undefined" in line]
    assert unnamed == []
    check_no_complaints(tab, server.url)


def test_a_chart_is_read_with_the_keyboard_and_told_in_words(
    server: HomeServerProcess, tab: BrowserTab
) -> None:
    with load(server.url):
        tab.open(f"{server.url}/status")
        tab.wait_for("document.querySelector('#charts').innerText.includes('Jobs')")
        tab.wait_for("document.querySelectorAll('.line[d*=L]').length >= 3")
    tab.evaluate("document.querySelector('figure svg').focus()")
    label = "document.activeElement.getAttribute('aria-label')"
    assert re.match(r"Jobs, now\. Answers being written: \d+, at most \d+; ", tab.evaluate(label))
    tab.send_key("ArrowLeft")
    assert re.match(r"Jobs, 1 s ago\. ", tab.evaluate(label))
    assert tab.read_text("figure .when") == "1 s ago"
    tab.send_key("Escape")
    assert tab.read_text("figure .when") == ""


def test_everything_is_reached_by_tab_and_has_a_name(
    server: HomeServerProcess, tab: BrowserTab
) -> None:
    tab.open(f"{server.url}/status")
    tab.wait_for(LIVE)
    reached = list[str]()
    for _ in range(20):
        tab.send_key("Tab")
        reached.append(
            tab.evaluate("document.activeElement.innerText || document.activeElement.id")
        )
    assert "Skip to the content" in reached
    assert "Pause" in reached
    tree = tab.send_command("Accessibility.getFullAXTree")["nodes"]
    wanted = {"image", "button", "link", "region", "figure", "textbox", "table"}
    nameless = [
        node
        for node in tree
        if node.get("role", {}).get("value") in wanted - {"figure", "table"}
        and not node.get("ignored")
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []


def test_a_page_that_is_paused_asks_nothing(server: HomeServerProcess, tab: BrowserTab) -> None:
    tab.open(f"{server.url}/status")
    tab.wait_for(LIVE)
    tab.evaluate("document.querySelector('#pause').click()")
    assert tab.read_text("#state") == "Paused"
    tab.wait_for("new Promise((done) => setTimeout(() => done(true), 500))")
    tab.asked.clear()
    tab.wait_for("new Promise((done) => setTimeout(() => done(true), 1500))")
    assert tab.asked == []
    for _ in range(9):  # however often it is pressed, there is one question a second in the end
        tab.evaluate("document.querySelector('#pause').click()")
    tab.wait_for(LIVE)
    tab.asked.clear()
    tab.wait_for("new Promise((done) => setTimeout(() => done(true), 3000))")
    assert 2 <= len([url for url in tab.asked if url.endswith("/data")]) <= 4


def test_a_key_is_asked_for_and_is_kept_nowhere(
    stock: ServedPackages, tab: BrowserTab, tmp_path: Path
) -> None:
    home = stock.make_home(tmp_path / "keyed").root
    secret = create_api_key(home, "status")
    with run_home_server(home) as server:
        tab.open(f"{server.url}/status", width=390)
        tab.wait_for("document.activeElement.id === 'key'")
        assert "Waiting for a key" in tab.read_text("#state")
        assert tab.evaluate("document.querySelector('#figures').hidden")
        tab.type_text("xpk_wrong")
        tab.send_key("Enter", text="\r")
        tab.wait_for(
            "document.querySelector('#ask-why').innerText.includes('does not take this key')"
        )
        tab.type_text(secret)
        tab.send_key("Enter", text="\r")
        tab.wait_for(LIVE)
        assert tab.evaluate("document.querySelector('#ask').hidden")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert secret not in tab.evaluate(kept)
        assert secret not in tab.evaluate("document.documentElement.outerHTML")
        assert tab.evaluate("document.querySelector('#key').value") == ""
        assert not any(secret in address for address in tab.asked)
        tab.open(f"{server.url}/status")
        tab.wait_for("document.activeElement.id === 'key'")


def test_a_server_that_ends_is_told_of_and_found_again_after(
    stock: ServedPackages, tab: BrowserTab, tmp_path: Path
) -> None:
    home = stock.make_home(tmp_path / "ending").root
    with run_home_server(home) as server:
        tab.open(f"{server.url}/status")
        tab.wait_for(LIVE)
        server.stop()
        tab.wait_for("document.querySelector('#state').innerText.includes('trying again')")
        assert not tab.evaluate("document.querySelector('#figures').hidden")


def test_names_are_text_whatever_they_say(server: HomeServerProcess, tab: BrowserTab) -> None:
    """No name of an expert can be markup; were one, it would be shown as it is written."""
    tab.open(f"{server.url}/status")
    tab.wait_for(LIVE)
    name = "<img src=x onerror=alert(1)>"
    module = "import('/static/elements.js')"
    shown = tab.evaluate(
        f"{module}.then((m) => m.element('p', {{}}, {json.dumps(name)}).children.length)"
    )
    assert shown == 0
    refused = tab.evaluate(
        "try { document.body.innerHTML = '<b>x</b>'; 'set' } catch { 'refused' }"
    )
    assert refused == "refused"


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeServerProcess]:
    """A server whose base has more routed experts than its memory."""
    folder = tmp_path_factory.mktemp("routed")
    user_home = HomeFixture(folder / "home")
    user_home.bases.add(write_routed_base(folder / "base"), name=BASE)
    with run_home_server(user_home.root, "--moe-miss", "skip") as server:
        yield server


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_routed_experts_are_shown_layer_by_layer(
    width: int, dark: bool, routed: HomeServerProcess, tab: BrowserTab, tmp_path: Path
) -> None:
    tab.open(f"{routed.url}/status", width=width, dark=dark)
    tab.wait_for(f"location.origin === '{routed.url}' && {LIVE}")
    tab.asked.clear()  # of what another page asked when it was left
    body = {"prompt": "sort 3, 1, 2", "max_tokens": 40}
    httpx.post(f"{routed.url}/v1/infer", json=body, timeout=60).raise_for_status()
    tab.wait_for("document.querySelectorAll('#routed-layers tbody tr').length === 3")
    chart = "[...document.querySelectorAll('figure')].at(-1)"
    tab.wait_for(f"{chart}.innerText.includes('Hits of routed experts')")
    tab.wait_for(f"{chart}.querySelector('.line[d*=M]') !== null")
    assert "may be left out" in tab.read_text("#routed-policy")
    assert re.search(r"room in memory\s+\d+ of 72", tab.read_text("#routed-sums"))
    rows = tab.evaluate(
        "[...document.querySelectorAll('#routed-layers tbody tr')].map(r => r.innerText)"
    )
    assert all(
        re.match(r"[123]\s+(\d+\.\d|100) %\s+\d+ of 24\s+[\d,]+\s+\d+", row) for row in rows
    ), rows
    tile = tab.evaluate("document.querySelector('#tiles').lastChild.innerText")
    assert re.fullmatch(r"Routed experts\s+(\d+\.\d|100) %\s+hits; room for \d+ of 72", tile), tile
    module = "import('/static/numbers.js')"
    shares = tab.evaluate(
        f"{module}.then((m) => [[9999, 10000], [2, 2], [0, 0]].map((of) => m.nearPercent(...of)))"
    )
    assert shares == ["99.9 %", "100 %", "\N{EN DASH}"]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.screenshot(tmp_path / "routed.png").startswith(PNG)
    check_no_complaints(tab, routed.url)


def test_where_hits_are_not_counted_no_chart_stands_still(
    routed: HomeServerProcess, tab: BrowserTab
) -> None:
    is_drawn = "document.querySelector('#charts').innerText.includes('Hits of routed experts')"
    tab.open(f"{routed.url}/status")
    tab.wait_for(f"location.origin === '{routed.url}' && {LIVE}")
    body = {"prompt": "sort 3, 1, 2", "max_tokens": 4}
    httpx.post(f"{routed.url}/v1/infer", json=body, timeout=60).raise_for_status()
    tab.wait_for(is_drawn)
    httpx.post(f"{routed.url}/moe", json={"mode": "off"}, timeout=60).raise_for_status()
    try:
        tab.wait_for(f"!{is_drawn}")
        tab.open(f"{routed.url}/status")
        tab.wait_for(f"location.origin === '{routed.url}' && {LIVE}")
        assert "Hits of routed experts" not in tab.read_text("#charts")
        tile = tab.evaluate("document.querySelector('#tiles').lastChild.innerText")
        assert re.fullmatch(r"Routed experts\s+\d+\s+of 72 have room in memory", tile), tile
    finally:
        httpx.post(f"{routed.url}/moe", json={"mode": "full"}, timeout=60).raise_for_status()


def test_of_a_dense_base_nothing_is_shown_of_routed_experts(
    server: HomeServerProcess, tab: BrowserTab
) -> None:
    tab.open(f"{server.url}/status")
    tab.wait_for(LIVE)
    assert tab.evaluate("document.querySelector('#routed').offsetHeight") == 0
    assert "Hits of routed experts" not in tab.read_text("main")
    assert "Routed experts" not in tab.read_text("#tiles")
