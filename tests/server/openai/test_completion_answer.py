"""Answers to completion calls: texts that are continued as they stand."""

from typing import Any

import openai
import pytest
from openai.types import Completion

from expertctl.server.openai.completion_request import DEFAULT_MAX_TOKENS
from tests.server.harness import ServerHarness
from tests.server.openai.client import Client, read_extra_fields
from tests.server.openai.scripted_base import HELLO, THOUGHTS


def go_on(client: Client, prompt: Any = "[hello]", **fields: Any) -> Completion:
    given = {"model": "tiny", "prompt": prompt, "temperature": 0}
    answer = client.completions.create(**{**given, **fields})
    assert isinstance(answer, Completion)
    Completion.model_validate(answer.model_dump(exclude_unset=True), strict=True)
    return answer


def test_a_text_is_continued_without_a_chat_template(client: Client) -> None:
    answer = go_on(client)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.id == f"cmpl-{read_extra_fields(answer)['job_id']}"
    [choice] = answer.choices
    assert (choice.index, choice.text) == (0, "".join(HELLO))
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1  # "[hello]" is one word of this base
    assert answer.usage.completion_tokens == len(HELLO)


def test_what_a_model_thinks_is_part_of_the_text(client: Client) -> None:
    assert go_on(client, "[thoughts]").choices[0].text == "".join(THOUGHTS)


def test_silence_about_the_length_means_that_of_the_api(client: Client) -> None:
    assert (
        read_extra_fields(go_on(client))["plan"]["params"]["max_tokens"] == DEFAULT_MAX_TOKENS == 16
    )
    assert (
        read_extra_fields(go_on(client, model="auto"))["plan"]["params"]["max_tokens"]
        > DEFAULT_MAX_TOKENS
    )


def test_several_prompts_have_their_answers_in_order(client: Client) -> None:
    answer = go_on(client, ["[hello]", "[answer]"], n=2)
    texts = [(choice.index, choice.text) for choice in answer.choices]
    hello, sunny = "".join(HELLO), "It is sunny in Paris"
    assert texts == [(0, hello), (1, hello), (2, sunny), (3, sunny)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 2 * len(HELLO) + 2 * 3
    prompts = read_extra_fields(answer)["prompts"]
    assert [[one["index"] for one in each["answers"]] for each in prompts] == [[0, 1], [2, 3]]


def test_a_prompt_is_echoed_before_its_continuation(client: Client) -> None:
    answer = go_on(client, "Hi [hello]", echo=True)
    assert answer.choices[0].text == "Hi [hello]" + "".join(HELLO)


def test_the_scores_of_tokens_stand_beside_each_other(client: Client) -> None:
    scores = go_on(client, logprobs=2).choices[0].logprobs
    assert scores is not None
    assert scores.tokens == list(HELLO)
    assert scores.text_offset == [0, 5, 7, 14]
    assert all(one > -0.01 for one in scores.token_logprobs or [])
    assert [len(one) for one in scores.top_logprobs or []] == [2, 2, 2, 2]
    assert [word in one for word, one in zip(HELLO, scores.top_logprobs or [], strict=True)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "  "}, None),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_done_is_refused_by_its_name(client: Client, fields: Any, param: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        go_on(client, **fields)
    assert refused.value.param == param


def test_one_prompt_that_is_refused_gives_up_the_others(
    client: Client, scripted: ServerHarness
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16384 tokens"):
        go_on(client, ["[hello]", "a" * 20_000], max_tokens=100)
    assert go_on(client).choices[0].finish_reason == "stop"
