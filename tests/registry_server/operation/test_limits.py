"""Requests that no client of ours sends are refused before anything looks at them."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from expertctl.http.limits import DISCARDED_BYTES, MAX_HEADER_BYTES, STALL_SECONDS
from registry_server.app import make_request_limits
from registry_server.operation.serve import DRAIN_SECONDS
from registry_server.settings import RegistryLimits, ServerSettings
from tests.registry.live_registry import run_live_registry
from tests.registry_server.harness import URL

SMALL = RegistryLimits(body_bytes=100, manifest_bytes=200)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        body = await Request(scope, receive).body()
        await PlainTextResponse(f"{scope['path']} {len(body)}")(scope, receive, send)


def client(tmp_path: Path, **settings: Any) -> TestClient:
    given = ServerSettings(data=tmp_path, limits=SMALL, **settings)
    return TestClient(make_request_limits(echo, given), base_url=URL)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8080",
        "localhost:1",
        "LOCALHOST",
        "localhost.",
        "[::1]:8080",
        "experts.example.org",
        "Experts.Example.Org:443",
    ],
)
def test_our_own_names_are_answered(host: str, tmp_path: Path) -> None:
    own = client(tmp_path, url="https://experts.example.org")
    assert own.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "experts.example.org.evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.example",
        "192.0.2.7",
        "[2001:db8::1]",
        "",
        "localhost:80:80",
        "localhost:x",
        "user@localhost",
        "localhost/",
        "local host",
        "localhost\x01",
    ],
)
def test_any_other_host_is_refused(host: str, tmp_path: Path) -> None:
    """Attack 85: a name of somebody else that leads here, by DNS rebinding or a poisoned cache."""
    answer = client(tmp_path, url="https://experts.example.org").get("/", headers={"Host": host})
    assert answer.status_code == 421
    assert "evil" not in answer.text


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/v1/search", 421, "misdirected"),
        ("/v2/acme/x/manifests/v1", 421, "UNSUPPORTED"),
        ("/" + "a" * 5000, 414, "too_large"),
        ("/v2/" + "a" * 5000, 414, "NAME_INVALID"),
    ],
)
def test_a_refused_request_has_the_code_of_its_status(
    path: str, status: int, code: str, tmp_path: Path
) -> None:
    host = "evil.example" if status == 421 else "localhost"
    answer = client(tmp_path).get(path, headers={"Host": host})
    body = answer.json()
    found = body["errors"][0] if "errors" in body else body["error"]
    assert (answer.status_code, found["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "code"), [("/api/v1/users", "media_type"), ("/v2/a/b/manifests/v1", "UNSUPPORTED")]
)
def test_a_compressed_body_has_the_code_of_its_status(path: str, code: str, tmp_path: Path) -> None:
    answer = client(tmp_path).put(path, content=b"x", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert f'"code": "{code}"' in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:3000", "null", "", f"{URL}.evil.example"]
)
def test_attack_80_a_page_of_another_site_writes_nothing(
    method: str, origin: str, tmp_path: Path
) -> None:
    """A browser sends the login of the pages with requests of other sites, too."""
    answer = client(tmp_path).request(method, "/v2/a/b/blobs/uploads/", headers={"Origin": origin})
    assert (answer.status_code, answer.headers["Connection"]) == (403, "close")
    assert "evil" not in answer.text
    assert "set `url` in registry.toml" in answer.text


def test_a_page_of_our_own_writes_and_every_page_may_read(tmp_path: Path) -> None:
    own = client(tmp_path)
    assert own.post("/", headers={"Origin": URL}).status_code == 200
    assert own.get("/", headers={"Origin": "https://evil.example"}).status_code == 200


def test_two_hosts_are_refused(tmp_path: Path) -> None:
    headers = [("Host", "localhost"), ("Host", "evil.example")]
    assert client(tmp_path).get("/", headers=headers).status_code == 421


def test_a_server_for_others_answers_to_its_addresses_but_to_no_strange_name(
    tmp_path: Path,
) -> None:
    public = client(tmp_path, host="0.0.0.0", url="https://experts.example.org")
    for host, status in (("192.0.2.7:8080", 200), ("[2001:db8::1]", 200), ("evil.example", 421)):
        assert public.get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/v2/acme%2fsql/tags/list",
        "/v2/acme%2Fsql/tags/list",
        "/v2//acme/tags/list",
        "/v2/acme/../secret/tags/list",
        "/v2/acme/%2e%2e/secret/tags/list",
        "/v2/./acme",
        "/v2/acme;x/tags/list",
        "/v2/acme\\sql",
        "/v2/acme%5csql",
        "/v2/acme%00",
        "/v2/acme%0d%0aX:1",
        "/v2/acme%1b[31m",
        "/v2/acme%7f",
        "//evil.example/",
        "/..",
    ],
)
def test_a_path_with_two_readings_is_refused(path: str, tmp_path: Path) -> None:
    """Attack 85, path normalisation."""
    raw = path.encode()
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": raw,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    assert status_of(tmp_path, scope) == 400


@pytest.mark.parametrize(
    "path", ["/", "/v2/a/b..c/tags/list", "/search", "/v2/a/blobs/sha256%3Aab"]
)
def test_a_plain_path_passes(path: str, tmp_path: Path) -> None:
    assert client(tmp_path).get(path).status_code == 200


def status_of(tmp_path: Path, scope: dict[str, Any]) -> int:
    """Ask without a client that would tidy the request up."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    settings = ServerSettings(data=tmp_path, limits=SMALL)
    anyio.run(make_request_limits(echo, settings), scope, receive, send)
    status = sent[0]["status"]
    assert isinstance(status, int)
    return status


def test_an_absolute_target_is_refused(tmp_path: Path) -> None:
    scope = {"type": "http", "method": "GET", "path": "http://x/", "headers": []}
    assert status_of(tmp_path, {**scope, "headers": [(b"host", b"localhost")]}) == 400


def test_a_very_long_path_is_refused(tmp_path: Path) -> None:
    assert client(tmp_path).get("/" + "a" * 5000).status_code == 414


def test_large_headers_are_refused(tmp_path: Path) -> None:
    """Attack 85, huge headers."""
    own = client(tmp_path)
    assert own.get("/", headers={"X": "a" * MAX_HEADER_BYTES}).status_code == 431
    assert own.get("/", headers=[(f"X-{n}", "y") for n in range(101)]).status_code == 431
    assert own.get("/", headers={"X": "a" * 1000}).status_code == 200


@pytest.mark.parametrize(
    "encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", "x"]
)
def test_a_compressed_body_is_refused(encoding: str, tmp_path: Path) -> None:
    """Attack 85, gzip request bombs."""
    headers = {"Content-Encoding": encoding}
    assert client(tmp_path).post("/", content=b"x", headers=headers).status_code == 415


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/api/v1/tokens", 100),
        ("/v2/", 100),
        ("/v2/a/b/manifests/1.0.0", 200),
        ("/v2x/a/blobs/uploads/", 100),
    ],
)
def test_a_body_has_the_limit_of_its_route(path: str, limit: int, tmp_path: Path) -> None:
    own = client(tmp_path)
    assert own.put(path, content=b"x" * limit).text == f"{path} {limit}"
    assert own.put(path, content=b"x" * (limit + 1)).status_code == 413
    assert own.put(path, content=pieces(limit, 1)).status_code == 413
    assert own.put(path, content=pieces(limit)).text == f"{path} {limit}"


def test_a_blob_has_limits_of_its_own(tmp_path: Path) -> None:
    path = "/v2/a/b/blobs/uploads/1"
    assert client(tmp_path).patch(path, content=b"x" * 5000).text == f"{path} 5000"


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 500, "\u0664"])
def test_a_length_that_is_none_is_refused(length: str, tmp_path: Path) -> None:
    scope = {"type": "http", "method": "PUT", "path": "/", "raw_path": b"/"}
    headers = [(b"host", b"localhost"), (b"content-length", length.encode())]
    assert status_of(tmp_path, {**scope, "headers": headers}) == 413


def pieces(*sizes: int) -> Iterator[bytes]:
    """A body without a declared length."""
    for size in sizes:
        yield b"x" * size


def stalled(tmp_path: Path, app: Any, *first: dict[str, Any]) -> list[Any]:
    """Send some pieces of a body, then nothing for ever."""
    sent: list[Any] = []
    waiting = list(first)

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop(0)
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    settings = ServerSettings(data=tmp_path, limits=SMALL)
    scope = {"type": "http", "method": "PUT", "path": "/", "raw_path": b"/"}
    scope = {**scope, "headers": [(b"host", b"localhost")]}
    anyio.run(make_request_limits(app, settings, stall_seconds=0.01), scope, receive, send)
    return sent


def test_a_body_that_stops_is_given_up(tmp_path: Path) -> None:
    """Attack 85, slow body."""
    piece = {"type": "http.request", "body": b"x", "more_body": True}
    sent = stalled(tmp_path, echo, piece)
    assert (sent[0]["status"], (b"connection", b"close") in sent[0]["headers"]) == (408, True)
    assert b'"code": "slow_body"' in sent[1]["body"]


def test_a_body_that_stops_after_the_answer_began_ends_the_connection(tmp_path: Path) -> None:
    async def eager(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await Request(scope, receive).body()

    with pytest.raises(ClientDisconnect):
        stalled(tmp_path, eager)


def test_an_answer_may_take_longer_than_the_body(tmp_path: Path) -> None:
    """The time runs between pieces of the body, not while the app waits for a disconnect."""
    last = {"type": "http.request", "body": b"x", "more_body": False}
    gone = {"type": "http.disconnect"}
    seen: list[Any] = []

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])
        await PlainTextResponse("done")(scope, receive, send)

    assert stalled(tmp_path, patient, last, gone)[0]["status"] == 200
    assert seen == [last, gone]


def test_an_app_that_swallows_the_disconnect_still_answers_408(tmp_path: Path) -> None:
    async def careless(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        assert (await receive())["type"] == "http.disconnect"
        await PlainTextResponse("all is well")(scope, receive, send)

    sent = stalled(tmp_path, careless)
    assert sent[0]["status"] == 408


def test_an_error_of_the_app_is_its_own(tmp_path: Path) -> None:
    async def bad(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("own")

    with pytest.raises(RuntimeError, match="own"):
        stalled(tmp_path, bad)


def test_a_websocket_is_not_answered(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    settings = replace(ServerSettings(data=tmp_path), limits=SMALL)
    anyio.run(make_request_limits(echo, settings), {"type": "websocket"}, None, send)
    anyio.run(make_request_limits(echo, settings), {"type": "lifespan"}, None, send)
    assert sent == []


async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without looking at the body."""
    await PlainTextResponse("no", 404)(scope, receive, send)


@pytest.mark.parametrize(
    ("app", "sizes", "told"),
    [
        (deaf, [DISCARDED_BYTES, 1], True),
        (deaf, [1] * 9, False),
        (echo, [1], False),
    ],
)
def test_who_sent_a_long_body_that_nobody_read_is_told_that_the_connection_ends(
    app: Any, sizes: list[int], told: bool, tmp_path: Path
) -> None:
    """The server cannot find the next request behind it; a short body is read to its end."""
    sent: list[Any] = []
    body = [
        {"type": "http.request", "body": b"x" * size, "more_body": number < len(sizes) - 1}
        for number, size in enumerate(sizes)
    ]

    async def receive() -> Any:
        return body.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v2/a/b/blobs/uploads/0",
        "raw_path": b"/v2/a/b/blobs/uploads/0",
        "headers": [(b"host", b"localhost"), (b"content-length", str(sum(sizes)).encode())],
    }
    settings = ServerSettings(data=tmp_path, limits=SMALL)
    anyio.run(make_request_limits(app, settings), scope, receive, send)
    assert ((b"connection", b"close") in sent[0]["headers"]) == told
    assert len(body) == (1 if told else 0)


def test_a_client_reads_the_answer_to_a_body_that_the_registry_did_not_want(
    tmp_path: Path,
) -> None:
    """It sends the whole body first, as most do; then the answer is there, not a reset."""
    size = 4 << 20
    head = (
        "PUT /v2/a/b/blobs/uploads/0 HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {size}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    with run_live_registry(tmp_path / "registry") as registry:
        place = ("127.0.0.1", int(registry.url.rpartition(":")[2]))
        with socket.create_connection(place, timeout=60) as connection:
            connection.sendall(head.encode() + bytes(size))
            answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_server_that_is_told_to_end_outlasts_a_body_that_stalls() -> None:
    """Or its worker is killed at the very moment at which the request is given up."""
    assert DRAIN_SECONDS >= STALL_SECONDS + 10
