"""Debian's Chromium without a screen, driven by its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = "chromium"
MAX_WAIT_SECONDS = 60.0
PNG = b"\x89PNG\r\n\x1a\n"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=http://127.0.0.1:9",
    "--proxy-bypass-list=127.0.0.1",
    "--remote-debugging-port=0",
)


class BrowserTab:
    """One page: what it shows, what it complains of, what it asks for."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._count = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """What was written to the console as an error or a warning, and errors of scripts."""
        self.asked: list[str] = []
        """The addresses of all requests."""
        self._lent: dict[str, Path] = {}

    def attach(self) -> None:
        """Open the page that everything else is about."""
        target = self.send_command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send_command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send_command(f"{domain}.enable")

    def send_command(self, method: str, **params: Any) -> dict[str, Any]:
        """Give one command and return what it results in."""
        number = self._send(method, params)
        while (answer := self._receive()).get("id") != number:
            self._record_event(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Go to an address, in a window of a size and with a scheme of colours."""
        self.send_command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send_command("Emulation.setEmulatedMedia", features=[scheme])
        self.send_command("Page.navigate", url=url)

    def serve_modules_from(self, start: str, folder: Path) -> None:
        """Answer requests for modules whose address begins so with files, instead of the server."""
        self._lent[start] = folder
        self.send_command(
            "Fetch.enable", patterns=[{"urlPattern": f"{start}*"} for start in self._lent]
        )

    def evaluate(self, script: str) -> Any:
        """Return what an expression of JavaScript is in the page."""
        answer = self.send_command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def read_text(self, selector: str) -> str:
        """Return the text of an element, empty where there is none that is seen."""
        name = json.dumps(selector)
        return str(self.evaluate(f"document.querySelector({name})?.innerText ?? ''"))

    def wait_for(self, script: str) -> Any:
        """Return the first value of an expression that is true."""
        until = time.monotonic() + MAX_WAIT_SECONDS
        frame = "new Promise((done) => setTimeout(done, 50))"
        while time.monotonic() < until:
            if found := self.evaluate(f"{frame}.then(() => {{ return {script} }})"):
                return found
        raise AssertionError(f"never true: {script}; the page says {self.read_text('body')!r}")

    def send_key(self, key: str, *, text: str = "") -> None:
        """Press a key."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37}.get(key, 0)
        known = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        down = {**known, "text": text} if text else known
        self.send_command(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **down
        )
        self.send_command("Input.dispatchKeyEvent", type="keyUp", **known)

    def type_text(self, text: str) -> None:
        """Put a text where the focus is."""
        self.send_command("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        """Write what is seen as a PNG, and return its bytes."""
        answer = self.send_command(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        data = base64.b64decode(answer["data"])
        path.write_bytes(data)
        return data

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        return self._count

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=MAX_WAIT_SECONDS))
        return message

    def _record_event(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.complaints.append(str(params["args"]))
            case "Fetch.requestPaused":
                self._fulfil_request(params["requestId"], params["request"]["url"])
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    def _fulfil_request(self, request: str, url: str) -> None:
        """Answer with a lent file; what the browser says to that is nobody's concern."""
        start, folder = next(one for one in self._lent.items() if url.startswith(one[0]))
        content = base64.b64encode((folder / url.removeprefix(start)).read_bytes()).decode()
        headers = [{"name": "Content-Type", "value": "text/javascript"}]
        answer = {"requestId": request, "responseCode": 200, "responseHeaders": headers}
        self._send("Fetch.fulfillRequest", {**answer, "body": content})


@contextmanager
def run_browser(profile: Path) -> Iterator[BrowserTab]:
    """Start a browser with a profile of its own and give its one page."""
    assert shutil.which(CHROMIUM), "apt-get install chromium"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        # No pings: while a server compiles kernels, a busy machine answers none for a while.
        with connect(
            _wait_for_address(profile), max_size=None, proxy=None, ping_interval=None
        ) as connection:
            tab = BrowserTab(connection)
            tab.attach()
            yield tab
    finally:
        process.terminate()
        process.wait(timeout=MAX_WAIT_SECONDS)


def _wait_for_address(profile: Path) -> str:
    """Where the browser listens, which it writes down once it does."""
    until, written = time.monotonic() + MAX_WAIT_SECONDS, profile / "DevToolsActivePort"
    while time.monotonic() < until:
        lines = written.read_text().splitlines() if written.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError("the browser does not start")
