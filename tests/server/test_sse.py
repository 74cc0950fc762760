"""Events as they are read: when they come, when nothing comes, when somebody goes."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from expertctl.errors import ExpertError, RateLimitError
from expertctl.server.responses import error_response
from expertctl.server.streaming import (
    KEEP_ALIVE_COMMENT,
    BackpressureLimit,
    EventStream,
    format_event,
    format_named_event,
    while_connected,
)
from tests.server.harness import StreamingClient

Result = TypeVar("Result")
PATH = "/v1/messages"


def within(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, 120))


class Source:
    """Events that a test lets out, and whether somebody still asks for them."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[bytes | ExpertError | None]()
        self.closed = asyncio.Event()

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, ExpertError):
                    raise item
                yield item
        finally:
            self.closed.set()


def app_of(
    source: Source, *, quiet_seconds: float = 10, patience: BackpressureLimit | None = None
) -> Starlette:
    async def stream(request: Request) -> Response:
        await request.body()
        if quiet_seconds == 10:
            return EventStream(request, source.lines())
        return EventStream(request, source.lines(), keep_alive_seconds=quiet_seconds)

    app = _app(stream)
    if patience is not None:
        app.state.patience = patience
    return app


def _app(endpoint: Any) -> Starlette:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ExpertError)
        return error_response(error, request.scope)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    route = Route(PATH, endpoint, methods=["POST"])
    return Starlette(
        routes=[route], exception_handlers={ExpertError: refused, ClientDisconnect: left}
    )


def test_events_are_written_as_the_standard_says() -> None:
    assert format_event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert format_named_event("ping", b"{}") == b"event: ping\ndata: {}\n\n"


def test_each_event_is_sent_as_it_comes() -> None:
    async def read() -> None:
        source = Source()
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            source.queue.put_nowait(format_event(b"1"))
            status, headers = await listener.read_head()
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            assert headers["cache-control"] == "no-store"
            assert "content-length" not in headers
            assert await listener.read_chunk() == b"data: 1\n\n"
            source.queue.put_nowait(format_event(b"2"))
            assert await listener.read_chunk() == b"data: 2\n\n"
            source.queue.put_nowait(None)
            assert await listener.read_chunk() == b""
            await listener.wait_until_done()

    within(read())


def test_an_error_before_the_first_event_is_an_ordinary_answer() -> None:
    async def read() -> None:
        source = Source()
        source.queue.put_nowait(RateLimitError("full", retry_after=3))
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            status, headers = await listener.read_head()
            assert (status, headers["retry-after"]) == (429, "3")
            assert b'"rate_limit_error"' in await listener.read_chunk()

    within(read())


def test_an_error_after_the_first_event_is_the_last_one() -> None:
    async def read() -> None:
        source = Source()
        source.queue.put_nowait(format_event(b"1"))
        source.queue.put_nowait(ExpertError("broken"))
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            assert (await listener.read_head())[0] == 200
            assert await listener.read_chunk() == b"data: 1\n\n"
            assert (await listener.read_chunk()).startswith(b'event: error\ndata: {"type":"error"')
            assert await listener.read_chunk() == b""
            await listener.wait_until_done()

    within(read())


def test_while_nothing_comes_a_comment_says_that_the_server_is_there() -> None:
    async def read() -> None:
        source = Source()
        async with StreamingClient(app_of(source, quiet_seconds=0.01), PATH, {}) as listener:
            assert (await listener.read_head())[0] == 200
            assert await listener.read_chunk() == KEEP_ALIVE_COMMENT
            assert await listener.read_chunk() == KEEP_ALIVE_COMMENT
            source.queue.put_nowait(ExpertError("broken"))
            while (piece := await listener.read_chunk()) == KEEP_ALIVE_COMMENT:
                pass
            assert piece.startswith(b"event: error")

    within(read())


@pytest.mark.parametrize("sent", [0, 1])
def test_who_leaves_ends_the_events(sent: int) -> None:
    async def read() -> None:
        source = Source()
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            for _ in range(sent):
                source.queue.put_nowait(format_event(b"1"))
                await listener.read_head()
            listener.disconnect()
            await listener.wait_until_done()
            assert source.closed.is_set()

    within(read())


def test_who_leaves_without_having_read_ends_the_events() -> None:
    async def read() -> None:
        source = Source()
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            listener.may_read.clear()
            source.queue.put_nowait(format_event(b"1"))
            listener.disconnect()
            await listener.wait_until_done()
            assert source.closed.is_set()

    within(read())


def test_who_reads_slowly_holds_up_nobody() -> None:
    """All is taken as it is made, and given in order as it is read."""

    async def read() -> None:
        source = Source()
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            listener.may_read.clear()
            for number in range(500):
                source.queue.put_nowait(format_event(b"%d" % number))
            source.queue.put_nowait(None)
            await source.closed.wait()
            listener.may_read.set()
            assert (await listener.read_head())[0] == 200
            for number in range(500):
                assert await listener.read_chunk() == b"data: %d\n\n" % number
            assert await listener.read_chunk() == b""
            await listener.wait_until_done()

    within(read())


def test_an_error_waits_for_what_was_made_before_it() -> None:
    async def read() -> None:
        source = Source()
        async with StreamingClient(app_of(source), PATH, {}) as listener:
            listener.may_read.clear()
            source.queue.put_nowait(format_event(b"1"))
            source.queue.put_nowait(ExpertError("broken"))
            await source.closed.wait()
            listener.may_read.set()
            assert (await listener.read_head())[0] == 200
            assert await listener.read_chunk() == b"data: 1\n\n"
            assert (await listener.read_chunk()).startswith(b"event: error")
            assert await listener.read_chunk() == b""

    within(read())


@pytest.mark.parametrize("last", [None, ExpertError("broken"), format_event(b"3")])
def test_who_leaves_an_event_untaken_for_too_long_gets_no_more(
    last: bytes | ExpertError | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def read() -> None:
        source = Source()
        app = app_of(source, patience=BackpressureLimit(seconds=0.05))
        async with StreamingClient(app, PATH, {}) as listener:
            source.queue.put_nowait(format_event(b"1"))
            assert (await listener.read_head())[0] == 200
            assert await listener.read_chunk() == b"data: 1\n\n"
            listener.may_read.clear()
            source.queue.put_nowait(format_event(b"2"))
            source.queue.put_nowait(last)
            await listener.wait_until_done()
            assert source.closed.is_set()

    caplog.set_level("INFO", logger="expertctl.server")
    within(read())
    assert "a reader is too far behind" in caplog.messages


def test_who_takes_each_event_in_time_may_listen_for_long() -> None:
    async def read() -> None:
        source = Source()
        app = app_of(source, quiet_seconds=0.01, patience=BackpressureLimit(seconds=0.05))
        async with StreamingClient(app, PATH, {}) as listener:
            assert (await listener.read_head())[0] == 200
            for _ in range(20):  # four times as long
                assert await listener.read_chunk() == KEEP_ALIVE_COMMENT
            assert not source.closed.is_set()

    within(read())


def test_who_leaves_too_much_untaken_gets_no_more() -> None:
    async def read() -> None:
        source = Source()
        app = app_of(source, patience=BackpressureLimit(unread_bytes=1000))
        async with StreamingClient(app, PATH, {}) as listener:
            listener.may_read.clear()
            while not source.closed.is_set():
                source.queue.put_nowait(format_event(b"x" * 90))
                await asyncio.sleep(0)
            await listener.wait_until_done()
        assert source.queue.qsize() < 50

    within(read())


def test_what_nobody_expected_is_no_end_of_a_stream() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield format_event(b"1")
        raise ZeroDivisionError

    async def endpoint(request: Request) -> Response:
        await request.body()
        return EventStream(request, lines())

    async def read() -> None:
        async with StreamingClient(_app(endpoint), PATH, {}) as listener:
            assert (await listener.read_head())[0] == 200
            assert await listener.read_chunk() == b"data: 1\n\n"
            with pytest.raises(ZeroDivisionError):
                await listener.wait_until_done()

    with pytest.raises(ZeroDivisionError):
        within(read())


def test_work_for_who_has_left_is_cancelled() -> None:
    ended = []

    async def endpoint(request: Request) -> Response:
        await request.body()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("work")

        await while_connected(request, work())
        raise AssertionError("it never ends by itself")

    async def read() -> None:
        async with StreamingClient(_app(endpoint), PATH, {}) as listener:
            listener.disconnect()
            assert (await listener.read_head())[0] == 499

    within(read())
    assert ended == ["work"]


def test_work_that_ends_is_answered_and_what_it_raises_is_told() -> None:
    async def endpoint(request: Request) -> Response:
        text = (await request.body()).decode()

        async def work() -> str:
            if text == "bad":
                raise RateLimitError("full")
            return text

        return Response(await while_connected(request, work()))

    client = TestClient(_app(endpoint))
    assert client.post(PATH, content=b"good").text == "good"
    assert client.post(PATH, content=b"bad").status_code == 429
