"""Make the screenshots of docs/images: pages of a real server and a real registry in Chromium.

Run ``python -m scripts.screenshots`` in the root of the checkout; it needs Chromium. Both servers
are processes on loopback with an empty home: the registry holds experts of the starter pack in a
namespace of their own, and the generation server answers prompts while its page is shown. Times,
keys and free memory differ from run to run; what the pages consist of does not.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import httpx2 as httpx
from PIL import Image

from tests.server.status_page.browser import BrowserTab, run_browser

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
EXPERTCTL = Path(sys.executable).with_name("expertctl")
WIDTH, HEIGHT = 1100, 760
MAX_BYTES = 150_000
_COLOURS = 128
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
_CLIENTS, _ROUNDS = 6, 60
_PUBLISHED = ("dates", "plurals", "sorting", "sql", "units")
_PROMPTS = (
    "Sort these numbers: 41, 17, 23, 15",
    "What is the plural of city?",
    "What is the past tense of carry?",
    "Answer with an exclamation mark. What is the plural of wolf?",
    "Change the date 3rd of July 1927 to year-month-day.",
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder with a home in it, in which commands run."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all commands; nothing of the user's home is in it."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        home = {"HOME": str(self.folder), "EXPERT_HOME": str(self.folder / "home")}
        return {**kept, **home, "EXPERT_ENCODER": "lexical", "NO_COLOR": "1"}

    def run(self, *words: str, text: str = "") -> str:
        """Run a command with ``text`` as its stdin; return its stdout.

        Raises:
            CalledProcessError: when it fails.
        """
        done = subprocess.run(  # noqa: S603  # our own program
            [EXPERTCTL, *words],
            cwd=self.folder,
            env=self.environment,
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    @contextmanager
    def serve(self, *words: str) -> Iterator[str]:
        """Run a server on a free port, and return its address once it listens."""
        process = subprocess.Popen(  # noqa: S603  # our own program
            [EXPERTCTL, *words, "--port", "0", "--json"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = _ADDRESS.search(line)
            if found is None:
                raise RuntimeError(f"no address in {line!r}")
            yield found[0]
        finally:
            process.terminate()
            process.wait()


def take_registry_screenshots(space: Workspace, tab: BrowserTab) -> None:
    """Publish the starter pack in a new registry, and show its search and one package."""
    token = space.run("registry", "init", "shop", "--read", "public")
    with space.serve("registry", "serve", "shop") as url:
        host = url.removeprefix("http://")
        space.run("login", host, "--token-stdin", text=token)
        space.run("config", "set", "registry", host)
        space.run("registry", "namespace", "add", "acme")
        space.run("keys", "new", "acme", "--namespace", "acme")
        space.run("registry", "keys", "add", "acme", "--namespace", "acme")
        for name in _PUBLISHED:
            space.run("publish", build_own(space, name))
        tab.open(f"{url}/search?q=acme", width=WIDTH, height=HEIGHT)
        save(tab, "registry-search.png", ready="document.readyState === 'complete'")
        tab.open(f"{url}/packages/acme/sorting", width=WIDTH, height=HEIGHT)
        save(tab, "registry-package.png", ready="document.readyState === 'complete'")


def build_own(space: Workspace, name: str) -> str:
    """Build an expert of the starter pack in a namespace of its own, and return the file."""
    space.run("unpack", str(ROOT / "expertctl" / "_starter" / f"{name}.expert"), name)
    for path in (space.folder / name / "expert.json", space.folder / name / "README.md"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"starter/{name}", f"acme/{name}"), encoding="utf-8")
    (space.folder / name / "model.sig").unlink()
    space.run("build", name, "-o", f"{name}.expert", "--sign", "acme")
    return f"{name}.expert"


def take_status_screenshot(space: Workspace, tab: BrowserTab) -> None:
    """Let a generation server answer some prompts, and show its status page."""
    space.run("run", _PROMPTS[0])
    with space.serve("serve") as url:
        tab.open(f"{url}/status", width=WIDTH, height=HEIGHT)
        tab.wait_for("document.querySelector('#state').innerText === 'Live'")
        with ThreadPoolExecutor(_CLIENTS) as clients:
            jobs = [clients.submit(ask, url, prompt) for prompt in _PROMPTS * _ROUNDS]
            for job in jobs[: len(jobs) * 2 // 3]:
                job.result()
            save(tab, "serve-status.png", ready="document.readyState === 'complete'")


def ask(url: str, prompt: str) -> None:
    """Have a prompt answered by the experts that suit it."""
    body = {"prompt": prompt, "max_tokens": 40}
    httpx.post(f"{url}/v1/infer", json=body, timeout=300).raise_for_status()


def save(tab: BrowserTab, name: str, *, ready: str) -> None:
    """Write what a page shows once it is ready, with few colours, so that the file is small."""
    tab.wait_for(f"new Promise((done) => setTimeout(() => done({ready}), 1500))")
    tab.send_command("Emulation.setScrollbarsHidden", hidden=True)
    path = IMAGES / name
    data = tab.screenshot(path, whole=False)
    small = Image.open(BytesIO(data)).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size} bytes")
    if size > MAX_BYTES:
        raise RuntimeError(f"{name} is larger than {MAX_BYTES} bytes")


def main() -> None:
    """Make all screenshots."""
    with tempfile.TemporaryDirectory() as name, run_browser(Path(name) / "profile") as tab:
        for folder, take in (
            ("registry", take_registry_screenshots),
            ("serve", take_status_screenshot),
        ):
            space = Workspace(Path(name) / folder)
            space.folder.mkdir()
            take(space, tab)


if __name__ == "__main__":
    main()
