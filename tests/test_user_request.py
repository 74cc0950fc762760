"""The message holds what the user gave, once, in its place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.errors import ContextLengthError, UsageError
from expertctl.user_request import PROMPT_NOT_IN_TEMPLATE, UserMessage

VECTORS = json.loads((Path(__file__).parent / "vectors" / "runtime.json").read_text())


def test_the_rule_is_the_published_one() -> None:
    assert VECTORS["template"]["rule"] == (
        "{prompt} and {body} at most once each, else an error; without a template the user "
        "message is prompt, blank line, body; routing sees the prompt only"
    )


def test_without_a_template_it_is_prompt_blank_line_body() -> None:
    assert UserMessage(prompt="p").text() == "p"
    assert UserMessage(prompt="p", body="b\n").text() == "p\n\nb\n"


def test_a_prompt_is_never_rewritten() -> None:
    text = "  {prompt} {body}\r\n\u00e4\u0308 \U0001f600 <|im_end|>  "
    assert UserMessage(prompt=text).text() == text


@pytest.mark.parametrize(
    ("template", "body", "expected"),
    [
        ("Q: {prompt}", None, "Q: p{body}"),
        ("{body}|{prompt}", "b{prompt}", "b{prompt}|p{body}"),
        ("only {body}", "b", "only b"),
        ("fixed", None, "fixed"),
        ("{ prompt } {other}", None, "{ prompt } {other}"),
    ],
)
def test_a_template_is_filled_once(template: str, body: str | None, expected: str) -> None:
    assert UserMessage(prompt="p{body}", body=body, template=template).text() == expected


@pytest.mark.parametrize(
    ("template", "body", "problem"),
    [
        ("{prompt}{prompt}", None, r"\{prompt\} 2 times"),
        ("{body} {body} {body}", "b", r"\{body\} 3 times"),
        ("{prompt} {body}", None, "there is none"),
        ("{prompt}", "b", "would be lost"),
        (" \n", None, "the message is empty"),
        ("{body}", " ", "the message is empty"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(
    template: str, body: str | None, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        UserMessage(prompt="p", body=body, template=template).text()


@pytest.mark.parametrize(
    ("template", "read"), [(None, True), ("Q: {prompt}", True), ("{body}", False), ("x", False)]
)
def test_a_prompt_that_the_model_does_not_read_is_told(template: str | None, read: bool) -> None:
    assert UserMessage(prompt="p", body="b", template=template).warnings == (
        () if read else (PROMPT_NOT_IN_TEMPLATE,)
    )


@pytest.mark.parametrize("prompt", ["", "  \n\t", "x" * 500_001, "\udcff"])
def test_an_empty_over_long_or_broken_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(UsageError):
        UserMessage(prompt=prompt).text()


def test_prompt_and_body_together_have_the_limit_of_a_prompt() -> None:
    assert len(UserMessage(prompt="x" * 500_000).text()) == 500_000
    with pytest.raises(ContextLengthError, match="500003 characters"):
        UserMessage(prompt="x", body="y" * 500_000).text()


def test_the_module_loads_neither_numpy_nor_another_stage() -> None:
    program = "import sys, expertctl.user_request; print(*sorted(sys.modules))"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "numpy" not in loaded
    own = {name for name in loaded if name.split(".")[0] == "expertctl"}
    assert own == {"expertctl", "expertctl.user_request", "expertctl.errors"}
