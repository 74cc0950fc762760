"""From two shells and an empty home: a registry, a publisher, and somebody who installs.

Real processes, real sockets, the command that is on the PATH. `docs/tutorial-registry.md` tells the
same as a person would do it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertctl.install.installer import STARTER

pytestmark = pytest.mark.all

PROMPT = "Sort these numbers: 41, 17, 23, 15"
ANSWER = "15, 17, 23, 41"


@dataclass(frozen=True)
class Shell:
    """Somebody's shell: a home, and the command that is on the PATH."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.home), "OMP_NUM_THREADS": "1"}

    def __call__(self, *words: object, stdin: str = "", code: int = 0) -> Any:
        """Run one command; return the document that it prints."""
        done = subprocess.run(
            ["expertctl", *map(str, words), "--json"],
            cwd=self.home,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)


def shell(folder: Path) -> Shell:
    folder.mkdir()
    return Shell(folder)


@pytest.fixture
def publisher(tmp_path: Path) -> Shell:
    return shell(tmp_path / "publisher")


@pytest.fixture
def reader(tmp_path: Path) -> Shell:
    return shell(tmp_path / "reader")


@dataclass(frozen=True)
class JourneyServer:
    """A registry that runs in a process of its own."""

    host: str
    admin: str
    fingerprint: str


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[JourneyServer]:
    """What `registry init` and `registry serve` make, on a free port."""
    keeper = shell(tmp_path / "keeper")
    made = keeper("registry", "init", tmp_path / "shop")
    words = ["expertctl", "registry", "serve", tmp_path / "shop", "--port", "0", "--json"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            words, cwd=tmp_path, env=keeper.environment, stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())
            host = f"{address['host']}:{address['port']}"
            yield JourneyServer(host, made["token"], made["fingerprint"])
        finally:
            server.terminate()
            server.communicate(timeout=60)


def set_up(person: Shell, registry: JourneyServer, token: str) -> None:
    """Log in, and make the registry the one that is meant."""
    person("login", registry.host, "--token-stdin", stdin=token)
    person("config", "set", "registry", registry.host)


def publish(publisher: Shell, registry: JourneyServer) -> str:
    """Do all that a fresh administrator does up to a published package; return its digest."""
    set_up(publisher, registry, registry.admin)
    publisher("registry", "namespace", "add", "acme")
    publisher("keys", "new", "me", "--namespace", "acme")
    publisher("registry", "keys", "add", "me", "--namespace", "acme")
    publisher("base", "add", STARTER / "base", "--name", "starter/base")
    publisher("unpack", STARTER / "sorting.expert", "sorting")
    publisher("build", "sorting", "--name", "acme/sorting", "--version", "1.0.0", "-o", "a.expert")
    publisher("sign", "a.expert", "--key", "me")
    (package,) = publisher("publish", "a.expert")["packages"]
    assert package["outcome"] == "published"
    return str(package["content_digest"])


def test_what_one_home_publishes_another_finds_installs_and_runs(
    registry: JourneyServer, publisher: Shell, reader: Shell
) -> None:
    content = publish(publisher, registry)
    token = publisher("registry", "user", "add", "bob")["token"]

    set_up(reader, registry, token)
    reader("trust", "registry", "add", registry.host, "--fingerprint", registry.fingerprint)
    (hit,) = reader("search", "sort")["results"]
    assert (hit["name"], hit["version"]) == ("acme/sorting", "1.0.0")
    assert reader("info", "acme/sorting")["offer"]["shown"]["content_digest"] == content
    reader("base", "add", STARTER / "base", "--name", "starter/base")
    (installed,) = reader("install", "acme/sorting")["installed"]
    assert installed["content_digest"] == content
    assert installed["registry"] == registry.host
    answer = reader("run", PROMPT, "--greedy")
    assert answer["text"] == ANSWER
    assert [e["ref"] for e in answer["plan"]["experts"]] == ["acme/sorting@1.0.0"]

    publisher("yank", "acme/sorting@1.0.0", "--reason", "mixes up equal numbers")
    assert reader("search", "sort")["results"] == []
    shutil.rmtree(reader.home / ".expert" / "store")
    reader("install", "acme/sorting", code=3)


def test_without_trusting_the_registry_first_nothing_is_installed(
    registry: JourneyServer, publisher: Shell, reader: Shell
) -> None:
    publish(publisher, registry)
    set_up(reader, registry, publisher("registry", "user", "add", "bob")["token"])
    error = reader("install", "acme/sorting", code=5)["error"]
    assert "trust registry add" in error["hint"]
    assert reader("list")["experts"] == []


def test_with_the_fingerprint_of_another_registry_nothing_is_believed(
    registry: JourneyServer, reader: Shell
) -> None:
    words = ["trust", "registry", "add", registry.host, "--fingerprint", f"sha256:{'0' * 64}"]
    assert reader(*words, code=5)["error"]["code"] == "trust"
    assert reader("trust", "registry", "list")["registries"] == []
