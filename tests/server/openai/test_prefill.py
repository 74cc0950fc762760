"""Answers that continue the last message: their tokens are those of transformers."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import torch
import transformers
from anthropic.types import TextBlock

from tests.server.anthropic.client import make_client as anthropic_client
from tests.server.harness import BASE, ServedPackages, ServerHarness
from tests.server.openai.client import Client, make_client

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
BEGUN: list[Any] = [QUESTION, {"role": "assistant", "content": "2 + 2 is"}]
TOKENS = 8


@pytest.fixture(scope="module")
def client(served: ServerHarness) -> Iterator[Client]:
    with make_client(served) as one:
        yield one


@pytest.fixture(scope="module")
def oracle(stock: ServedPackages) -> Any:
    """The text that transformers generates greedily for a conversation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(stock.base_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(stock.base_dir, dtype=torch.float32)

    def generate(messages: list[Any], **options: bool) -> str:
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
        whole = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        return str(tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True))

    return generate


def asked(client: Client, messages: list[Any], **fields: Any) -> str:
    answer = client.chat.completions.create(
        model=BASE, messages=messages, max_tokens=TOKENS, temperature=0, extra_body=fields
    )
    return answer.choices[0].message.content or ""


def test_a_conversation_that_ends_with_the_assistant_is_continued(
    client: Client, oracle: Any
) -> None:
    wanted = oracle(BEGUN, continue_final_message=True)
    assert wanted != oracle(BEGUN, add_generation_prompt=True)
    assert asked(client, BEGUN) == wanted
    assert asked(client, BEGUN, continue_final_message=True) == wanted
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert asked(client, BEGUN, **fields) == wanted


@pytest.mark.parametrize(
    "fields", [{"add_generation_prompt": True}, {"continue_final_message": False}]
)
def test_whoever_wants_a_new_turn_after_the_assistants_says_so(
    client: Client, oracle: Any, fields: dict[str, bool]
) -> None:
    assert asked(client, BEGUN, **fields) == oracle(BEGUN, add_generation_prompt=True)


def test_without_a_generation_prompt_the_conversation_is_read_as_it_is(
    client: Client, oracle: Any
) -> None:
    for messages in ([QUESTION], BEGUN):
        wanted = oracle(messages, add_generation_prompt=False)
        assert asked(client, messages, add_generation_prompt=False) == wanted


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([QUESTION], {"continue_final_message": True}),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}),
        ([QUESTION, {"role": "assistant", "content": " "}], {"continue_final_message": True}),
    ],
)
def test_what_cannot_be_continued_is_refused(
    client: Client, messages: list[Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, messages, **fields)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize("content", ["2 + 2 is", [{"type": "text", "text": "2 + 2 is"}]])
def test_anthropics_prefill_is_continued_and_not_repeated(
    served: ServerHarness, oracle: Any, content: Any
) -> None:
    ask: dict[str, Any] = {
        "model": BASE,
        "messages": [QUESTION, {"role": "assistant", "content": content}],
    }
    with anthropic_client(served) as client:
        answer = client.messages.create(**ask, max_tokens=TOKENS, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(**ask)
        new = client.messages.count_tokens(model=BASE, messages=ask["messages"][:1])
    [block] = answer.content
    assert isinstance(block, TextBlock)
    assert block.text == oracle(BEGUN, continue_final_message=True)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == (
        counted.input_tokens
    )
    assert counted.input_tokens > new.input_tokens


def test_anthropics_prefill_without_text_is_refused(served: ServerHarness) -> None:
    with (
        anthropic_client(served) as client,
        pytest.raises(anthropic.BadRequestError, match="has no text to continue"),
    ):
        client.messages.create(
            model=BASE, max_tokens=4, messages=[QUESTION, {"role": "assistant", "content": ""}]
        )
