"""Clients that go away, in the middle of a stream or before there is an answer."""

import asyncio
import time
from typing import Any

import pytest

from tests.server.harness import ServerHarness, StreamingClient
from tests.server.openai.scripted_base import HELLO

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: Any = {"model": "tiny", "max_tokens": 16_000, "temperature": 0}
FOREVER: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "forever"}]},
    COMPLETIONS: {"prompt": ["[forever]", "[forever]"]},
}


def body(path: str, *, stream: bool) -> dict[str, Any]:
    return {**LONG, **FOREVER[path], "stream": stream}


async def given_up(served: ServerHarness, before: int) -> None:
    """Wait until no row is taken and more jobs were cancelled than before.

    That takes far less time than the answers would have.
    """
    until = time.monotonic() + 120
    while served.engine.take_snapshot().running or cancelled(served) == before:
        assert time.monotonic() < until
        await asyncio.sleep(0)


def cancelled(served: ServerHarness) -> int:
    count: int = served.engine.take_snapshot().totals.cancelled
    return count


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_nobody_reads_any_more_frees_its_rows(
    scripted: ServerHarness, path: str
) -> None:
    async def leave() -> None:
        async with StreamingClient(scripted.app, path, body(path, stream=True)) as listener:
            status, _ = await listener.read_head()
            assert status == 200
            for _ in range(4):
                assert await listener.read_chunk()
            assert scripted.engine.take_snapshot().running >= 1
            listener.disconnect()
            await listener.wait_until_done()
        await given_up(scripted, before)

    before = cancelled(scripted)
    asyncio.run(leave())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_that_nobody_waits_for_is_given_up(scripted: ServerHarness, path: str) -> None:
    async def leave() -> None:
        async with StreamingClient(scripted.app, path, body(path, stream=False)) as listener:
            while not scripted.engine.take_snapshot().running:
                await asyncio.sleep(0)
            listener.disconnect()
            await listener.wait_until_done()
        await given_up(scripted, before)

    before = cancelled(scripted)
    asyncio.run(leave())
    answer = scripted.client().post(
        CHAT, json={**LONG, "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "".join(HELLO)
