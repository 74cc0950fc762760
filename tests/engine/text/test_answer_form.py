"""The form of answers: when one is called for, and what is of it."""

from dataclasses import replace

import pytest

from expertctl.engine.text.answer_format import (
    MAX_CHARACTERS,
    check_answer_format,
    expected_format,
    ignore_truncation,
)
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
FIBONACCI = """Here is a function that returns the nth Fibonacci number:

```python
def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
```

For example, `fibonacci(10)` returns 55.
"""
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
        ("Write a Python function that adds two numbers", None),
        ("Implement quicksort in python, please", None),
        ("Write a Python function that returns its fields as JSON", None),
        ("Write a TypeScript function that turns CSV into JSON", None),
        ("Create a bash script that prints its arguments as JSON", None),
        ("Python code that answers in JSON", None),
        ("Extract the order code and answer in JSON", "json"),
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
    assert expected_format(prompt, []) == form
    assert expected_format(prompt, [PLAIN]) == form


def test_an_expert_says_by_its_task_or_its_evaluation_that_it_writes_json() -> None:
    assert expected_format("name Ada, age 36", [READER]) == "json"
    assert expected_format("name Ada, age 36", [MEASURED]) == "json"
    assert expected_format("name Ada, age 36", [PLAIN]) is None


def test_what_a_later_expert_may_change_is_not_checked() -> None:
    assert expected_format("Write as JSON: name Ada", [READER, PLAIN]) is None
    assert expected_format("Write as JSON: name Ada", [PLAIN, READER]) == "json"


def test_a_format_request_at_the_end_of_a_long_text_is_read() -> None:
    text = "Here is a text. " + "word " * 90_000
    assert expected_format(text + "\nAnswer in JSON.", []) == "json"
    assert expected_format(text + "Answer in JSON. " + text, []) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5e400, null]}',
        " 7\n",
        "1" * 6000,
        "Here it is:\n```json\n{}\n```\nand another:\n```json\n[1]\n```",
        "```\n[]\n```",
        'Sure! {"a": 1}',
        'Here is [the] answer:\n\n{"a": [1, 2]}\n\nI hope that {this} helps!',
        '1. The cities:\n\n   ```json\n   ["Rome"]\n   ```\n2. Done.',
        '~~~json title="a.json"\n{"a": "```"}\n~~~',
        "````json\n{}\n````",
        "```JSON\n{}",
        '{"a": 1, "a": 2}',
    ],
)
def test_json_is_read(text: str) -> None:
    assert check_answer_format(text, "json").passed is True


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{'a': 1}", "the answer is not JSON: "),
        ("Sure! Here it is: {'a': [1]}", "the answer is not JSON: "),
        ("I am [sorry], that is not possible {yet}.", "the answer is not JSON: "),
        ('{"a": 1, {"b": 2}', "the answer is not JSON: "),
        ("[NaN]", "the answer is not JSON: NaN is not a JSON value"),
        ("[" * 200_000, "the answer is not JSON: "),
        ("```json\n{}\n```\n```json\n{\n```", "the answer is not JSON: "),
        ("", "the answer is empty"),
        (" \n\t", "the answer is empty"),
    ],
)
def test_what_is_no_json_is_told(text: str, problem: str) -> None:
    found = check_answer_format(text, "json")
    assert found.passed is False
    assert found.problem.startswith(problem)
    assert found.warnings == (found.problem,)


def test_json_lines_are_read_one_by_one() -> None:
    assert check_answer_format('{"a": 1}\n\n[2]\n', "jsonl").passed is True
    assert check_answer_format('{"a":\n1}', "jsonl").passed is False
    assert check_answer_format('Here you are:\n{"a": 1}\n{"a": 2}\nDone.', "jsonl").passed is True
    assert check_answer_format('Here you are:\n{"a": 1}\n{"a": \nDone.', "jsonl").passed is False


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("def add(a, b):\n    return a + b\n", True),
        ("Here:\n```python\nprint('\\d')\n```\nThat prints.", True),
        ("```py\nx = 1\n```\n```json\n{broken\n```", True),
        (FIBONACCI, True),
        ("Here is the function:\n\ndef add(a, b):\n    return a + b\n\nIt adds them.", True),
        ("Run:\n```\npip install x\n```\nthen\n```python\nimport x\n```\n", True),
        ("```\nprint(55)\n```\nprints\n```\nfifty five\n```", True),
        ("```python\n>>> 1 + 1\n2\n```", True),
        ("1. So:\n   ```python\n   x = 1\n   ```", True),
        ("Here is it:\n\ndef add(a, b)\n    return a + b\n\nIt adds them.", False),
        ("def add(a, b)\n    return a + b\n", False),
        ("Here is the function that you want.", False),
        ("```python\nreturn =\n```", False),
        ("x = " + "(" * 5000, False),
        ("x = " + "-" * 100_000 + "1", False),
        ("x = '\0'", False),
    ],
)
def test_python_is_parsed_and_not_run(text: str, passed: bool) -> None:
    assert check_answer_format(text, "python").passed is passed


def test_parsing_python_runs_nothing_of_it() -> None:
    assert (
        check_answer_format("raise SystemExit(3)\nimport nowhere_at_all\n", "python").passed is True
    )


def test_without_a_form_only_an_empty_answer_is_wrong() -> None:
    assert check_answer_format("anything", None).passed is None
    assert check_answer_format("anything", None).warnings == ()
    assert check_answer_format("\n", None).passed is False


def test_an_answer_that_is_too_long_is_not_checked() -> None:
    assert check_answer_format("[" * (MAX_CHARACTERS + 1), "json").passed is None


@pytest.mark.parametrize("text", ['{"a": [1, 2', '```json\n{"a": 1,', "Sure, here is the"])
def test_an_answer_that_was_cut_is_not_blamed_for_its_end(text: str) -> None:
    found = ignore_truncation(check_answer_format(text, "json"), finish_reason="length")
    assert found.passed is None
    assert "cut at the token limit" in found.problem
    assert (
        ignore_truncation(check_answer_format(text, "json"), finish_reason="stop").passed is False
    )


def test_a_whole_answer_passes_where_the_limit_cut_only_what_came_after() -> None:
    found = ignore_truncation(
        check_answer_format('{"a": 1}\n\nThis is', "json"), finish_reason="length"
    )
    assert found.passed is True
