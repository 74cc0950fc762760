"""The page to try the server, in a real browser: with the starter base, and with known answers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.openai.scripted_base import (
    CONTEXT,
    HELLO,
    HOSTILE,
    THOUGHTS,
    make_scripted_packages,
)
from tests.server.server_process import HomeServerProcess, create_api_key, run_home_server
from tests.server.status_page.browser import BrowserTab, run_browser

pytestmark = pytest.mark.all
READY = "document.querySelector('#state').innerText === 'Ready'"
LAST = "[...document.querySelectorAll('.answer')].at(-1)"
EXPERT = "acme/sql@1.0.0"


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeServerProcess]:
    with run_home_server(tmp_path_factory.mktemp("starter") / "home") as server:
        yield server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeServerProcess]:
    folder = tmp_path_factory.mktemp("scripted")
    home = make_scripted_packages(folder / "stock").make_home(folder / "home").root
    with run_home_server(home) as server:
        yield server


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserTab]:
    with run_browser(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


def open_chat(tab: BrowserTab, server: HomeServerProcess, *, width: int = 1280) -> None:
    tab.open(f"{server.url}/chat", width=width)
    tab.wait_for(f"location.origin === '{server.url}' && {READY}")
    tab.wait_for("document.querySelectorAll('.turn').length === 0")
    tab.complaints.clear()
    tab.asked.clear()


def start_message(tab: BrowserTab, text: str) -> None:
    """Write a message and send it with the keyboard."""
    tab.evaluate("document.querySelector('#message').focus()")
    tab.type_text(text)
    tab.send_key("Enter", text="\r")


def send_message(tab: BrowserTab, text: str) -> str:
    """Send a message; return the text of the answer once it is complete."""
    before = tab.evaluate("document.querySelectorAll('.answer').length")
    start_message(tab, text)
    tab.wait_for(f"{READY} && document.querySelectorAll('.answer').length > {before}")
    tab.wait_for(f"{LAST}.getAttribute('aria-busy') === 'false'")
    return read_answer(tab)


def read_answer(tab: BrowserTab) -> str:
    return str(tab.evaluate(f"{LAST}.querySelector(':scope > .text').textContent"))


def read_plan(tab: BrowserTab) -> str:
    """Open the plan of the last answer as a person does, and return its text."""
    tab.evaluate(f"{LAST}.querySelector('.plan summary').click()")
    return str(tab.evaluate(f"{LAST}.querySelector('.plan').innerText"))


def choose(tab: BrowserTab, value: str) -> None:
    tab.evaluate(f"document.querySelector('#choice [value={json.dumps(value)}]').click()")


def read_jobs(server: HomeServerProcess) -> dict[str, int]:
    jobs: dict[str, int] = httpx.get(f"{server.url}/status/data", timeout=60).json()["jobs"]
    return jobs


def test_the_router_chooses_and_the_page_says_why(
    starter: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, starter)
    assert send_message(tab, "Sort these numbers: 41, 17, 23") == "17, 23, 41"
    plan = read_plan(tab)
    assert plan.startswith("Plan: starter/sorting@1.0.0 · why")
    assert re.search(r"starter/sorting@1\.0\.0 best of \d+, score [\d.]+", plan)
    assert re.search(r"Not chosen:\s+starter/\w+@1\.0\.0 score [\d.]+ is below", plan)
    figures = tab.read_text(".answer .figures")
    assert re.match(r"\d+ tokens · first after [\d.]+ m?s · [\d.,]+ tok/s", figures)
    assert tab.complaints == []
    assert {url for url in tab.asked if not url.startswith(f"{starter.url}/")} == set()


def test_the_base_or_named_experts_answer_if_they_are_chosen(
    starter: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, starter)
    choose(tab, "base")
    send_message(tab, "Sort these numbers: 3, 1, 2")
    assert "the base answers alone, as asked" in read_plan(tab)
    assert tab.read_text("#chosen") == "the base alone"
    choose(tab, "named")
    start_message(tab, "Sort these numbers: 3, 1, 2")
    assert "Choose at least one expert" in tab.read_text("#problem")
    choose(tab, "starter/units@1.0.0")
    choose(tab, "starter/sorting@1.0.0")
    assert tab.read_text("#chosen") == "starter/units@1.0.0 + starter/sorting@1.0.0"
    choose(tab, "starter/units@1.0.0")
    tab.evaluate("document.querySelector('#message').value = ''")
    assert send_message(tab, "Sort these numbers: 3, 1, 2") == "1, 2, 3"
    assert "starter/sorting@1.0.0 named by the user" in read_plan(tab)
    assert tab.read_text("#problem") == ""


def test_text_is_text_whatever_is_written(scripted: HomeServerProcess, tab: BrowserTab) -> None:
    open_chat(tab, scripted)
    hostile = "<img src=x onerror=\"document.title='asked'\"> hostile"
    assert send_message(tab, hostile) == "".join(HOSTILE)
    assert tab.evaluate("document.querySelector('.asked').innerText") == hostile
    assert tab.evaluate("document.querySelectorAll('#turns img, #turns script').length") == 0
    assert tab.evaluate("document.title") == "Chat · expertctl"
    assert [url for url in tab.asked if not url.startswith(scripted.url)] == []
    assert tab.complaints == []


@pytest.mark.parametrize("way", ["button", "escape"])
def test_a_stopped_answer_stays_and_its_job_is_cancelled(
    way: str, scripted: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, scripted)
    cancelled = read_jobs(scripted)["cancelled"]
    start_message(tab, "go on forever")
    tab.wait_for(f"({LAST}?.innerText ?? '').includes('On and')")
    if way == "button":
        tab.evaluate("document.querySelector('#stop').click()")
    else:
        tab.send_key("Escape")
    tab.wait_for(f"{READY} && {LAST}.querySelector('.figures').innerText === 'Stopped.'")
    stopped = read_answer(tab)
    assert stopped.startswith("On and")
    assert tab.evaluate("document.querySelector('#stop').hidden")
    for _ in range(600):
        if read_jobs(scripted)["cancelled"] > cancelled:
            break
    assert read_jobs(scripted)["cancelled"] == cancelled + 1
    assert send_message(tab, "hello") == "".join(HELLO)
    assert tab.evaluate("document.querySelectorAll('.answer').length") == 2


def test_a_conversation_goes_on_and_begins_anew(
    scripted: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, scripted)
    sent = "window.sent = []; const before = fetch; window.fetch = (url, options) => "
    tab.evaluate(f"{sent} {{ sent.push([url, options.body]); return before(url, options); }}; 0")
    send_message(tab, "one")
    send_message(tab, "two")
    bodies: Any = tab.evaluate("sent.filter(([url]) => url.endsWith('completions'))")
    assert [one["content"] for one in json.loads(bodies[-1][1])["messages"]] == [
        "one",
        "".join(HELLO),
        "two",
    ]
    tab.evaluate("document.querySelector('#clear').click()")
    assert tab.evaluate("document.querySelector('#turns').children.length") == 0
    assert tab.evaluate("document.activeElement.id") == "message"
    send_message(tab, "three")
    bodies = tab.evaluate("sent.filter(([url]) => url.endsWith('completions'))")
    assert len(json.loads(bodies[-1][1])["messages"]) == 1


def test_enter_sends_and_with_shift_begins_a_line(
    scripted: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, scripted, width=390)
    tab.evaluate("document.querySelector('#message').focus()")
    tab.type_text("one")
    shifted = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8}
    tab.send_command("Input.dispatchKeyEvent", type="keyDown", text="\r", **shifted)
    tab.send_command("Input.dispatchKeyEvent", type="keyUp", **shifted)
    tab.type_text("two")
    assert tab.evaluate("document.querySelector('#message').value") == "one\ntwo"
    assert tab.evaluate("document.querySelectorAll('.turn').length") == 0
    assert send_message(tab, "!") == "".join(HELLO)
    assert tab.evaluate("document.querySelector('.asked').innerText") == "one\ntwo!"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_reasoning_stands_apart_from_the_answer(
    scripted: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, scripted)
    assert send_message(tab, "ponder").strip() == "".join(THOUGHTS[-2:])
    reasoning = f"{LAST}.querySelectorAll('details')[1].querySelector('.text').textContent"
    assert tab.evaluate(reasoning) == "".join(THOUGHTS[1:3])


def test_a_refused_message_comes_back_with_the_reason_in_words(
    scripted: HomeServerProcess, tab: BrowserTab
) -> None:
    open_chat(tab, scripted)
    long = "word " * CONTEXT
    start_message(tab, long)
    tab.wait_for("!document.querySelector('#problem').hidden")
    problem = tab.read_text("#problem")
    assert "maximum context length" in problem
    assert problem.endswith("begin a new conversation, or write less.")
    assert tab.evaluate("document.querySelector('#message').value") == long.strip()
    assert tab.evaluate("document.querySelectorAll('.turn').length") == 0


def test_a_server_that_ends_is_told_of(tab: BrowserTab, tmp_path: Path) -> None:
    home = make_scripted_packages(tmp_path / "stock").make_home(tmp_path / "home").root
    with run_home_server(home) as server:
        open_chat(tab, server)
        server.stop()
        start_message(tab, "hello")
        tab.wait_for("!document.querySelector('#problem').hidden")
        assert "The server does not answer" in tab.read_text("#problem")
        assert tab.evaluate("document.querySelector('#message').value") == "hello"


def test_a_key_is_asked_for_sent_and_kept_nowhere(tab: BrowserTab, tmp_path: Path) -> None:
    home = make_scripted_packages(tmp_path / "stock").make_home(tmp_path / "keyed").root
    secret = create_api_key(home, "chat")
    with run_home_server(home) as server:
        tab.open(f"{server.url}/chat", width=390)
        tab.wait_for("document.activeElement.id === 'key'")
        assert tab.evaluate("document.querySelector('#chat').hidden")
        tab.type_text("xpk_wrong")
        tab.send_key("Enter", text="\r")
        tab.wait_for("document.querySelector('#ask-why').innerText.includes('not take this key')")
        tab.type_text(secret)
        tab.send_key("Enter", text="\r")
        tab.wait_for(READY)
        assert send_message(tab, "hello") == "".join(HELLO)
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert secret not in tab.evaluate(kept)
        assert secret not in tab.evaluate("document.documentElement.outerHTML")
        assert not any(secret in address for address in tab.asked)
