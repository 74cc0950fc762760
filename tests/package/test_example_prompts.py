"""Files of example prompts as people write them."""

from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.package.draft import (
    MAX_EXAMPLE_CHARACTERS,
    MAX_EXAMPLES,
    MAX_EXAMPLES_BYTES,
    read_example_prompts,
)
from expertctl.schema.validation import find_problems


def written(folder: Path, data: bytes) -> Path:
    path = folder / "prompts.txt"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "examples"),
    [
        (b"Sort 3, 1, 2\nSort b, a\n", ["Sort 3, 1, 2", "Sort b, a"]),
        (b"\xef\xbb\xbfSort 3, 1\r\n\r\n  Sort b, a  ", ["Sort 3, 1", "Sort b, a"]),
        (b'{"prompt": "Sort 3, 1", "expected": "1, 3"}\n', ["Sort 3, 1"]),
        (b"Sort 3, 1\nSort 3, 1\n", ["Sort 3, 1"]),
        ("Größe und 数\n".encode(), ["Größe und 数"]),
    ],
    ids=["lines", "from Windows", "samples of an evaluation", "repeated", "any language"],
)
def test_prompts_are_read_as_people_write_them(
    data: bytes, examples: list[str], tmp_path: Path
) -> None:
    assert read_example_prompts(written(tmp_path, data)) == examples


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "there is no prompt in it"),
        (b"\n \n", "there is no prompt in it"),
        (b"ok\n\xff\n", "line 2: not UTF-8"),
        (b'{"text": "x"}', "line 1: an object without a text called prompt"),
        (b'{"prompt": 3}', "line 1: an object without a text called prompt"),
        (
            b"x" * (MAX_EXAMPLE_CHARACTERS + 1),
            f"line 1: {MAX_EXAMPLE_CHARACTERS + 1} characters, at most",
        ),
        (b"x" * (MAX_EXAMPLES_BYTES + 1), "more than 4 MiB"),
        (b"\n".join(b"%d" % n for n in range(MAX_EXAMPLES + 1)), "201 prompts, at most 200"),
    ],
)
def test_what_cannot_be_examples_is_named(data: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError, match=problem):
        read_example_prompts(written(tmp_path, data))


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_example_prompts(tmp_path / "nothing")


def test_as_many_and_as_long_prompts_as_are_read_are_valid_in_a_manifest(tmp_path: Path) -> None:
    lines = [f"{n}".rjust(MAX_EXAMPLE_CHARACTERS, "x") for n in range(MAX_EXAMPLES)]
    examples = read_example_prompts(written(tmp_path, "\n".join(lines).encode()))
    manifest = {"routing": {"examples": examples}}
    assert not [p for p in find_problems(manifest, "manifest") if "examples" in p]
    more = {"routing": {"examples": [*examples, "x" * (MAX_EXAMPLE_CHARACTERS + 1)]}}
    assert [p for p in find_problems(more, "manifest") if "examples" in p]
