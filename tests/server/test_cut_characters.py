"""An answer that ends inside a character ends before it, in every API, streamed or not."""

import json
from typing import Any

import pytest

from tests.factories import BYTE_TOKENS, decode_bytes
from tests.server.harness import BASE, ServerHarness

PROMPT = "Grüße 🙂"
LENGTHS = range(1, 40)
DRAWN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
HEADERS = {"anthropic-version": "2023-06-01"}


def infer(served: ServerHarness, most: int) -> Any:
    without = ["acme/sql", "acme/json", "acme/dates"]
    body = {"prompt": PROMPT, "max_tokens": most, **DRAWN, "seed": 4, "exclude_experts": without}
    return served.client().post("/v1/infer", json=body).json()


@pytest.fixture(scope="module")
def cut(served: ServerHarness) -> tuple[int, str]:
    """A length at which the answer is cut inside a character, and its text by Python's decoder."""
    for most in LENGTHS:
        ids = infer(served, most)["tokens"]["ids"]
        whole = bytes(i for i in ids if i < BYTE_TOKENS).decode("utf-8", "replace")
        if whole != decode_bytes(ids):
            return most, decode_bytes(ids)
    raise AssertionError("this base never begins a character of several bytes")


def streamed(answer: Any) -> list[Any]:
    """The JSON of every event of a stream."""
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def fields(most: int, **more: Any) -> dict[str, Any]:
    return {"model": BASE, "max_tokens": most, **DRAWN, "seed": 4, **more}


def test_infer(served: ServerHarness, cut: tuple[int, str]) -> None:
    most, text = cut
    assert infer(served, most)["text"] == text


def test_chat_completions(served: ServerHarness, cut: tuple[int, str]) -> None:
    most, text = cut
    body = fields(most, messages=[{"role": "user", "content": PROMPT}])
    client = served.client()
    whole = client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == text
    pieces = streamed(client.post("/v1/chat/completions", json={**body, "stream": True}))
    told = [c["delta"].get("content") or "" for piece in pieces for c in piece["choices"]]
    assert "".join(told) == text


def test_messages(served: ServerHarness, cut: tuple[int, str]) -> None:
    most, text = cut
    body = fields(most, messages=[{"role": "user", "content": PROMPT}])
    client = served.client()
    whole = client.post("/v1/messages", json=body, headers=HEADERS).json()
    assert "".join(block["text"] for block in whole["content"]) == text
    pieces = streamed(client.post("/v1/messages", json={**body, "stream": True}, headers=HEADERS))
    told = [p["delta"].get("text") or "" for p in pieces if p["type"] == "content_block_delta"]
    assert "".join(told) == text
