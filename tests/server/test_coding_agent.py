"""The first request of a coding agent: 24 tools, betas and fields of later versions of the API.

The request is in ``anthropic/coding_agent.json``: its shape is that of an agent's requests, its
words are ours. The same conversation is sent as agents send it that speak OpenAI's API.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from expertctl.server.app import create_app
from tests.server.harness import BASE, URL, ServerHarness, run_app
from tests.server.openai.scripted_base import ANSWER, make_scripted_packages

RECORDED = json.loads((Path(__file__).parent / "anthropic" / "coding_agent.json").read_text())
BODY: dict[str, Any] = RECORDED["body"]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
IGNORED = {
    "context_management",
    "system[].cache_control.scope",
    "tools[].cache_control.scope",
    "tools[].defer_loading",
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    folder = tmp_path_factory.mktemp("agent")
    with run_app(make_scripted_packages(folder / "stock").make_home(folder / "home")) as served:
        yield served


@pytest.fixture(scope="module")
def client(scripted: ServerHarness) -> Iterator[TestClient]:
    """A client of a server that calls the base by the name that the agent knows."""
    settings = replace(scripted.service.settings, aliases={BODY["model"]: BASE})
    app = create_app(replace(scripted.service, settings=settings))
    with TestClient(app, base_url=URL) as one:
        yield one


def lines_of(answer: Any) -> list[str]:
    lines = answer.text.splitlines()
    return [one.removeprefix("data: ") for one in lines if one.startswith("data: ")]


def test_the_recorded_request_is_as_large_as_it_should_be() -> None:
    assert len(BODY["tools"]) == 24
    assert {"context_management", "metadata", "thinking", "system", "stream"} <= set(BODY)
    assert len(RECORDED["headers"]["anthropic-beta"].split(",")) == 5


def test_the_first_request_of_a_coding_agent_is_answered_by_a_call(client: TestClient) -> None:
    answer = client.request(
        RECORDED["method"], RECORDED["path"], headers=RECORDED["headers"], json=BODY
    )
    assert answer.status_code == 200
    assert set(answer.headers["x-expertctl-ignored"].split(", ")) == IGNORED
    events = [json.loads(line) for line in lines_of(answer)]
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    [block] = [
        event["content_block"]
        for event in events
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
    ]
    assert block["name"] == "weather"
    [end] = [event for event in events if event["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use"
    assert any("were ignored" in warning for warning in end["expertctl"]["warnings"])


def test_the_second_request_has_the_result_and_is_answered(client: TestClient) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    turns = [
        *BODY["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "sunny"}],
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ]
    official = anthropic.Anthropic(
        api_key="any", base_url=URL, http_client=client, max_retries=0, timeout=60
    )
    body = {k: v for k, v in BODY.items() if k not in {"stream", "messages"}}
    fields = {name: body.pop(name) for name in ("context_management", "temperature")}
    message = official.messages.create(messages=turns, extra_body=fields, **body)
    assert message.stop_reason == "end_turn"
    assert "".join(ANSWER) in "".join(b.text for b in message.content if b.type == "text")


def test_its_tokens_are_counted_before(client: TestClient) -> None:
    known = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
    body = {name: BODY[name] for name in (*known, "context_management")}
    answer = client.post("/v1/messages/count_tokens?beta=true", json=body)
    assert answer.status_code == 200
    assert answer.json()["input_tokens"] > 1000


def test_an_agent_that_speaks_openais_api_is_answered_by_the_same_call(client: TestClient) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
                "strict": False,
            },
        }
        for tool in BODY["tools"]
    ]
    said = [{"type": "text", "text": part["text"]} for part in BODY["messages"][0]["content"]]
    body = {
        "model": BODY["model"],
        "messages": [
            {"role": "system", "content": "\n".join(part["text"] for part in BODY["system"])},
            {"role": "user", "content": said},
        ],
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
        "temperature": 0,
        "max_completion_tokens": 8192,
        "store": False,
        "user": BODY["metadata"]["user_id"],  # the same texts are read once
        "verbosity": "low",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"installation": "1"},
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    ignored = set(answer.headers["x-expertctl-ignored"].split(", "))
    assert ignored == {"reasoning", "include", "client_metadata", "verbosity"}
    *lines, done = lines_of(answer)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines]
    calls = [
        call for chunk in chunks for one in chunk.choices for call in one.delta.tool_calls or []
    ]
    [call] = calls
    assert call.function is not None
    assert call.function.name == "weather"
    assert chunks[-1].usage is not None
    reasons = [one.finish_reason for chunk in chunks for one in chunk.choices]
    assert reasons[-1] == "tool_calls"
