"""A conversation that the chat template of the base takes in no such form: 400, in its words."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import BASE, CHAT_TEMPLATE, ServerHarness, make_served_packages, run_app

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}"
    "{% if messages[0].content == 'break' %}{{ messages[0].content + 1 }}{% endif %}"
) + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    """A server whose base insists on an order of roles."""
    folder = tmp_path_factory.mktemp("strict")
    stock = make_served_packages(folder / "stock", chat_template=STRICT)
    with run_app(stock.make_home(folder / "home")) as one:
        yield one


def asked(*said: tuple[str, str], **more: Any) -> dict[str, Any]:
    turns = [{"role": role, "content": content} for role, content in said]
    return {"model": BASE, "max_tokens": 3, "messages": turns, **more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([("system", "Be brief."), ("user", "Hi")], "Roles must alternate"),
        ([("user", "break")], "TypeError"),
    ],
)
def test_openais_clients_are_told_in_the_words_of_the_template(
    strict: ServerHarness, said: list[tuple[str, str]], words: str, stream: bool
) -> None:
    answer = strict.client().post(CHAT, json=asked(*said, stream=stream))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert len(answer.content) < 1000


def test_anthropics_clients_are_told_in_the_words_of_the_template(strict: ServerHarness) -> None:
    body = asked(("user", "Hi"), system="Be brief.")
    answer = strict.client().post(MESSAGES, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert "Roles must alternate" in error["message"]


def test_ours_are_told_and_who_keeps_the_order_is_answered(strict: ServerHarness) -> None:
    answer = strict.client().post("/v1/infer", json={"prompt": "break", "max_tokens": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "usage")
    said = asked(("user", "Hi"), ("assistant", "Hello"), ("user", "Again"))
    assert strict.client().post(CHAT, json=said).status_code == 200
