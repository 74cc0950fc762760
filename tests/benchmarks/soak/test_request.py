"""Requests of the soak are ones that the server takes, and its mistakes are mistakes."""

import json
from collections import Counter

import pytest
from msgspec import Struct

from benchmarks.soak.home import RENAMED
from benchmarks.soak.requests import (
    DISCONNECT_SHARE,
    INVALID_REQUESTS,
    INVALID_SHARE,
    MAX_CHARACTERS,
    InvalidRequest,
    RequestGenerator,
    SoakConversation,
    SoakRequest,
)
from expertctl.http.operation import parse_body
from expertctl.server.anthropic.message_request import MessageRequest
from expertctl.server.native.infer import InferRequest, RouteFields
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_request import CompletionRequest

EXPERTS = ["soak/lora-8", "soak/lora-16", *RENAMED.values()]
KINDS: dict[str, type[Struct]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "messages": MessageRequest,
    "infer": InferRequest,
    "jobs": InferRequest,
    "route": RouteFields,
}


def drawn(number: int, *, seed: int = 0) -> list[SoakRequest | InvalidRequest]:
    draws = RequestGenerator(EXPERTS, ["Sort these numbers: 3, 1, 2"], seed=seed)
    return [draws.next() for _ in range(number)]


def test_the_same_seed_draws_the_same_requests() -> None:
    def bodies(seed: int) -> list[object]:
        return [one.body if isinstance(one, SoakRequest) else one for one in drawn(300, seed=seed)]

    assert bodies(1) == bodies(1)
    assert bodies(1) != bodies(2)


def test_each_api_can_read_what_it_is_asked() -> None:
    asked = [one for one in drawn(1500) if isinstance(one, SoakRequest)]
    for one in asked:
        parse_body(json.dumps(one.body).encode(), KINDS[one.api])
    assert {one.api for one in asked} == KINDS.keys()
    assert {one.streams for one in asked if one.api == "messages"} == {True, False}
    assert {one.texts for one in asked if one.api == "chat"} == {1, 2, 3}


def test_as_many_leave_and_are_wrong_as_is_said() -> None:
    asked = drawn(5000)
    requests = [one for one in asked if isinstance(one, SoakRequest)]
    left = [one for one in requests if one.leaves_after is not None or one.hangs_up_after]
    assert 1 - len(requests) / len(asked) == pytest.approx(INVALID_SHARE, abs=0.01)
    assert len(left) / len(requests) == pytest.approx(DISCONNECT_SHARE, abs=0.02)


def test_a_request_knows_the_experts_that_it_names() -> None:
    for one in drawn(500):
        if isinstance(one, SoakRequest):
            said = json.dumps(one.body)
            assert all(name in said for name in one.experts)
            assert set(one.experts) <= set(EXPERTS)


def test_a_conversation_goes_on_until_it_is_too_long() -> None:
    talk = SoakConversation("somebody", "auto")
    talk.add_answer(talk.add_question("one"), "two")
    assert [turn["role"] for turn in talk.add_question("three")] == ["user", "assistant", "user"]
    talk.add_answer(talk.add_question("x" * MAX_CHARACTERS), "four")
    assert [turn["content"] for turn in talk.add_question("five")] == ["five"]


def test_every_api_is_asked_wrongly_and_statuses_are_those_of_callers() -> None:
    assert all(400 <= one.status < 500 for one in INVALID_REQUESTS)
    asked = Counter(one.path for one in INVALID_REQUESTS)
    paths = ("chat/completions", "completions", "messages", "infer", "jobs", "route")
    assert all(asked[f"/v1/{path}"] for path in paths)
