"""A publisher that is killed at each of its requests: nothing half is seen, nothing sent twice."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.package.base_model import read_base
from expertctl.package.read import read_package
from expertctl.registry.upload import UPLOAD_CHUNK_BYTES
from tests.factories import write_base
from tests.registry.live_registry import (
    LiveRegistry,
    PackageWorkspace,
    alice,
    run_live_registry,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

pytestmark = pytest.mark.all

MANY = 30
"""More runs than there are requests to be killed at."""

__all__ = ["alice", "tiny_base", "trust", "workspace"]


@dataclass
class Killer:
    """Kills the process that asks, when it has made as many writing requests as it may."""

    allowed: int = 0
    method: str = "PUT"
    """What kind of request costs one of those that are allowed."""
    victim: int | None = None
    finished: Counter[str] = field(default_factory=Counter)
    lock: Lock = field(default_factory=Lock)

    def around(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") != self.method:
                await app(scope, receive, send)
            elif self._admits():
                await app(scope, receive, self._counting(scope, send))

        return watched

    def _counting(self, scope: Scope, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message.get("status") in {201, 202}:
                self.finished[_key(scope)] += 1
            await send(message)

        return counted

    def _admits(self) -> bool:
        with self.lock:
            self.allowed -= 1
            if self.allowed >= 0 or self.victim is None:
                return True
            os.kill(self.victim, signal.SIGKILL)
            return False


def _key(scope: Scope) -> str:
    """What a request brought: a blob, a chunk from this byte on, or the manifest."""
    ranges = [value for name, value in scope["headers"] if name == b"content-range"]
    return (ranges[0] if ranges else scope["query_string"]).decode() or "manifest"


@pytest.fixture
def killer() -> Killer:
    return Killer()


@pytest.fixture
def live(tmp_path: Path, killer: Killer) -> Iterator[LiveRegistry]:
    with run_live_registry(tmp_path / "registry", middleware=killer.around) as running:
        yield running


def publish(path: Path, killer: Killer, allowed: int) -> int:
    """Run `expertctl publish`, which is killed at the request after those that are allowed."""
    program = "from expertctl.cli.app import main; main()"
    words = [sys.executable, "-c", program, "publish", str(path)]
    killer.allowed, killer.victim = allowed, None
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    killer.victim = process.pid
    try:
        return process.wait(timeout=120)
    finally:
        killer.victim = None


def versions(live: LiveRegistry, secret: str) -> list[str]:
    answer = live.served.client(secret).get("/api/v1/packages/acme/sql")
    return [v["version"] for v in answer.json()["versions"]] if answer.status_code == 200 else []


def test_killed_at_any_request_it_goes_on_where_it_ended(
    live: LiveRegistry, killer: Killer, alice: str, home: Path, workspace: PackageWorkspace
) -> None:
    register_key(live, alice, workspace)
    store_credential(live, home, alice)
    path = workspace.package()
    blobs = len(read_package(path).layout.blobs) + 1
    for _ in range(MANY):
        code = publish(path, killer, allowed=1)
        if code == 0:
            break
        assert (code, versions(live, alice)) == (-signal.SIGKILL, [])
    assert versions(live, alice) == ["1.0.0"]
    assert len(killer.finished) == blobs + 1
    assert set(killer.finished.values()) == {1}


def register_key(live: LiveRegistry, secret: str, workspace: PackageWorkspace) -> None:
    body = {"public_key": workspace.key.public.pem().decode(), "statement": None}
    answer = live.served.client(secret).post("/api/v1/namespaces/acme/keys", json=body)
    assert answer.is_success


def test_killed_before_the_first_byte_nothing_is_there(
    live: LiveRegistry, killer: Killer, alice: str, home: Path, workspace: PackageWorkspace
) -> None:
    register_key(live, alice, workspace)
    store_credential(live, home, alice)
    assert publish(workspace.package(), killer, allowed=0) == -signal.SIGKILL
    assert versions(live, alice) == []
    assert killer.finished == Counter()


def test_killed_between_two_chunks_of_a_blob_it_goes_on_with_the_next_one(
    live: LiveRegistry,
    killer: Killer,
    alice: str,
    home: Path,
    workspace: PackageWorkspace,
    tmp_path: Path,
) -> None:
    register_key(live, alice, workspace)
    store_credential(live, home, alice)
    wide = write_base(tmp_path / "wide", hidden=64)
    larger = replace(workspace, base_dir=wide, base=read_base(wide))
    path = larger.package(lora={"rank": 4096})
    size = max(file.size for file in read_package(path).files)
    killer.method = "PATCH"
    assert publish(path, killer, allowed=1) == -signal.SIGKILL
    first = f"0-{UPLOAD_CHUNK_BYTES - 1}"
    assert killer.finished == Counter([first])
    assert publish(path, killer, allowed=MANY) == 0
    assert versions(live, alice) == ["1.0.0"]
    assert killer.finished[first] == 1
    assert sum(killer.finished.values()) == -(-size // UPLOAD_CHUNK_BYTES)
