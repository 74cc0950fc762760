"""Answers that no server of ours gives: errors as text, redirects, too much, cut streams."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator

import httpx2
import pytest

from expertctl import errors
from expertctl.client import AsyncExpertClient, ExpertClient, Retries, protocol
from expertctl.client.result import build_error_for_code
from expertctl.errors import (
    MAX_ERROR_TEXT,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    RegistryError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
)
from tests.client.transports import ScriptedTransport, make_error_response, make_experts_response
from tests.server.harness import URL

ONCE = Retries(attempts=1)


def kinds(kind: type[ExpertError]) -> Iterator[type[ExpertError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from kinds(child)


@pytest.mark.parametrize("kind", sorted(set(kinds(ExpertError)), key=lambda kind: kind.code))
def test_every_error_of_ours_comes_back_as_itself(kind: type[ExpertError]) -> None:
    error = build_error_for_code(kind.code, "the message", hint="the hint")
    assert type(error) is kind
    whole = "the server: the message" if kind is InvalidPackageError else "the message"
    assert (error.message, error.hint) == (whole, "the hint")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (httpx2.Response(401, content=b"<html>no</html>"), UnauthenticatedError),
        (httpx2.Response(404, content=b"\xff\xfe"), NotFoundError),
        (httpx2.Response(418, content=b""), RegistryError),
        (httpx2.Response(400, content=b'{"error": "text"}'), UsageError),
        (httpx2.Response(400, content=b"[" * 100_000), UsageError),
        (
            httpx2.Response(404, json={"error": {"message": "x", "code": "model_not_found"}}),
            NotFoundError,
        ),
        (httpx2.Response(200, content=b"<html>hello</html>"), RegistryError),
        (httpx2.Response(200, content=b"{}"), RegistryError),
        (httpx2.Response(200, content=b'{"base": 1, "experts": []}'), RegistryError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_answer_that_is_not_ours_is_an_error_that_says_what_was_asked(
    answer: httpx2.Response, kind: type[ExpertError]
) -> None:
    with pytest.raises(kind) as refused:
        ScriptedTransport(answer).make_client().experts()
    assert (
        refused.value.message == "x"
        or "GET /v1/experts" in refused.value.message
        or (refused.value.message == "text")
    )


def test_what_a_server_says_is_printable_and_bounded() -> None:
    wire = ScriptedTransport(make_error_response(400, "usage", "\x1b[31mred\n\r" + "x" * 5000))
    with pytest.raises(UsageError) as refused:
        wire.make_client().experts()
    assert refused.value.message.isprintable()
    assert refused.value.message.startswith("[31mred x")
    assert len(refused.value.message) <= MAX_ERROR_TEXT + 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_so_the_key_stays_here(status: int) -> None:
    wire = ScriptedTransport(
        httpx2.Response(status, headers={"Location": "https://evil.example/v1"})
    )
    with pytest.raises(UnreachableError, match=re.escape("https://evil.example/v1")) as refused:
        wire.make_client(api_key="secret", retries=ONCE).experts()
    assert "base_url" in refused.value.hint
    assert [request.url.host for request in wire.asked] == ["127.0.0.1"]


def test_the_key_goes_to_the_server_in_its_header_and_into_no_text() -> None:
    wire = ScriptedTransport(make_experts_response())
    client = wire.make_client(api_key="xpk_secret")
    client.experts()
    [request] = wire.asked
    assert request.headers["authorization"] == "Bearer xpk_secret"
    assert "xpk_secret" not in str(request.url)
    assert "xpk_secret" not in repr(client._transport.server)


def test_without_a_key_nothing_is_shown_whatever_netrc_says(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/netrc"
    with open(path, "w") as netrc:  # noqa: PTH123  # a text that the variable names
        netrc.write("machine 127.0.0.1 login ada password secret\n")
    monkeypatch.setenv("NETRC", path)
    wire = ScriptedTransport(make_experts_response())
    wire.make_client().experts()
    assert "authorization" not in wire.asked[0].headers


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_RESPONSE_BYTES", 1000)

    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 100

    with pytest.raises(RegistryError, match="over 1000 bytes"):
        ScriptedTransport(httpx2.Response(200, content=endless())).make_client().experts()


STARTED = b'event: piece\ndata: {"text": "1, "}\n\n'


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (STARTED, UnreachableError, "was cut off"),
        (STARTED + b"event: piece\ndata: {", UnreachableError, "was cut off"),
        (STARTED + b"event: piece\ndata: {\n\n", RegistryError, "cannot be decoded"),
        (
            STARTED + b'event: failed\ndata: {"error": {"code": "budget", "message": "full"}}\n\n',
            errors.BudgetError,
            "full",
        ),
        (STARTED + b"event: failed\ndata: ?\n\n", RegistryError, "was cut off"),
    ],
    ids=["no end", "half an event", "no json", "failed", "failed unreadably"],
)
def test_a_stream_that_breaks_off_gives_its_text_and_then_an_error(
    body: bytes, kind: type[ExpertError], text: str
) -> None:
    def answer() -> httpx2.Response:
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)

    stream = ScriptedTransport(answer()).make_client().infer_stream("x")
    assert next(stream).text == "1, "
    with pytest.raises(kind, match=text):
        next(stream)

    async def inside() -> None:
        again = ScriptedTransport(answer()).make_async_client().infer_stream("x")
        assert (await anext(again)).text == "1, "
        with pytest.raises(kind, match=text):
            await anext(again)

    asyncio.run(inside())


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    wire = ScriptedTransport(httpx2.Response(200, content=b"{}"))
    with pytest.raises(UnreachableError, match="text/event-stream"):
        next(wire.make_client().infer_stream("x"))


def test_events_and_fields_of_newer_servers_are_left_out() -> None:
    body = b"event: thought\ndata: {}\n\n: keep-alive\n\n" + STARTED.replace(b"}", b', "b": 1}')
    answer = httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)
    assert next(ScriptedTransport(answer).make_client().infer_stream("x")).text == "1, "


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "host:8000", "http://", "http://a:b@host", "http://host/?q=1", "http://[::1"],
)
def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(UsageError):
        ExpertClient(url)
    with pytest.raises(UsageError):
        AsyncExpertClient(url)


@pytest.mark.parametrize("key", ["", "a b", "a\nb", "ü"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="API key") as refused:
        ExpertClient(URL, api_key=key)
    assert not key or key not in refused.value.message


def test_the_environment_says_where_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERT_SERVER", "http://gpu.example:9000/behind/")
    monkeypatch.setenv("EXPERT_API_KEY", "from-environment")
    wire = ScriptedTransport(make_experts_response(), make_experts_response())
    ExpertClient(transport=wire).experts()
    ExpertClient(URL, api_key="given", transport=wire).experts()
    first, second = wire.asked
    assert str(first.url) == "http://gpu.example:9000/behind/v1/experts"
    assert first.headers["authorization"] == "Bearer from-environment"
    assert str(second.url) == f"{URL}/v1/experts"
    assert second.headers["authorization"] == "Bearer given"


@pytest.mark.parametrize("job_id", ["", ".", ".."])
def test_no_path_can_be_made_of_the_id_of_a_job(job_id: str) -> None:
    with pytest.raises(UsageError):
        ScriptedTransport().make_client().jobs.get(job_id)
    wire = ScriptedTransport(make_error_response(404, "not_found"))
    with pytest.raises(NotFoundError):
        wire.make_client().jobs.get("../experts?x=1#y")
    assert wire.asked[0].url.raw_path == b"/v1/jobs/..%2Fexperts%3Fx%3D1%23y"


def test_what_is_no_json_is_not_sent() -> None:
    with pytest.raises(UsageError, match="as JSON"):
        ScriptedTransport().make_client().infer("x", metadata={"a": object()})  # type: ignore[dict-item]  # wrong


def test_a_server_that_says_nothing_is_waited_for_only_so_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = ExpertClient(url, timeout=0.2, retries=ONCE)
        with pytest.raises(UnreachableError, match="the connection broke") as late:
            client.infer("x")
        assert late.value.sent
        client.close()


def test_where_nobody_listens_nothing_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        ExpertClient(f"http://127.0.0.1:{port}", retries=ONCE) as client,
        pytest.raises(UnreachableError, match="cannot be reached") as refused,
    ):
        client.infer("x")
    assert not refused.value.sent


def test_threads_may_share_a_client() -> None:
    wire = ScriptedTransport(*(make_experts_response() for _ in range(40)))
    client = wire.make_client()
    threads = [
        threading.Thread(target=lambda: [client.experts() for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wire.asked) == 40
