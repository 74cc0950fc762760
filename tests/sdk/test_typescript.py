"""The TypeScript client: compiled strictly, alone, and against a real server, with Node."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl import __version__, errors
from expertctl.errors import ExpertError
from tests.server.harness import BASE, EXPERTS, make_served_packages
from tests.server.server_process import (
    HomeServerProcess,
    create_api_key,
    make_environment,
    run_home_server,
)
from tests.server.status_page.browser import run_browser

pytestmark = pytest.mark.all
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sdk" / "typescript"
PATIENCE = 120.0


def ran(folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Run a program in a folder and return what it says; its output is shown if it fails."""
    assert shutil.which(words[0]), f"{words[0]} is missing: apt-get install nodejs npm"
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, env=env, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with what it is built by, in a folder that no other worker has."""
    folder = tmp_path_factory.mktemp("package") / "typescript"
    made = shutil.ignore_patterns("node_modules", "build", "dist")
    shutil.copytree(PACKAGE, folder, ignore=made)
    ran(folder, "npm", "ci")
    return folder


@pytest.fixture(scope="module")
def compiled(package: Path) -> Path:
    """The package and its tests, compiled as strictly as can be."""
    ran(package, "npm", "run", "check")
    return package / "build" / "tests"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typescript")
    return make_served_packages(folder / "stock").make_home(folder / "home").root


@pytest.fixture(scope="module")
def keys(home: Path) -> tuple[str, str, str]:
    slow = create_api_key(home, "slow", "--per-minute", "10")
    return create_api_key(home, "one", "--manage"), create_api_key(home, "other"), slow


@pytest.fixture(scope="module")
def server(home: Path, keys: tuple[str, str]) -> Iterator[HomeServerProcess]:
    with run_home_server(home) as server:
        yield server


def test_it_reads_streams_maps_names_and_guards_the_key_without_a_server(compiled: Path) -> None:
    tests = sorted(str(path) for path in compiled.glob("*.test.js"))
    assert len(tests) >= 5
    assert "# fail 0\n" in ran(compiled, "node", "--test", "--test-reporter=tap", *tests)


@pytest.mark.parametrize("name", ["client", "document"])
def test_it_agrees_with_a_real_server(
    name: str, compiled: Path, server: HomeServerProcess, keys: tuple[str, str, str], home: Path
) -> None:
    surroundings = {
        **make_environment(home),
        "EXPERT_TEST_URL": server.url,
        "EXPERT_TEST_KEY": keys[0],
        "EXPERT_TEST_OTHER_KEY": keys[1],
        "EXPERT_TEST_SLOW_KEY": keys[2],
        "EXPERT_TEST_BASE": BASE,
        "EXPERT_TEST_EXPERTS": ",".join(EXPERTS),
    }
    test = str(compiled / "server" / f"{name}.test.js")
    said = ran(compiled, "node", "--test", "--test-reporter=tap", test, env=surroundings)
    assert "# fail 0\n" in said
    assert "# skipped 0\n" in said


UNREAD = """
import {{ ExpertClient }} from {index};
const stream = new ExpertClient({{ baseUrl: {url} }}).inferStream({{ prompt: "?" }});
console.log(typeof stream.next);
"""


def test_a_stream_that_is_never_read_keeps_no_program_running(
    compiled: Path, server: HomeServerProcess, tmp_path: Path
) -> None:
    index = (compiled.parent / "src" / "index.js").as_uri()
    program = tmp_path / "unread.mjs"
    program.write_text(UNREAD.format(index=json.dumps(index), url=json.dumps(server.url)))
    assert ran(tmp_path, "node", program.name) == "function\n"


BROWSED = """
import("/sdk/index.js").then(async ({ ExpertClient }) => {
  const client = new ExpertClient({ baseUrl: location.origin, apiKey: KEY });
  const pieces = [];
  for await (const { text } of client.inferStream(QUESTION)) pieces.push(text);
  const whole = await client.infer(QUESTION);
  for await (const { text } of client.inferStream({ ...QUESTION, maxTokens: 100000 }))
    if (text !== "") break;
  const refused = await new ExpertClient({ baseUrl: location.origin }).models().catch((e) => e);
  return { streamed: pieces.join(""), text: whole.text, refused: refused.name };
})
"""


def test_it_works_in_a_browser_too(
    compiled: Path, server: HomeServerProcess, keys: tuple[str, str, str], tmp_path: Path
) -> None:
    question = {"prompt": "Sort: 3, 1, 2", "temperature": 0, "maxTokens": 12}
    script = BROWSED.replace("KEY", json.dumps(keys[0])).replace("QUESTION", json.dumps(question))
    with run_browser(tmp_path / "profile") as tab:
        tab.serve_modules_from(f"{server.url}/sdk/", compiled.parent / "src")
        tab.open(f"{server.url}/status")
        tab.wait_for("document.readyState === 'complete'")
        told = tab.evaluate(script)
        assert told["text"] == told["streamed"] != ""
        assert told["refused"] == "UnauthenticatedError"
        key = {"headers": {"authorization": f"Bearer {keys[0]}"}}
        numbers = f"fetch('/status/data', {json.dumps(key)}).then((answer) => answer.json())"
        tab.wait_for(f"{numbers}.then((data) => data.jobs.running === 0)")


def test_its_errors_are_those_of_ours(compiled: Path) -> None:
    told = {tuple(one) for one in json.loads(ran(compiled, "node", str(compiled / "codes.js")))}
    own = {(one.__name__, one.code, one.__base__.__name__) for one in _errors(ExpertError)}
    root = (ExpertError.__name__, ExpertError.code)
    assert {one for one in told if one[:2] != root} == {one for one in own if one[:2] != root}


def test_the_package_has_what_it_says_and_depends_on_nothing(package: Path) -> None:
    manifest = json.loads((PACKAGE / "package.json").read_text())
    assert manifest["version"] == __version__
    assert "dependencies" not in manifest
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    [packed] = json.loads(ran(package, "npm", "pack", "--dry-run", "--json"))
    names = {file["path"] for file in packed["files"]}
    assert {"dist/index.js", "dist/index.d.ts", "README.md", "LICENSE"} <= names
    assert not any(name.startswith(("tests/", "build/", "node_modules/")) for name in names)


def test_the_lock_names_no_place_and_every_digest() -> None:
    lock = json.loads((PACKAGE / "package-lock.json").read_text())
    others = [one for name, one in lock["packages"].items() if name]
    assert all("resolved" not in one and one["integrity"].startswith("sha512-") for one in others)


def _errors(kind: type[ExpertError]) -> Iterator[type[ExpertError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _errors(child)
