"""Labelled prompts: what is read, what is refused with its line, and names that are unknown."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.reference import PackageName
from expertctl.routing.evaluation import (
    LabelledPrompt,
    read_labelled_prompts,
    require_experts_installed,
)
from tests.package.forged_packages import draw_line_bytes

SORTING, DATES = PackageName("acme", "sorting"), PackageName("acme", "dates")
GOOD = {"prompt": "Sort 3, 1, 2", "expert": "acme/sorting"}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(InvalidPackageError) as caught:
        read_labelled_prompts(path)
    return caught.value.problems


def test_prompts_are_read_with_their_lines_under_either_name_of_a_key(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        GOOD,
        {"text": "Hello", "label": None, "id": "hello"},
        {"prompt": "What day is it?", "label": "acme/dates"},
    )
    data = read_labelled_prompts(path)
    assert data.prompts == (
        LabelledPrompt(1, "Sort 3, 1, 2", SORTING),
        LabelledPrompt(2, "Hello", None, "hello"),
        LabelledPrompt(3, "What day is it?", DATES),
    )
    assert data.digest.hex == hashlib.sha256(path.read_bytes()).hexdigest()
    assert data.expected_experts == [DATES, SORTING]
    assert data.warnings == ()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "it is blank"),
        ("no json", "not strict JSON"),
        ([GOOD], "not a JSON object"),
        ({"prompt": "x"}, '"expert" is a required property'),
        ({"expert": None}, '"prompt" is a required property'),
        ({"prompt": " \n", "expert": None}, "prompt: "),
        ({"prompt": "x" * 500_001, "expert": None}, "prompt: "),
        ({"prompt": "x", "expert": ""}, "expert: "),
        ({"prompt": "x", "expert": 7}, "expert: "),
        ({"prompt": "x", "expert": "sorting"}, "expert: "),
        ({"prompt": "x", "expert": "acme/Sorting"}, "expert: "),
        ({"prompt": "x", "expert": "acme/sorting@1.0.0"}, "expert: "),
        ({"prompt": "x", "expert": f"{'a' * 65}/b"}, "expert: "),
        ({"prompt": "x", "expert": f"a/{'b' * 65}"}, "expert: "),
        ({"prompt": "x", "text": "y", "expert": None}, "'text' was unexpected"),
        ({"prompt": "x", "expert": None, "label": None}, "'label' was unexpected"),
        ({"prompt": "x", "expert": None, "answer": "1"}, "'answer' was unexpected"),
        ({"prompt": "x", "expert": None, "id": "first"}, "id 'first' is already used on line 1"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_number(
    line: object, told: str, tmp_path: Path
) -> None:
    found = problems(written(tmp_path, {**GOOD, "id": "first"}, line, {}))
    assert any(each.startswith("line 2: ") and told in each for each in found), found
    assert sum(each.startswith("line 3: ") for each in found) == 2


def test_the_longest_names_are_read(tmp_path: Path) -> None:
    name = f"{'a' * 64}/{'b' * 64}"
    (prompt,) = read_labelled_prompts(written(tmp_path, {"prompt": "x", "expert": name})).prompts
    assert str(prompt.expert) == name


def test_repeated_prompts_are_warned_of(tmp_path: Path) -> None:
    (warning,) = read_labelled_prompts(written(tmp_path, GOOD, GOOD)).warnings
    assert warning.endswith("1 prompt is repeated, the first on line 2, from line 1")


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_labelled_prompts(tmp_path / "nowhere.jsonl")
    assert problems(written(tmp_path)) == ("it is empty: there is nothing to evaluate",)


def test_every_unknown_expert_is_named_once_with_what_was_meant(tmp_path: Path) -> None:
    lines = [GOOD, {"prompt": "x", "expert": None}]
    lines += [{"prompt": str(i), "expert": "acme/sortign"} for i in range(2)]
    lines += [{"prompt": "y", "expert": "zzz/qqq"}]
    data = read_labelled_prompts(written(tmp_path, *lines))
    with pytest.raises(NotFoundError) as caught:
        require_experts_installed(data, {SORTING, DATES})
    assert caught.value.message == (
        f"{data.path}: 2 experts are not installed\n"
        "  - line 3: acme/sortign; did you mean acme/sorting?\n"
        "  - line 5: zzz/qqq"
    )
    assert "null is for the base alone" in caught.value.hint


def test_a_flood_of_unknown_experts_is_told_briefly(tmp_path: Path) -> None:
    lines = [{"prompt": str(i), "expert": f"acme/x{i}"} for i in range(60)]
    data = read_labelled_prompts(written(tmp_path, *lines))
    with pytest.raises(NotFoundError) as caught:
        require_experts_installed(data, set())
    assert "60 experts are not installed" in caught.value.message
    assert caught.value.message.count("\n") == 51
    assert caught.value.message.endswith("… and more")


def test_installed_experts_and_none_are_fine(tmp_path: Path) -> None:
    data = read_labelled_prompts(written(tmp_path, GOOD, {"prompt": "x", "expert": None}))
    require_experts_installed(data, {SORTING})


@given(
    draw_line_bytes(b'{"prompt": "a", "expert": null}', b'{"prompt": "b", "expert": "acme/sql"}')
)
def test_no_bytes_are_more_than_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    with suppress(InvalidPackageError):
        found = read_labelled_prompts(path)
        said = [json.loads(line) for line in data.splitlines() if line.strip()]
        assert [(p.prompt, p.expert and str(p.expert)) for p in found.prompts] == [
            (line["prompt"], line["expert"]) for line in said
        ]
