"""Evaluation data: what is read, what is refused with its line, and when an answer is right."""

import hashlib
import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.package.evaluation import EvaluationSample, Metric, is_correct, read_evaluation_data
from expertctl.reference import Digest
from expertctl.schema import validation
from expertctl.schema.validation import MAX_DATA_BYTES
from tests.package.forged_packages import draw_line_bytes

GOOD = b'{"prompt": "3 + 4", "answer": "7"}'


def written(folder: Path, data: bytes) -> Path:
    path = folder / "sums.jsonl"
    path.write_bytes(data)
    return path


def problems(path: Path, metric: Metric = "exact_match") -> tuple[str, ...]:
    with pytest.raises(InvalidPackageError) as caught:
        read_evaluation_data(path, metric=metric)
    return caught.value.problems


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_samples_are_read_with_their_lines(end: bytes, tmp_path: Path) -> None:
    more = {"prompt": "a\u2028b", "answer": "c\n", "body": "d", "id": "x"}
    text = GOOD + b"\n" + json.dumps(more, ensure_ascii=False).encode() + end
    data = read_evaluation_data(written(tmp_path, text), metric="exact_match")
    assert data.samples == (
        EvaluationSample(line=1, prompt="3 + 4", answer="7"),
        EvaluationSample(line=2, prompt="a\u2028b", answer="c\n", body="d", id="x"),
    )
    assert data.digest.hex == hashlib.sha256(text).hexdigest()
    assert data.warnings == ()


def test_all_problems_come_at_once_with_their_lines(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "1", "answer": "1", "id": "same"}',
        b"",
        b"not json",
        b'{"prompt": "2"}',
        b'{"prompt": " ", "answer": 2, "system": "x"}',
        b'{"prompt": "3", "prompt": "4", "answer": "1"}',
        b'["prompt", "answer"]',
        b'{"prompt": "\xff", "answer": "1"}',
        b'{"prompt": "\\ud800", "answer": "1"}',
        b'\xef\xbb\xbf{"prompt": "5", "answer": "1"}',
        b'{"prompt": "6", "answer": "1", "id": "same"}',
        b'{"prompt": "7", "answer": "1", "id": 7}',
        b'{"prompt": "8", "answer": NaN}',
        b"[" * 100_000,
    ]
    found = problems(written(tmp_path, b"\n".join(lines)))
    told = {int(problem.split(":")[0].removeprefix("line ")) for problem in found}
    assert told == set(range(2, len(lines) + 1))
    assert sum(problem.startswith("line 5:") for problem in found) == 3
    assert "line 2: it is blank" in found
    assert "line 11: id 'same' is already used on line 1" in found


@pytest.mark.parametrize("data", [b"", b"\n", b" \n\t\n"])
def test_an_empty_file_is_an_error(data: bytes, tmp_path: Path) -> None:
    assert problems(written(tmp_path, data)) == ("it is empty: there is nothing to evaluate",)


def test_a_file_without_an_end_of_problems_is_told_briefly(tmp_path: Path) -> None:
    found = problems(written(tmp_path, b"x\n" * 5000))
    assert len(found) == 51
    assert found[-1] == "… and more"


def test_size_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, GOOD + b"\n" + GOOD)
    monkeypatch.setattr(validation, "MAX_LINES", 1)
    assert problems(path) == ("2 lines, at most 1 are allowed",)
    monkeypatch.setattr(validation, "MAX_DATA_BYTES", 10)
    assert "more than 0 MiB" in problems(path)
    monkeypatch.undo()
    monkeypatch.setattr(validation, "MAX_LINE_BYTES", 10)
    assert all("too many bytes" in problem for problem in problems(path))


def test_millions_of_lines_are_not_taken_apart(tmp_path: Path) -> None:
    path = written(tmp_path, b"ab\n" * 2_000_000)
    tracemalloc.start()
    try:
        assert problems(path) == ("2000000 lines, at most 100000 are allowed",)
        assert tracemalloc.get_traced_memory()[1] < MAX_DATA_BYTES + 20_000_000
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_evaluation_data(tmp_path / "nowhere", metric="json")
    assert problems(tmp_path) == ("not a regular file",)
    os.mkfifo(tmp_path / "pipe")
    assert problems(tmp_path / "pipe") == ("not a regular file",)


def test_repeated_prompts_are_warned_of(tmp_path: Path) -> None:
    other_body = b'{"prompt": "3 + 4", "answer": "7", "body": "x"}'
    path = written(tmp_path, b"\n".join([GOOD, other_body, GOOD, GOOD]))
    (warning,) = read_evaluation_data(path, metric="exact_match").warnings
    assert warning.endswith("2 prompts are repeated, the first on line 3, from line 1")


def test_answers_that_are_no_json_are_refused_only_for_that_metric(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + b'\n{"prompt": "x", "answer": "{no"}\n')
    assert len(read_evaluation_data(path, metric="exact_match").samples) == 2
    (problem,) = problems(path, "json")
    assert problem.startswith("line 2: answer: not strict JSON")


@pytest.mark.parametrize(
    ("metric", "answer", "wanted", "right"),
    [
        ("exact_match", "7", "7", True),
        ("exact_match", "7 \n\n", "7", True),
        ("exact_match", "7", "7\r\n", True),
        ("exact_match", " 7", "7", False),
        ("exact_match", "7.", "7", False),
        ("exact_match", "a  b", "a b", False),
        ("contains", "It is 7.", "7\n", True),
        ("contains", "seven", "7", False),
        ("json", '{"b": [1, 2.0], "a": 1}\n', '{"a": 1.0, "b": [1, 2]}', True),
        ("json", "[1, 2]", "[2, 1]", False),
        ("json", "true", "1", False),
        ("json", "null", "false", False),
        ("json", '```json\n{"a": 1}\n```', '{"a": 1}', False),
        ("json", '{"a": 1, "a": 1}', '{"a": 1}', False),
        ("json", "9007199254740993", "9007199254740992", False),
        ("json", "[" * 50_000, "1", False),
        ("json", '"\\ud800"', '"x"', False),
        ("json", "", "0", False),
    ],
)
def test_an_answer_is_right_as_the_metric_says(
    metric: Metric, answer: str, wanted: str, right: bool
) -> None:
    assert is_correct(answer, wanted, metric=metric) is right


@given(st.text())
def test_every_answer_equals_itself_and_none_stops_the_comparison(answer: str) -> None:
    assert is_correct(answer, answer, metric="exact_match")
    assert is_correct(answer, answer, metric="contains")
    assert not is_correct(answer + "x", answer, metric="exact_match")
    assert isinstance(is_correct(answer, "1", metric="json"), bool)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_compared_by_value(value: object) -> None:
    spaced, ascii_only = json.dumps(value, indent=2, ensure_ascii=False), json.dumps(value)
    assert is_correct(spaced, ascii_only, metric="json")
    assert not is_correct(spaced, json.dumps([value]), metric="json")


@given(draw_line_bytes(b'{"prompt": "a", "answer": "1"}', b'{"prompt": "b", "answer": "[2]"}'))
def test_no_bytes_are_more_than_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = written(tmp_path_factory.getbasetemp(), data)
    for metric in get_args(Metric):
        with suppress(InvalidPackageError):
            found = read_evaluation_data(path, metric=metric)
            said = [json.loads(line) for line in data.splitlines() if line.strip()]
            assert [(s.prompt, s.answer) for s in found.samples] == [
                (line["prompt"], line["answer"]) for line in said
            ]
            assert found.digest == Digest.compute(data)
