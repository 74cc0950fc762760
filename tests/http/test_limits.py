"""What is the same for every server that is guarded; the rest is tried with the registry's."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from expertctl.http import limits
from expertctl.http.limits import (
    SMALL_BODY,
    LimitsMiddleware,
    RequestPolicy,
    RequestRefusal,
    build_host_names,
)

URL = "http://127.0.0.1:8000"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


def refuse(refusal: RequestRefusal, _: Scope) -> Response:
    return PlainTextResponse(f"{refusal.error.message}; {refusal.error.hint}", refusal.status)


BOUNDS = RequestPolicy(
    names=build_host_names("127.0.0.1", URL),
    accepts_addresses=False,
    origins=frozenset({URL}),
    open_methods=frozenset(),
    body_limit=lambda path: 10 if path == "/small" else 100,
    media_type="application/json",
    build_response=refuse,
    server_label="this one",
    host_hint="call it so",
)
"""Those of a server that only its own pages may ask, and that reads only JSON."""


@pytest.fixture
def client() -> TestClient:
    return TestClient(LimitsMiddleware(echo, BOUNDS), base_url=URL)


class ScriptedBody:
    """A request whose body comes as a test sends it."""

    def __init__(self, app: LimitsMiddleware) -> None:
        self.app, self.pieces = app, asyncio.Queue[Message]()
        self.sent: list[Message] = []

    def send(self, piece: bytes, *, more: bool = True) -> None:
        self.pieces.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    async def answer(self) -> tuple[int, bytes]:
        """The status and the body, once there are some."""
        headers = {"host": "127.0.0.1", "content-type": "application/json"}
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()]
            + [(b"transfer-encoding", b"chunked")],
        }

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.app(scope, self.pieces.get, send)
        return self.sent[0]["status"], self.sent[1]["body"]


def test_who_means_another_server_is_told_how_this_one_is_called(client: TestClient) -> None:
    answer = client.get("/", headers={"Host": "evil.example"})
    assert (answer.status_code, answer.text) == (421, "this one has another name; call it so")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
def test_where_no_method_is_open_pages_of_others_get_nothing(
    client: TestClient, method: str
) -> None:
    answer = client.request(method, "/", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"]
)
def test_the_kind_of_body_that_is_wanted_is_read(client: TestClient, kind: str) -> None:
    answer = client.post("/", content=b"{}", headers={"Content-Type": kind})
    assert (answer.status_code, answer.text) == (200, "2")


@pytest.mark.parametrize("kind", ["", "text/plain", "text/json", "application/jsonx", "x/json"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_any_other_kind_is_not(client: TestClient, method: str, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    assert client.request(method, "/", content=b"{}", headers=headers).status_code == 415


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_where_there_is_no_body_it_is_of_no_kind(client: TestClient, method: str) -> None:
    assert client.request(method, "/").status_code == 200


def test_each_path_has_its_own_limit(client: TestClient) -> None:
    def piece() -> Iterator[bytes]:
        yield b"x" * 11

    json = {"Content-Type": "application/json"}
    assert client.post("/large", content=b"x" * 11, headers=json).status_code == 200
    assert client.post("/small", content=b"x" * 11, headers=json).status_code == 413
    assert client.post("/small", content=piece(), headers=json).status_code == 413


def test_a_server_is_called_by_its_address_and_by_that_of_its_users() -> None:
    names = build_host_names("0.0.0.0", "https://Gen.Example.org:8443")
    assert names == {"localhost", "127.0.0.1", "::1", "0.0.0.0", "gen.example.org"}


def test_a_body_that_comes_drop_by_drop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause is too long, yet the whole would take for ever."""
    monkeypatch.setattr(limits, "MIN_BYTES_PER_SECOND", 10_000)

    async def drip() -> tuple[int, bytes]:
        bounds = replace(BOUNDS, stall_seconds=0.05)
        sender = ScriptedBody(LimitsMiddleware(echo, bounds))
        answering = asyncio.ensure_future(sender.answer())
        until = time.monotonic() + 120
        while not answering.done() and len(sender.sent) == 0:
            assert time.monotonic() < until
            sender.send(b"")
            await asyncio.sleep(0)
        return await answering

    status, said = asyncio.run(drip())
    assert (status, b"slower than" in said) == (408, True)


def test_what_large_bodies_take_together_is_bounded() -> None:
    async def crowd() -> list[tuple[int, bytes]]:
        most = 10 * SMALL_BODY
        bounds = replace(BOUNDS, body_limit=lambda _: most, large_bodies=most)
        app = LimitsMiddleware(echo, bounds)
        half, late, small, after = (ScriptedBody(app) for _ in range(4))
        half.send(b"x" * 9 * SMALL_BODY)
        halfway = asyncio.ensure_future(half.answer())
        while half.pieces.qsize():
            await asyncio.sleep(0)
        late.send(b"x" * 4 * SMALL_BODY, more=False)
        small.send(b"x" * SMALL_BODY, more=False)
        answers = [await late.answer(), await small.answer()]
        half.send(b"", more=False)
        after.send(b"x" * 4 * SMALL_BODY, more=False)
        return [*answers, await halfway, await after.answer()]

    late, small, half, after = asyncio.run(crowd())
    assert (late[0], b"too many large bodies" in late[1]) == (429, True)
    assert [small[0], half[0], after[0]] == [200] * 3
    assert after[1] == str(4 * SMALL_BODY).encode()
