"""Lines of JSON: what is read, what is told of the others; more in tests/package."""

from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject
from expertctl.schema.validation import JsonLinesReader, read_json_lines, warn_repeated


def lines(**aliases: str) -> JsonLinesReader:
    return JsonLinesReader("x.jsonl", schema="evaluation-sample", hint="look here", aliases=aliases)


def read(reader: JsonLinesReader, text: str) -> list[tuple[int, JsonObject]]:
    found = list(reader.read(text.encode()))
    reader.raise_problems()
    return found


def test_good_lines_come_with_their_numbers() -> None:
    text = '{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n'
    assert read(lines(), text) == [
        (1, {"prompt": "a", "answer": "b"}),
        (2, {"prompt": "c", "answer": "d"}),
    ]


def test_a_key_may_have_another_name() -> None:
    found = read(lines(text="prompt"), '{"text": "a", "answer": "b"}')
    assert found == [(1, {"prompt": "a", "answer": "b"})]


def test_a_key_under_both_of_its_names_is_refused() -> None:
    with pytest.raises(InvalidPackageError, match="'text' was unexpected"):
        read(lines(text="prompt"), '{"text": "a", "prompt": "a", "answer": "b"}')


def test_problems_are_told_at_the_end_all_of_them_with_the_way_out() -> None:
    reader = lines()
    assert [number for number, _ in reader.read(b'{}\n\n{"prompt": "a", "answer": "b"}')] == [3]
    reader.add_problems(3, "it is odd", "it is long")
    with pytest.raises(InvalidPackageError) as caught:
        reader.raise_problems()
    assert caught.value.problems == (
        'line 1: document: "prompt" is a required property',
        'line 1: document: "answer" is a required property',
        "line 2: it is blank",
        "line 3: it is odd",
        "line 3: it is long",
    )
    assert (caught.value.what, caught.value.hint) == ("x.jsonl", "look here")


def test_after_many_problems_the_rest_is_passed_over() -> None:
    reader = lines()
    good = '{"prompt": "a", "answer": "b"}'
    assert list(reader.read(("{}\n" * 30 + good).encode())) == []


def test_a_file_is_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n")
    assert read_json_lines(path) == b"{}\n"
    with pytest.raises(InvalidPackageError, match="not a regular file"):
        read_json_lines(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([(1, "a"), (2, "b")], ()),
        ([(1, "a"), (2, "a")], ("f: 1 prompt is repeated, the first on line 2, from line 1",)),
        (
            [(1, "a"), (2, "b"), (3, "b"), (4, "a")],
            ("f: 2 prompts are repeated, the first on line 3, from line 2",),
        ),
    ],
)
def test_what_comes_twice_is_told_once(
    prompts: list[tuple[int, str]], told: tuple[str, ...]
) -> None:
    assert warn_repeated(Path("f"), prompts) == told
