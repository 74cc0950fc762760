"""Bodies of calls, and the calls that come of them."""

import json
from typing import Any

from expertctl.server.body import parse_body
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_request import CompletionRequest

MODEL = "tiny"


def chat_request(said: str = "Hi", **fields: Any) -> ChatRequest:
    """A chat call with one message, unless others are given."""
    usual = {"model": MODEL, "messages": [{"role": "user", "content": said}]}
    return parse_body(json.dumps({**usual, **fields}).encode(), ChatRequest)


def completion_request(prompt: Any = "Hi", **fields: Any) -> CompletionRequest:
    """A completion call."""
    body = {"model": MODEL, "prompt": prompt, **fields}
    return parse_body(json.dumps(body).encode(), CompletionRequest)
