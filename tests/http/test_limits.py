"""What is the same for every server that is guarded; the rest is tried with the registry's."""

from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from expertctl.http.limits import Bounds, Refusal, RequestLimits, names_of

URL = "http://127.0.0.1:8000"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


def refuse(refusal: Refusal, _: Scope) -> Response:
    return PlainTextResponse(f"{refusal.error.message}; {refusal.error.hint}", refusal.status)


@pytest.fixture
def client() -> TestClient:
    """A server that only its own pages may ask, and that reads only JSON."""
    bounds = Bounds(
        names=names_of("127.0.0.1", URL),
        addresses=False,
        origins=frozenset({URL}),
        open_methods=frozenset(),
        body_limit=lambda path: 10 if path == "/small" else 100,
        media_type="application/json",
        refuse=refuse,
        whose="this one",
        host_hint="call it so",
    )
    return TestClient(RequestLimits(echo, bounds), base_url=URL)


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
    names = names_of("0.0.0.0", "https://Gen.Example.org:8443")
    assert names == {"localhost", "127.0.0.1", "::1", "0.0.0.0", "gen.example.org"}
