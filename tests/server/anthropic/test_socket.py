"""The official client against a server on a socket: what only shows with a real connection."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ToolUseBlock

from tests.server.anthropic.client import WEATHER, run_socket_program
from tests.server.harness import BASE, ServedPackages
from tests.server.openai.scripted_base import ANSWER, HELLO, make_scripted_packages

pytestmark = pytest.mark.all

ASK: dict[str, Any] = {"model": BASE, "max_tokens": 64, "extra_body": {"temperature": 0}}
HI: Any = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = {**ASK, "max_tokens": 3000}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose answers are known."""
    folder = tmp_path_factory.mktemp("talking")
    stock = make_scripted_packages(folder / "stock")
    stock.make_home(folder / "home")
    with run_socket_program(folder / "home") as url:
        yield url


@pytest.fixture(scope="module")
def narrow(stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that writes one answer at a time and lets one wait, with answers without end."""
    home = tmp_path_factory.mktemp("narrow") / "home"
    stock.make_home(home)
    with run_socket_program(home, rows=1, queue=1) as url:
        yield url


def a_client(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="any", base_url=url, **{"max_retries": 0, **options})


def test_messages_tools_and_streams_go_over_a_connection(talking: str) -> None:
    question: Any = {"role": "user", "content": "Weather in Paris?"}
    with a_client(talking) as client:
        first = client.messages.create(messages=[question], tools=[WEATHER], **ASK)
        call = first.content[-1]
        assert isinstance(call, ToolUseBlock)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns: Any = [
            question,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        with client.messages.stream(messages=turns, tools=[WEATHER], **ASK) as stream:
            assert "".join(stream.text_stream) == "".join(ANSWER)
        stopped = client.messages.create(messages=HI, stop_sequences=["wörld"], **ASK)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wörld")


def test_the_pieces_of_a_stream_come_before_its_end(narrow: str) -> None:
    with a_client(narrow) as client:
        stream = client.messages.create(messages=HI, stream=True, **ENDLESS)
        kinds = [event.type for event, _ in zip(stream, range(6), strict=False)]
        stream.close()
    assert kinds[0] == "message_start"
    assert "content_block_delta" in kinds
    assert "message_stop" not in kinds


def test_many_asynchronous_streams_at_once_are_answered(talking: str) -> None:
    async def one(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(messages=HI, **ASK) as stream:
            return await stream.get_final_text()

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(api_key="any", base_url=talking) as client:
            return await asyncio.gather(*(one(client) for _ in range(32)))

    assert asyncio.run(ask()) == ["".join(HELLO)] * 32


def test_errors_have_their_classes(talking: str) -> None:
    with a_client(talking) as client:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(messages=HI, **{**ASK, "model": "gpt-9"})
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            client.messages.create(messages=HI, **{**ASK, "extra_body": {"top_k": -2}})


def test_a_stream_that_is_closed_frees_the_row(narrow: str) -> None:
    with a_client(narrow, timeout=30) as client:
        for _ in range(3):
            stream = client.messages.create(messages=HI, stream=True, **ENDLESS)
            next(iter(stream))
            stream.close()
        assert client.messages.create(messages=HI, **{**ASK, "max_tokens": 1}).role == "assistant"


def test_a_client_that_waits_no_longer_frees_the_row(narrow: str) -> None:
    with a_client(narrow, timeout=0.5) as client, pytest.raises(anthropic.APITimeoutError):
        client.messages.create(messages=HI, **ENDLESS)
    with a_client(narrow, timeout=30) as client:
        assert client.messages.create(messages=HI, **{**ASK, "max_tokens": 1}).role == "assistant"


def test_a_full_queue_is_told_and_tried_again(narrow: str) -> None:
    async def crowd() -> tuple[str, str | None]:
        asking = anthropic.AsyncAnthropic(api_key="any", base_url=narrow, max_retries=0)
        async with asking as client:
            running = await client.messages.create(messages=HI, stream=True, **ENDLESS)
            await anext(aiter(running))
            others = [
                asyncio.ensure_future(client.messages.create(messages=HI, **ENDLESS))
                for _ in range(8)
            ]
            done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            refused = done.pop().exception()
            assert isinstance(refused, anthropic.RateLimitError)
            patient = client.with_options(max_retries=10)
            again = asyncio.ensure_future(
                patient.messages.create(messages=HI, **{**ASK, "max_tokens": 1})
            )
            await running.close()
            for one in waiting:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            message = await again
        assert isinstance(refused.body, dict)
        assert all(block.type == "text" for block in message.content)
        return str(refused.type), refused.response.headers.get("retry-after")

    kind, seconds = asyncio.run(crowd())
    assert kind == "rate_limit_error"
    assert int(seconds or 0) >= 1


def test_a_server_that_ends_leaves_no_client_without_a_word(
    tmp_path: Path, stock: ServedPackages
) -> None:
    home = tmp_path / "home"
    stock.make_home(home)
    with run_socket_program(home) as url, a_client(url) as client:
        message = client.messages.create(messages=HI, **{**ASK, "max_tokens": 2})
        assert all(isinstance(block, TextBlock) for block in message.content)
    with a_client(url) as client, pytest.raises(anthropic.APIConnectionError):
        client.messages.create(messages=HI, **ASK)
