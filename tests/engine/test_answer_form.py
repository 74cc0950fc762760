"""The form of answers: when one is called for, and what is of it."""

from dataclasses import replace

import pytest

from expertctl.engine.answer_form import MAX_CHARACTERS, checked, wanted_form
from expertctl.schema.manifest import BaseRequirement, Evaluation, Manifest, Routing

PLAIN = Manifest(
    schema=1,
    name="acme/plain",
    version="1.0.0",
    description="Answers.",
    license="MIT",
    base=BaseRequirement(name="base", arch="sha256:" + "0" * 64, tokenizer="sha256:" + "0" * 64),
    adapters=(),
)
READER = replace(PLAIN, routing=Routing(task="json_parsing"))
MEASURED = replace(
    PLAIN,
    evaluation=(
        Evaluation("fields", "0" * 64, 9, metric="json", base=0.0, expert=1.0, date="2026-01-01"),
    ),
)


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        ("Write as JSON: name Ada, age 36", "json"),
        ("Turn these fields into valid JSON: item: lamp", "json"),
        ("List three rivers. Respond only with a JSON array.", "json"),
        ("Give me the cities as JSONL", "jsonl"),
        ("Write a Python function that adds two numbers", "python"),
        ("Implement quicksort in python, please", "python"),
        ("Write a Python function that returns its fields as JSON", "python"),
        ("Who was Jason?", None),
        ("Tell me about the JSON standard", None),
        ("How do I convert a dict to JSON?", None),
        ("What is a python function?", None),
        ("explain this python script: import os", None),
        ("Return the JSON schema of an address", None),
        ("Sort these numbers: 41, 17", None),
        ("", None),
    ],
)
def test_a_prompt_calls_for_a_form_only_when_it_says_so(prompt: str, form: str | None) -> None:
    assert wanted_form(prompt, []) == form
    assert wanted_form(prompt, [PLAIN]) == form


def test_an_expert_says_by_its_task_or_its_evaluation_that_it_writes_json() -> None:
    assert wanted_form("name Ada, age 36", [READER]) == "json"
    assert wanted_form("name Ada, age 36", [MEASURED]) == "json"
    assert wanted_form("name Ada, age 36", [PLAIN]) is None


def test_what_a_later_expert_may_change_is_not_checked() -> None:
    assert wanted_form("Write as JSON: name Ada", [READER, PLAIN]) is None
    assert wanted_form("Write as JSON: name Ada", [PLAIN, READER]) == "json"


def test_a_wish_at_the_end_of_a_long_text_is_read() -> None:
    text = "Here is a text. " + "word " * 90_000
    assert wanted_form(text + "\nAnswer in JSON.", []) == "json"
    assert wanted_form(text + "Answer in JSON. " + text, []) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5e400, null]}',
        " 7\n",
        "1" * 6000,
        "Here it is:\n```json\n{}\n```\nand another:\n```json\n[1]\n```",
        "```\n[]\n```",
        '{"a": 1, "a": 2}',
    ],
)
def test_json_is_read(text: str) -> None:
    assert checked(text, "json").passed is True


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{'a': 1}", "the answer is not JSON: "),
        ("Sure! {}", "the answer is not JSON: "),
        ("[NaN]", "the answer is not JSON: NaN is not a JSON value"),
        ("[" * 200_000, "the answer is not JSON: "),
        ("```json\n{}\n```\n```json\n{\n```", "the answer is not JSON: "),
        ("", "the answer is empty"),
        (" \n\t", "the answer is empty"),
    ],
)
def test_what_is_no_json_is_told(text: str, problem: str) -> None:
    found = checked(text, "json")
    assert found.passed is False
    assert found.problem.startswith(problem)
    assert found.warnings == (found.problem,)


def test_json_lines_are_read_one_by_one() -> None:
    assert checked('{"a": 1}\n\n[2]\n', "jsonl").passed is True
    assert checked('{"a":\n1}', "jsonl").passed is False


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("def add(a, b):\n    return a + b\n", True),
        ("Here:\n```python\nprint('\\d')\n```\nThat prints.", True),
        ("```py\nx = 1\n```\n```json\n{broken\n```", True),
        ("def add(a, b)\n    return a + b\n", False),
        ("Here is the function that you want.", False),
        ("```python\nreturn =\n```", False),
        ("x = " + "(" * 5000, False),
        ("x = " + "-" * 100_000 + "1", False),
        ("x = '\0'", False),
    ],
)
def test_python_is_parsed_and_not_run(text: str, passed: bool) -> None:
    assert checked(text, "python").passed is passed


def test_parsing_python_runs_nothing_of_it() -> None:
    assert checked("raise SystemExit(3)\nimport nowhere_at_all\n", "python").passed is True


def test_without_a_form_only_an_empty_answer_is_wrong() -> None:
    assert checked("anything", None).passed is None
    assert checked("anything", None).warnings == ()
    assert checked("\n", None).passed is False


def test_an_answer_that_is_too_long_is_not_checked() -> None:
    assert checked("[" * (MAX_CHARACTERS + 1), "json").passed is None
