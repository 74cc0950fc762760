"""What is wrong with a document, in few words however large it is."""

import pytest

from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.schema.validation import (
    LARGE_DOCUMENT_VALUES,
    MAX_PROBLEM_LENGTH,
    MAX_PROBLEMS,
    find_problems,
)


def sample(**changed: JsonValue) -> JsonObject:
    return {"prompt": "Sort 2, 1", "expert": "acme/sorting", **changed}


def test_a_valid_document_has_no_problems() -> None:
    assert find_problems(sample(), "routing-sample") == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [("many", "has more than 200 items"), ("long", "is longer than 2000 characters")],
)
def test_a_value_too_long_to_be_told_still_has_its_reason(value: str, problem: str) -> None:
    texts: dict[str, list[JsonValue]] = {
        "many": [f"Do task {number}" for number in range(5000)],
        "long": ["x" * 200_000],
    }
    manifest: JsonObject = {"routing": {"examples": texts[value]}}
    told = next(p for p in find_problems(manifest, "manifest") if p.startswith("routing/examples"))
    assert told.endswith(problem)
    assert "…" in told
    assert len(told) < MAX_PROBLEM_LENGTH + 40


def test_at_most_so_many_problems_are_told() -> None:
    manifest: JsonObject = {"routing": {"examples": [False] * 150}}
    told = find_problems(manifest, "manifest")
    assert len(told) == MAX_PROBLEMS + 1
    assert told[-1] == "… and more"


def test_of_a_document_with_too_many_problems_to_gather_one_is_told() -> None:
    manifest: JsonObject = {"routing": {"examples": [False] * (LARGE_DOCUMENT_VALUES + 1)}}
    told = find_problems(manifest, "manifest")
    assert len(told) == 2
    assert told[0].startswith(("routing/examples", "document: "))
    assert told[-1] == "… and more"
