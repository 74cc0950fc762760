"""What the template of a base says about its words."""

import json
from pathlib import Path

import pytest

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.tool_parser import HERMES, MISTRAL
from tests.factories import write_base

THINKS = "{{ messages[0].content }}<think>\n{% if enable_thinking is false %}</think>{% endif %}"


def base_text(folder: Path, template: str | None) -> ChatTemplateTraits:
    directory = write_base(folder / "base", tie=True)
    config = directory / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8"))
    known["chat_template"] = template
    config.write_text(
        json.dumps({name: value for name, value in known.items() if value is not None}),
        encoding="utf-8",
    )
    return ChatTemplateTraits(Tokenizer.open(directory))


def test_the_template_says_how_calls_are_written(tmp_path: Path) -> None:
    text = base_text(tmp_path, "{{ '[TOOL_CALLS]' }}{% for tool in tools %}{% endfor %}")
    assert text.call_format == MISTRAL
    assert text.reads_tools


def test_without_a_template_there_are_no_tools_and_no_thoughts(tmp_path: Path) -> None:
    text = base_text(tmp_path, None)
    assert text.call_format == HERMES
    assert not text.reads_tools
    assert not text.opens_reasoning({})


def test_a_thought_may_be_open_depending_on_what_the_template_is_told(tmp_path: Path) -> None:
    text = base_text(tmp_path, THINKS)
    assert text.opens_reasoning({})
    assert text.opens_reasoning({"enable_thinking": True, "tools": []})
    assert not text.opens_reasoning({"enable_thinking": False})


def test_a_base_may_think_where_its_template_knows_the_tag(tmp_path: Path) -> None:
    assert base_text(tmp_path, THINKS).may_think
    assert not base_text(tmp_path / "plain", "{{ messages[0].content }}").may_think


def test_a_template_that_fails_opens_nothing(tmp_path: Path) -> None:
    assert not base_text(tmp_path, "{{ raise_exception('no') }}<think>").opens_reasoning({})


@pytest.mark.parametrize("words", ["Hi", "Hi there, how are you?"])
def test_tokens_are_those_of_the_rendered_conversation(tmp_path: Path, words: str) -> None:
    text = base_text(tmp_path, "{{ messages[0].content }}")
    assert text.count_tokens([ConversationMessage("user", words)], {}, context=4096) == len(
        text.tokenizer.encode(words)
    )
