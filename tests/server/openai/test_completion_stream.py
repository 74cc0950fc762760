"""Streams of completion calls."""

from typing import Any

import pytest
from openai.types import Completion

from tests.server.openai.client import Client, read_extra_fields
from tests.server.openai.scripted_base import HELLO
from tests.server.openai.test_completion_answer import go_on

USAGE = {"stream_options": {"include_usage": True}}


def chunks(client: Client, prompt: Any = "[hello]", **fields: Any) -> list[Completion]:
    given = {"model": "tiny", "prompt": prompt, "temperature": 0}
    read = list(client.completions.create(**{**given, **fields}, stream=True))
    for one in read:
        # the API says in prose that the reason is null until the end, its types do not
        shown = one.model_dump(exclude_unset=True)
        for choice in shown["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(shown, strict=True)
    return read


def test_words_come_as_they_are_certain_and_the_reason_at_the_end(client: Client) -> None:
    read = chunks(client)
    assert [one.choices[0].text for one in read] == [*HELLO, ""]
    assert [one.choices[0].finish_reason for one in read] == [None] * len(HELLO) + ["stop"]
    assert len({(one.id, one.created) for one in read}) == 1
    assert read_extra_fields(read[-1])["plan"]["base"] == "tiny"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"prompt": ["[hello]", "[answer]"], "n": 2},
        {"prompt": ["Hi [hello]", "[answer]"], "echo": True},
        {"logprobs": 2},
        {"max_tokens": 2},
        {"stop": "wör"},
    ],
    ids=str,
)
def test_what_is_streamed_is_what_is_answered_at_once(client: Client, fields: Any) -> None:
    at_once, read = go_on(client, **fields), chunks(client, **fields, **USAGE)
    for choice in at_once.choices:
        mine = [c for one in read for c in one.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            scored = [c.logprobs for c in mine if c.logprobs is not None]
            tokens = [token for one in scored for token in one.tokens or []]
            offsets = [offset for one in scored for offset in one.text_offset or []]
            assert (tokens, offsets) == (choice.logprobs.tokens, choice.logprobs.text_offset)
    assert read[-1].choices == []
    assert read[-1].usage is not None
    assert at_once.usage is not None
    assert read[-1].usage.completion_tokens == at_once.usage.completion_tokens
    assert all(one.usage is None for one in read[:-1])
