"""Why an answer ended, and what it took, of a result that is real but for its end."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from anthropic.types import Usage

from expertctl.engine.generation import FinishReason
from expertctl.engine.result import RunResult
from expertctl.http.operation import parse_body
from expertctl.server.anthropic.message_request import (
    MessageCall,
    MessageRequest,
    build_message_call,
)
from expertctl.server.anthropic.message_response import build_usage, find_stop_reason
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.responses import Caller
from expertctl.server.settings import ServeSettings
from expertctl.server.streaming import run_job
from tests.server.anthropic.client import make_body
from tests.server.harness import BASE, ServerHarness


def a_call(served: ServerHarness, **fields: Any) -> MessageCall:
    body = make_body(**{"max_tokens": 4, "temperature": 0, **fields})
    return build_message_call(
        parse_body(body, MessageRequest),
        caller=Caller(id="key-1"),
        base_name=BASE,
        template=ChatTemplateTraits(served.engine.tokenizer),
        settings=ServeSettings(),
    )


@pytest.fixture(scope="module")
def result(scripted: ServerHarness) -> RunResult:
    return asyncio.run(run_job(scripted.engine, a_call(scripted).job)).results[0]


@pytest.mark.parametrize(
    ("reason", "by", "calls", "wanted"),
    [
        ("stop", None, 0, ("end_turn", None)),
        ("stop", None, 2, ("tool_use", None)),
        ("stop", "END", 0, ("stop_sequence", "END")),
        ("stop", "END", 1, ("stop_sequence", "END")),
        ("stop", "an expert's own", 0, ("end_turn", None)),
        ("length", None, 0, ("max_tokens", None)),
        ("length", None, 1, ("max_tokens", None)),
        ("timeout", None, 0, ("max_tokens", None)),
        ("cancelled", None, 0, ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended_is_told_in_published_words(
    scripted: ServerHarness,
    result: RunResult,
    reason: FinishReason,
    by: str | None,
    calls: int,
    wanted: tuple[str, str | None],
) -> None:
    call = a_call(scripted, stop_sequences=["END", "FIN"])
    ended = replace(result.generated, finish_reason=reason, stopped_by=by)
    stop = find_stop_reason(call, replace(result, generated=ended), calls=calls)
    assert (stop.stop_reason, stop.stop_sequence) == wanted


def test_tokens_add_up_as_published() -> None:
    told = msgspec.to_builtins(build_usage(prompt=100, cached=60, generated=7))
    usage = Usage.model_validate(told, strict=True)
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert usage.input_tokens + cached == 100
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (40, 60, 7)
