"""A stream and the whole message say the same, however the text was cut into pieces."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import JobFinished, JobStarted
from expertctl.schema.strict_json import JsonObject
from expertctl.server.anthropic.message_request import MessageCall
from expertctl.server.anthropic.message_response import build_message
from expertctl.server.anthropic.routes import MessageStream
from expertctl.server.streaming import run_job
from tests.server.anthropic.client import WEATHER
from tests.server.anthropic.test_outcome import a_call
from tests.server.harness import ServerHarness

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
FRAGMENTS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "<tool_call>",
    '{"name": "weather", "arguments": {"a": [1, {}]}}',
    "</tool_call>",
    "<think>",
    "</think>",
    "a thought",
    "text",
    " ",
    "\n",
    "wörld 🙂",
)


@pytest.fixture(scope="module")
def result(scripted: ServerHarness) -> RunResult:
    return asyncio.run(run_job(scripted.engine, a_call(scripted).job)).results[0]


def streamed(call: MessageCall, result: RunResult, pieces: list[str]) -> Iterator[JsonObject]:
    stream = MessageStream(call)
    plan = result.planned.result.plan
    begin = JobStarted(plan, result.prompt_tokens, result.kv_reused_tokens)
    for event in (begin, *(OutputDelta(0, piece) for piece in pieces), JobFinished((result,))):
        yield from map(msgspec.to_builtins, stream.translate(event))


def added_up(events: Iterator[JsonObject]) -> dict[str, Any]:
    """What the official client makes of events."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            message = accumulate_event(
                event=EVENT.validate_python(event, strict=True),
                current_snapshot=message,
                json_bufs=buffers,
            )
    document: dict[str, Any] = message.to_dict(exclude_none=True)
    return document


@settings(deadline=None, max_examples=300)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    places=st.lists(st.integers(0, 200), max_size=10),
    thinks=st.booleans(),
    one_call=st.booleans(),
)
def test_any_text_in_any_pieces_adds_up_to_the_message(
    scripted: ServerHarness,
    result: RunResult,
    text: str,
    places: list[int],
    thinks: bool,
    one_call: bool,
) -> None:
    call = a_call(
        scripted,
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": one_call},
        thinking={"type": "adaptive"} if thinks else None,
    )
    written = replace(result, generated=replace(result.generated, text=text))
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    pieces = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    document = msgspec.to_builtins(build_message(call, written))
    whole = Message.model_validate(document, strict=True).to_dict(exclude_none=True)
    extension = whole.pop("expertctl")
    assert added_up(streamed(call, written, pieces)) == whole
    *_, last, _ = streamed(call, written, pieces)
    assert last["expertctl"] == extension


def test_a_job_that_was_over_before_it_began_is_a_message_all_the_same(
    scripted: ServerHarness, result: RunResult
) -> None:
    call = a_call(scripted)
    generated = replace(result.generated, text="", tokens=(), finish_reason="timeout")
    over = replace(result, generated=generated)
    events = [
        msgspec.to_builtins(one) for one in MessageStream(call).translate(JobFinished((over,)))
    ]
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    assert added_up(iter(events))["content"] == []
