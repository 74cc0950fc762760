"""The asynchronous client, in process: many at once, and streams."""

import asyncio
from typing import Any

from anthropic.types import TextBlock

from tests.server.anthropic.client import make_async_client
from tests.server.harness import BASE, ServerHarness
from tests.server.openai.scripted_base import HELLO

ASK: dict[str, Any] = {"model": BASE, "max_tokens": 64, "extra_body": {"temperature": 0}}
HI: Any = [{"role": "user", "content": "Hi"}]


def test_many_messages_at_once_are_all_answered(scripted: ServerHarness) -> None:
    async def ask() -> list[str]:
        async with make_async_client(scripted) as client:
            answers = (client.messages.create(messages=HI, **ASK) for _ in range(24))
            messages = await asyncio.gather(*answers)
        blocks = [block for message in messages for block in message.content]
        return [block.text for block in blocks if isinstance(block, TextBlock)]

    assert asyncio.run(ask()) == ["".join(HELLO)] * 24


def test_a_stream_gives_its_text(scripted: ServerHarness) -> None:
    async def ask() -> tuple[str, str | None]:
        async with (
            make_async_client(scripted) as client,
            client.messages.stream(messages=HI, **ASK) as stream,
        ):
            text = "".join([piece async for piece in stream.text_stream])
            return text, (await stream.get_final_message()).stop_reason

    assert asyncio.run(ask()) == ("".join(HELLO), "end_turn")
