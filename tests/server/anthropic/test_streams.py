"""Streams of messages: the order of events, what they add up to, and how they end."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import GenerationJob, JobEvent, JobFailed, TokenSink
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import StoreError
from expertctl.server.app import create_app
from expertctl.server.settings import ServeSettings
from tests.server.anthropic.client import WEATHER, make_client
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, ServerHarness, StreamingClient
from tests.server.openai.scripted_base import HELLO, PARIS

ASK: dict[str, Any] = {"model": BASE, "max_tokens": 2048, "extra_body": {"temperature": 0}}
HI: Any = [{"role": "user", "content": "Hi"}]
THINKING = {"type": "enabled", "budget_tokens": 1024}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def events(served: ServerHarness, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream as they are on the wire."""
    body = {"model": BASE, "max_tokens": 2048, "temperature": 0, "messages": HI, "stream": True}
    answer = served.client().post("/v1/messages", json={**body, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = list[tuple[str, dict[str, Any]]]()
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def without_repeats(names: list[str]) -> list[str]:
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


def test_every_event_is_one_of_the_published_api_and_named_by_its_type(
    scripted: ServerHarness,
) -> None:
    for name, data in events(scripted):
        assert data["type"] == name
        if name != "ping":
            EVENT.validate_python(data, strict=True)


def test_events_come_in_the_published_order(scripted: ServerHarness) -> None:
    names = without_repeats([name for name, _ in events(scripted)])
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_blocks_of_thought_text_and_calls_follow_each_other(scripted: ServerHarness) -> None:
    thought = events(scripted, thinking=THINKING)
    started = [data for name, data in thought if name == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in started] == [
        (0, "thinking"),
        (1, "text"),
    ]
    deltas = [data["delta"]["type"] for name, data in thought if name == "content_block_delta"]
    assert without_repeats(deltas) == ["thinking_delta", "signature_delta", "text_delta"]
    called = events(scripted, tools=[WEATHER])
    started = [data for name, data in called if name == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in started] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    assert started[1]["content_block"]["input"] == {}
    parts = [
        data["delta"]["partial_json"]
        for name, data in called
        if name == "content_block_delta" and data["index"] == 1
    ]
    assert json.loads("".join(parts)) == json.loads(PARIS)["arguments"]
    indices = [data["index"] for name, data in called if name.startswith("content_block")]
    assert indices == sorted(indices)


def test_text_comes_in_more_than_one_piece(scripted: ServerHarness) -> None:
    pieces = [data for name, data in events(scripted) if name == "content_block_delta"]
    assert len(pieces) > 1
    assert "".join(piece["delta"]["text"] for piece in pieces) == "".join(HELLO)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "messages": [{"role": "user", "content": "both"}]},
        {"thinking": THINKING},
        {"stop_sequences": ["wörld"]},
        {"max_tokens": 2},
    ],
)
def test_a_stream_adds_up_to_the_message(
    client: anthropic.Anthropic, fields: dict[str, Any]
) -> None:
    ask = {"messages": HI, **ASK, **fields}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()

    def comparable(message: Any) -> dict[str, Any]:
        document = message.to_dict()
        for block in document["content"]:
            block.pop("id", None)
            block.pop("signature", None)
        usage = document["usage"]
        read = usage["input_tokens"] + usage["cache_read_input_tokens"]
        known = ("content", "stop_reason", "stop_sequence", "role", "model")
        written = usage["output_tokens"]
        return {"read": read, "written": written, **{name: document[name] for name in known}}

    assert comparable(streamed) == comparable(whole)


def test_the_end_of_a_stream_tells_of_the_plan(scripted: ServerHarness) -> None:
    found = events(scripted)
    start, end = found[0][1]["message"], found[-2][1]
    assert start["id"] == f"msg_{end['expertctl']['job_id']}"
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    assert end["expertctl"]["plan"]["identity"].startswith("sha256:")
    assert end["usage"]["output_tokens"] == len(HELLO)


def test_what_is_refused_is_an_ordinary_answer(scripted: ServerHarness) -> None:
    body = {"model": "gpt-9", "max_tokens": 8, "messages": HI, "stream": True}
    answer = scripted.client().post("/v1/messages", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_who_leaves_in_the_middle_frees_the_row(make_served: MakeServed) -> None:
    served = make_served(
        ServeSettings(engine=EngineConfig(memory_budget=64 << 20, batching=BatchingConfig(rows=1)))
    )
    endless = {"model": BASE, "max_tokens": 3000, "messages": HI, "stream": True, "temperature": 0}

    async def leave() -> None:
        async with StreamingClient(served.app, "/v1/messages", endless) as listener:
            status, _ = await listener.read_head()
            assert status == 200
            while b"content_block_delta" not in await listener.read_chunk():
                pass
            listener.disconnect()
            await listener.wait_until_done()

    asyncio.run(leave())
    with make_client(served) as client:
        client.messages.create(messages=HI, model=BASE, max_tokens=1)
    totals = served.engine.take_snapshot().totals
    assert (totals.cancelled, totals.finished, totals.failed) == (1, 1, 0)


class _Breaking:
    """Fails every job of a server after its first piece."""

    def __init__(self, served: ServerHarness) -> None:
        self._jobs = served.service.jobs

    def submit(self, job: GenerationJob, sink: TokenSink) -> None:
        broken = False

        def some(event: JobEvent) -> None:
            nonlocal broken
            if not broken:
                sink(event)
            if isinstance(event, OutputDelta) and not broken:
                broken = True
                sink(JobFailed(StoreError("the file of an expert is gone")))

        self._jobs.submit(job, some)

    def cancel(self, job_id: str) -> None:
        self._jobs.cancel(job_id)


def test_an_error_on_the_way_is_the_last_event(scripted: ServerHarness) -> None:
    jobs: Any = _Breaking(scripted)
    app = create_app(replace(scripted.service, jobs=jobs))
    with make_client(ServerHarness(scripted.service, app, scripted.user_home)) as client:
        stream = client.messages.create(messages=HI, stream=True, **ASK)
        assert next(iter(stream)).type == "message_start"
        with pytest.raises(anthropic.APIStatusError, match="is gone") as failed:
            list(stream)
    assert failed.value.type == "overloaded_error"
    assert ErrorResponse.model_validate(failed.value.body, strict=True).request_id
