"""Which way of writing calls a chat template knows."""

import pytest

from expertctl.server.tool_parser import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCallFormat,
    detect_call_format,
    template_reads_tools,
)

QWEN = r"""{%- if tools %}{{- '<|im_start|>system\n' }}
{{- "For each function call, return a json object within <tool_call></tool_call> XML tags:" }}
{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}
{%- endif %}"""
LLAMA_31 = r"""{%- if tools is not none and not tools_in_user_message %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name.' }}
{%- endif %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA_32 = r"""{%- if tools is not none %}{{- '{"name": "' + tool_call.name + '", ' }}
{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{% endif %}"""
MISTRAL_7B = r"""{%- if tools is not none and (message == user_messages[-1]) %}
{{- "[AVAILABLE_TOOLS] [" }}{%- endif %}{{- "[TOOL_CALLS] [" }}"""
CHATML = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, HERMES),
        (LLAMA_31, LLAMA),
        (LLAMA_32, LLAMA),
        (MISTRAL_7B, MISTRAL),
        (CHATML, HERMES),
        ("", HERMES),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, form: ToolCallFormat) -> None:
    assert detect_call_format(template) == form


def test_a_template_that_never_looks_at_tools_is_told_from_one_that_does() -> None:
    assert all(
        template_reads_tools(template) for template in (QWEN, LLAMA_31, LLAMA_32, MISTRAL_7B)
    )
    assert not template_reads_tools(CHATML)
