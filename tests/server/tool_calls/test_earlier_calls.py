"""Earlier calls as chat templates take them."""

from pathlib import Path

from expertctl.engine.text.chat_template import ChatTemplate
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.server.chat_prompt import normalise_call_ids
from expertctl.server.tool_parser import HERMES, MISTRAL

TEMPLATE = """{%- for message in messages %}
{%- for call in message.tool_calls or [] %}
{%- if not call.id is defined or call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}[TOOL_CALLS]{{ call.id }}
{%- endfor %}
{%- if message.tool_call_id is defined %}
{%- if message.tool_call_id|length != 9 %}{{ raise_exception("length 9!") }}{%- endif -%}
[TOOL_RESULTS]{{ message.tool_call_id }}
{%- endif %}
{%- endfor %}"""
"""What the published templates of Mistral say of ids."""


def a_call(name: str) -> ConversationMessage:
    call = {"id": name, "type": "function", "function": {"name": "now", "arguments": {}}}
    return ConversationMessage("assistant", "", {"tool_calls": [call]})  # type: ignore[dict-item]  # JSON


def an_answer(name: str) -> ConversationMessage:
    return ConversationMessage("tool", "noon", {"tool_call_id": name, "name": "now"})


def test_a_template_that_demands_short_ids_gets_them() -> None:
    turns = [
        ConversationMessage("user", "?"),
        a_call("toolu_1"),
        an_answer("toolu_1"),
        a_call("toolu_2"),
    ]
    template = ChatTemplate(TemplateSource(TEMPLATE, Path("tokenizer_config.json")))
    text = template.render(normalise_call_ids(turns, MISTRAL), special_tokens={})
    first, second = text.split("[TOOL_CALLS]")[1:]
    name, answered = first.split("[TOOL_RESULTS]")
    assert name == answered != second
    assert len(name) == len(second) == 9


def test_ids_that_fit_and_templates_that_take_any_change_nothing() -> None:
    short, long = [a_call("abcDEF123"), an_answer("abcDEF123")], [a_call("toolu_1")]
    assert normalise_call_ids(short, MISTRAL) == tuple(short)
    assert normalise_call_ids(long, HERMES) == tuple(long)
    assert normalise_call_ids([ConversationMessage("user", "Hi")], MISTRAL) == (
        ConversationMessage("user", "Hi"),
    )
