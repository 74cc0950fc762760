"""Every request leaves a line and is counted, also the one that broke the server."""

import json
import logging
from typing import Any

import anyio
import pytest
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from registry_server.app import make_request_log
from tests.registry_server.harness import RegistryHarness

HTML = {"Accept": "text/html"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="registry_server.requests")
    return caplog


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records]


def broken(served: RegistryHarness, *, started: bool) -> TestClient:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("secret detail /etc/passwd")

    return TestClient(make_request_log(app, served.registry), raise_server_exceptions=False)


def test_a_request_leaves_one_line(
    served: RegistryHarness, lines: pytest.LogCaptureFixture
) -> None:
    secret = served.create_user("uli")
    answer = served.client(secret).get("/healthz?token=" + secret)
    (line,) = fields_of(lines)
    assert line.pop("ms") >= 0
    assert line == {
        "id": answer.headers["x-request-id"],
        "method": "GET",
        "path": "/healthz",
        "route": "/healthz",
        "status": 200,
        "received": 0,
        "sent": 3,
        "user": "uli",
        "address": "unknown",
    }


def test_the_route_is_a_template(served: RegistryHarness, lines: pytest.LogCaptureFixture) -> None:
    served.client().get("/packages/acme/sql")
    assert [line["route"] for line in fields_of(lines)] == ["/packages/{namespace}/{name}"]


def test_bodies_are_counted(served: RegistryHarness, lines: pytest.LogCaptureFixture) -> None:
    answer = served.client().post("/api/v1/tokens", content=b"x" * 1000)
    (line,) = fields_of(lines)
    assert (line["status"], line["sent"]) == (answer.status_code, len(answer.content))
    assert line["received"] in {0, 1000}


def test_a_file_sent_by_its_path_counts_with_its_length(
    served: RegistryHarness, lines: pytest.LogCaptureFixture
) -> None:
    headers = [(b"content-length", b"12345")]
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.pathsend", "path": "/blob"})

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}

    anyio.run(make_request_log(app, served.registry), scope, None, keep)
    assert [line["sent"] for line in fields_of(lines)] == [12345]
    assert sent[1] == {"type": "http.response.pathsend", "path": "/blob"}


@pytest.mark.parametrize("path", ["/v2/", "/api/v1/", "/"])
def test_what_nobody_expected_is_500_without_detail(
    path: str, served: RegistryHarness, lines: pytest.LogCaptureFixture
) -> None:
    answer = broken(served, started=False).get(path)
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"] in answer.text
    unexpected, request = fields_of(lines)
    assert unexpected["id"] == request["id"]
    assert "secret detail" in str(lines.records[0].exc_info)
    assert json.loads(answer.text)


def test_a_browser_gets_a_page_for_it(served: RegistryHarness) -> None:
    answer = broken(served, started=False).get("/packages/a/b", headers=HTML)
    assert (answer.status_code, "Back to the start" in answer.text) == (500, True)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    machine = broken(served, started=False).get("/v2/", headers=HTML)
    assert machine.headers["content-type"] == "application/json"


def test_an_answer_that_breaks_in_the_middle_is_cut(served: RegistryHarness) -> None:
    client = TestClient(broken(served, started=True).app)
    with pytest.raises(RuntimeError):
        client.get("/v2/")


def test_requests_are_counted_by_template_and_status(served: RegistryHarness) -> None:
    client = served.client()
    for path in ("/healthz", "/packages/a/b", "/packages/c/d", "/v2/x/y/z"):
        client.get(path)
    text = served.registry.metrics.render_exposition(served.registry.database).decode()
    for labels, count in (
        ('route="/healthz",status="200"', "1.0"),
        ('route="/packages/{namespace}/{name}",status="404"', "2.0"),
    ):
        assert f'requests_total{{method="GET",{labels}}} {count}' in text
    assert "expertctl_registry_requests_running 0.0" in text


def test_no_client_makes_new_time_series(served: RegistryHarness) -> None:
    client = served.client()
    for number in range(20):
        client.request(f"METHOD{number}", f"/nowhere-{number}")
    text = served.registry.metrics.render_exposition(served.registry.database).decode()
    assert "METHOD" not in text
    assert "nowhere" not in text


def test_what_is_no_request_passes_and_is_not_logged(
    served: RegistryHarness, lines: pytest.LogCaptureFixture
) -> None:
    with served.client() as client:
        client.get("/healthz")  # startup and shutdown are events of the same application
    assert [line["path"] for line in fields_of(lines)] == ["/healthz"]


def test_the_id_of_a_request_is_ours(served: RegistryHarness) -> None:
    answer: Response | Any = served.client().get("/healthz", headers={"X-Request-Id": "forged"})
    assert answer.headers["x-request-id"] != "forged"
