"""A hub of models in this process, as its client asks for one, with faults to switch on.

It answers the requests that ``huggingface_hub`` sends for a listing, the metadata of a file and its
bytes. Large files are redirected to another address, as the real hub redirects to its CDN.
"""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from expertctl.install import hub as hub_module

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
LATER_COMMIT = "9f0c2a77b7b24e0f8a5f21e6a5a1de1f3ad0a001"
MAX_GIT_FILE = 4096
"""Longer files are stored with Git LFS."""

Stage = Literal["list", "head", "get", "cdn"]
Headers = dict[str, str]


@dataclass
class SeenRequest:
    """One request, and how many bytes of a body were sent for it."""

    stage: Stage
    path: str
    headers: Headers
    sent: int = 0

    @property
    def name(self) -> str:
        return unquote(self.path).rpartition("/")[2]


@dataclass
class StatusFault:
    """An answer with a status in place of the right one."""

    status: int
    headers: Headers = field(default_factory=dict)
    body: bytes = b'{"error": "\x1b[31mhub text"}'


@dataclass
class HubFaults:
    """What goes wrong; nothing, as long as nothing is set."""

    answers: dict[Stage, StatusFault] = field(default_factory=dict)
    only: str = ""
    """The only file that answers other than the listing fail for."""
    cut_after: int | None = None
    """After how many bytes of an answer the connection is closed."""
    cuts: int = 1_000
    """How many answers are cut."""
    stall: bool = False
    """Whether a cut connection stays open, without a byte, until the server ends."""
    no_length: bool = False
    """Whether answers state no length, so that a cut looks like the end."""
    no_ranges: bool = False
    edit_listing: Callable[[dict[str, Any]], Any] | None = None
    edit_headers: Callable[[Headers], None] | None = None
    """Changes the headers that describe a file."""
    edit_range: Callable[[Headers], None] | None = None
    """Changes the headers of an answer with a part."""
    edit_bytes: Callable[[bytes], bytes] | None = None


class HubRepository:
    """The files of a repository at its only commit."""

    def __init__(self, files: dict[str, bytes], *, commit: str = COMMIT) -> None:
        self.files, self.commit = files, commit
        self.revisions = {"main", "v1", "refs/pr/1"}

    @classmethod
    def from_folder(cls, folder: Path, *, commit: str = COMMIT) -> "HubRepository":
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        more = {"README.md": b"# A model\n", "code.py": b"raise SystemExit"}
        return cls({**files, **more}, commit=commit)

    def is_large(self, name: str) -> bool:
        return len(self.files[name]) > MAX_GIT_FILE

    def etag(self, name: str) -> str:
        data = self.files[name]
        if self.is_large(name):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if self.is_large(name):
                entry["lfs"] = {"sha256": self.etag(name), "size": len(data), "pointerSize": 130}
            else:
                entry["blobId"] = self.etag(name)
            siblings.append(entry)
        return {"id": "any", "sha": self.commit, "private": False, "siblings": siblings}


class HubServer:
    """Two servers on this machine: the hub, and where it redirects to for large files."""

    def __init__(self) -> None:
        self.repositories: dict[str, HubRepository] = {}
        self.faults = HubFaults()
        self.requests: list[SeenRequest] = []
        self.stalled = threading.Event()
        """Set when an answer stands still."""
        self._ended = threading.Event()
        self._servers = [self._start(_make_handler(self, is_cdn=flag)) for flag in (False, True)]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{s.server_port}" for s in self._servers)

    def count_sent(self, name: str = "") -> int:
        """Return how many bytes of files, or of one file, were sent."""
        files = [r for r in self.requests if r.stage in {"get", "cdn"} and r.path.endswith(name)]
        return sum(request.sent for request in files)

    def close(self) -> None:
        self._ended.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def wait_for_end(self) -> None:
        self.stalled.set()
        self._ended.wait()

    def _start(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = _QuietServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server


@contextmanager
def open_hub() -> Iterator[HubServer]:
    """Run a hub until the end of the block."""
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def open_user_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, token: str
) -> Iterator[HubServer]:
    """Run the hub of a user who has a token, and an empty cache below a folder."""
    for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no token"))
    monkeypatch.setattr(hub_module, "_PAUSES", (0.0, 0.0))
    with open_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(folder / "hf"))
        monkeypatch.setenv("HF_TOKEN", token)
        yield server
        close_session()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *place: Any) -> None:
        """Print what is our own mistake, not that a client has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*place)


def _make_handler(hub: HubServer, *, is_cdn: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(_HubHandler):
        server_state, at_cdn = hub, is_cdn

    return Handler


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer
    at_cdn: bool

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer("head")

    def do_GET(self) -> None:
        is_listing = self.path.startswith("/api/")
        self._answer("cdn" if self.at_cdn else "list" if is_listing else "get")

    def _answer(self, stage: Stage) -> None:
        hub = self.server_state
        path = unquote(urlsplit(self.path).path)
        seen = SeenRequest(stage, path, {k.casefold(): v for k, v in self.headers.items()})
        hub.requests.append(seen)
        fault = hub.faults.answers.get(stage)
        with suppress(ConnectionError):
            if fault is not None and (stage == "list" or path.endswith(hub.faults.only)):
                self._send(fault.status, fault.headers, fault.body)
            elif stage == "list":
                self._send_listing(path)
            else:
                self._send_file(path, stage, seen)

    def _send_listing(self, path: str) -> None:
        hub = self.server_state
        name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        repository = hub.repositories.get(name)
        if repository is None:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}')
        elif revision not in {repository.commit, *repository.revisions}:
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "no revision"}')
        else:
            document: Any = repository.listing()
            if hub.faults.edit_listing is not None:
                document = hub.faults.edit_listing(document)
            self._send(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _send_file(self, path: str, stage: Stage, seen: SeenRequest) -> None:
        hub = self.server_state
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        commit, _, file = rest.partition("/")
        repository = hub.repositories[name]
        commit, asked = repository.commit, commit
        if asked not in {commit, *repository.revisions} or file not in repository.files:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        data, is_large = repository.files[file], repository.is_large(file)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{repository.etag(file)}"'}
        headers["Content-Length"] = str(len(data))
        if is_large and not self.at_cdn:
            headers |= {
                "X-Linked-Etag": headers.pop("ETag"),
                "X-Linked-Size": headers.pop("Content-Length"),
                "Location": hub.cdn + self.path,
            }
        if hub.faults.edit_headers is not None and path.endswith(hub.faults.only):
            hub.faults.edit_headers(headers)
        if is_large and not self.at_cdn:
            self._send(302, headers, b"")
        elif stage == "head":
            self._send(200, headers, b"")
        else:
            self._send_bytes(data, headers, seen)

    def _send_bytes(self, data: bytes, headers: Headers, seen: SeenRequest) -> None:
        faults, status = self.server_state.faults, 200
        if faults.edit_bytes is not None and seen.path.endswith(faults.only):
            data = faults.edit_bytes(data)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start and not faults.no_ranges:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data = data[start:]
            if faults.edit_range is not None:
                faults.edit_range(headers)
        headers["Content-Length"] = str(len(data))
        if faults.no_length:
            del headers["Content-Length"]
            headers["Connection"] = "close"
        is_meant = seen.path.endswith(faults.only)
        is_cut = is_meant and faults.cut_after is not None and faults.cuts > 0
        if is_cut:
            faults.cuts -= 1
            self.close_connection = True
            data = data[: faults.cut_after]
        self._start(status, headers)
        self.wfile.write(data)
        self.wfile.flush()
        seen.sent = len(data)
        if is_cut and faults.stall:
            self.server_state.wait_for_end()

    def _send(self, status: int, headers: Headers, body: bytes) -> None:
        self._start(status, {"Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _start(self, status: int, headers: Headers) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
