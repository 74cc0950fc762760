"""Files of training examples: what is refused, what is left out, and how they are divided."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.train.data import MAX_HELD_OUT, MAX_TEST, read_training_data
from tests.train.fixtures import write_examples, write_rows


def read_problems(path: Path) -> list[str]:
    with pytest.raises(InvalidPackageError) as caught:
        read_training_data(path)
    return list(caught.value.problems)


def make_rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"prompt {n}", "answer": f"answer {n}"} for n in range(count)]


def find_share(prompt: str) -> float:
    """Where SHA-256 puts a prompt, as documented."""
    data = json.dumps([["user", prompt]]).encode()
    return int(hashlib.sha256(data).hexdigest()[:12], 16) / 16**12


def test_the_part_of_an_example_follows_from_the_hash_of_its_prompt(tmp_path: Path) -> None:
    rows = make_rows(300)
    data = read_training_data(write_rows(tmp_path / "data.jsonl", rows))
    shares = {row["prompt"]: find_share(row["prompt"]) for row in rows}
    assert {e.prompt for e in data.test} == {p for p, s in shares.items() if s < 0.1}
    assert {e.prompt for e in data.held_out} == {p for p, s in shares.items() if 0.1 <= s < 0.2}
    assert [e.prompt for e in data.train] == [p for p, s in shares.items() if s >= 0.2]


def test_more_examples_move_none_to_another_part(tmp_path: Path) -> None:
    few = read_training_data(write_rows(tmp_path / "few.jsonl", make_rows(100)))
    many = read_training_data(write_rows(tmp_path / "many.jsonl", make_rows(400)))
    for name in ("train", "held_out", "test"):
        before = {e.prompt for e in getattr(few, name)}
        assert before <= {e.prompt for e in getattr(many, name)}


def test_prompts_that_differ_in_case_and_white_space_share_a_part(tmp_path: Path) -> None:
    rows = make_rows(100)
    copies = [{**row, "prompt": f"  {row['prompt'].upper()} "} for row in rows]
    data = read_training_data(write_rows(tmp_path / "data.jsonl", [*rows, *copies]))
    parts = (data.train, data.held_out, data.test)
    names = [{" ".join(str(e.prompt).casefold().split()) for e in part} for part in parts]
    assert [len(part) for part in parts] == [2 * len(found) for found in names]
    assert len(names[0] | names[1] | names[2]) == 100
    assert data.warnings == (f"{data.path}: 100 examples repeat the prompt of an earlier one",)


def test_repeated_examples_and_empty_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*make_rows(60), *make_rows(3), {"prompt": "nothing", "answer": " "}]
    data = read_training_data(write_rows(tmp_path / "data.jsonl", rows))
    assert len(data.train) + len(data.held_out) + len(data.test) == 60
    assert (data.duplicates, data.empty, data.repeated_prompts) == (3, 1, 0)
    assert data.warnings == (
        f"{data.path}: 3 repeated examples were left out",
        f"{data.path}: 1 examples with an empty answer were left out",
    )


def test_held_out_and_test_examples_are_at_most_so_many(tmp_path: Path) -> None:
    data = read_training_data(write_rows(tmp_path / "data.jsonl", make_rows(2600)))
    assert len(data.held_out) == MAX_HELD_OUT
    assert len(data.test) == MAX_TEST


def test_a_conversation_and_a_completion_are_read(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")]
    talk = {"messages": [{"role": role, "content": text} for role, text in turns]}
    rows = [*make_rows(60), talk, {"prompt": "Say yes", "completion": "yes"}]
    data = read_training_data(write_rows(tmp_path / "data.jsonl", rows))
    by_line = {e.line: e for part in (data.train, data.held_out, data.test) for e in part}
    assert [(m.role, m.content) for m in by_line[61].messages] == turns
    assert by_line[61].prompt is None
    assert (by_line[62].prompt, by_line[62].answer) == ("Say yes", "yes")


BAD_LINES: list[tuple[Any, str]] = [
    ("{", "line 2: "),
    ("[1]", "line 2: "),
    ("", "line 2: it is blank"),
    ({"prompt": "a"}, "line 2: document: "),
    ({"prompt": " ", "answer": "b"}, "line 2: prompt: "),
    ({"prompt": 3, "answer": "b"}, "line 2: prompt: "),
    ({"prompt": "a", "answer": "b", "systm": "c"}, "line 2: document: "),
    ({"id": "x"}, "line 2: it needs either a prompt and an answer, or messages"),
    (
        {"messages": [{"role": "user", "content": "a"}]},
        "line 2: messages: the last one must be the answer of the assistant",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a"}]},
        "line 2: messages: a message of the user must precede the answer",
    ),
    ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: messages/0/role: "),
    ({"messages": []}, "line 2: messages: "),
]


@pytest.mark.parametrize(("row", "problem"), BAD_LINES)
def test_a_bad_line_is_named(row: Any, problem: str, tmp_path: Path) -> None:
    first, *rest = make_rows(30)
    found = read_problems(write_rows(tmp_path / "data.jsonl", [first, row, *rest]))
    assert found[0].startswith(problem)
    assert all(line.startswith("line 2: ") for line in found)


def test_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b", "id": "x"}, "{", {"answer": "b"}]
    rows.append({"prompt": "c", "answer": "d", "id": "x"})
    found = read_problems(write_rows(tmp_path / "data.jsonl", rows))
    assert [line.partition(":")[0] for line in found] == ["line 2", "line 3", "line 4"]
    assert found[2] == "line 4: id 'x' is already used on line 1"


def test_too_few_examples_are_refused(tmp_path: Path) -> None:
    rows = make_rows(19) * 2
    found = read_problems(write_rows(tmp_path / "data.jsonl", rows))
    assert found == ["19 different examples, at least 20 are needed"]


def test_parts_without_examples_are_named(tmp_path: Path) -> None:
    rows = [row for row in make_rows(100) if find_share(row["prompt"]) >= 0.1]
    found = read_problems(write_rows(tmp_path / "data.jsonl", rows))
    assert found == ["no example falls into the part test"]


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_training_data(tmp_path / "none.jsonl")
    with pytest.raises(InvalidPackageError, match="not a regular file"):
        read_training_data(tmp_path)


def test_a_file_of_many_examples_keeps_their_lines(tmp_path: Path) -> None:
    data = read_training_data(write_examples(tmp_path / "data.jsonl", 50))
    lines = sorted(e.line for part in (data.train, data.held_out, data.test) for e in part)
    assert lines == list(range(1, 51))
