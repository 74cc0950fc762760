"""Bodies of calls, and the calls that come of them.

The official client, on a server in process.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from expertctl.http.operation import parse_body
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_request import CompletionRequest
from tests.server.harness import URL, ServerHarness

MODEL = "tiny"


def make_chat_request(said: str = "Hi", **fields: Any) -> ChatRequest:
    """A chat call with one message, unless others are given."""
    usual = {"model": MODEL, "messages": [{"role": "user", "content": said}]}
    return parse_body(json.dumps({**usual, **fields}).encode(), ChatRequest)


def make_completion_request(prompt: Any = "Hi", **fields: Any) -> CompletionRequest:
    """A completion call."""
    body = {"model": MODEL, "prompt": prompt, **fields}
    return parse_body(json.dumps(body).encode(), CompletionRequest)


Client = openai.OpenAI


@contextmanager
def make_client(served: ServerHarness, secret: str = "any") -> Iterator[Client]:
    """The client of a server in process; it tries nothing again."""
    inner: Any = served.client()
    with openai.OpenAI(
        api_key=secret, base_url=f"{URL}/v1", http_client=inner, max_retries=0
    ) as client:
        yield client


def read_extra_fields(answer: Any) -> dict[str, Any]:
    """What an answer holds that the published API has no place for."""
    extra = answer.model_extra["expertctl"]
    assert isinstance(extra, dict)
    return extra
