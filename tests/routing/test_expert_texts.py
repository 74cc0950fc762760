import numpy as np
import pytest

from expertctl.routing.encoder import ExpertTexts, describe_row
from tests.routing.experts import make_manifest

FULL = make_manifest(
    "acme/sql-writer-2",
    description="Writes SQL.",
    examples=("Query users", "Join tables", "x" * 80),
    keywords=("sql", "select"),
)
BARE = make_manifest("acme/sort", description="Sorts.")


def test_the_texts_are_description_examples_keywords_and_name() -> None:
    assert ExpertTexts.from_manifest(FULL).all == [
        "Writes SQL.",
        "Query users",
        "Join tables",
        "x" * 80,
        "sql, select",
        "sql writer 2",
    ]
    assert ExpertTexts.from_manifest(BARE).all == ["Sorts.", "sort"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (0, "its description"),
        (2, "its example 'Join tables'"),
        (3, f"its example '{'x' * 60}…'"),
        (4, "its keywords"),
        (5, "its name"),
        (6, "the mean of its examples"),
    ],
)
def test_every_row_is_told_in_words(text: int, words: str) -> None:
    assert describe_row(FULL, text) == words


def test_an_expert_without_keywords_has_no_row_for_them() -> None:
    assert describe_row(BARE, 1) == "its name"


def test_the_mean_is_of_description_and_examples_alone() -> None:
    rows = np.eye(6, dtype=np.float32)
    made = ExpertTexts.from_manifest(FULL).build_rows(rows)
    assert np.array_equal(made[:6], rows)
    assert made[6].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 0, 0])


def test_a_few_texts_or_texts_that_say_nothing_have_no_mean() -> None:
    two, six = np.eye(2, dtype=np.float32), np.zeros((6, 4), np.float32)
    assert ExpertTexts.from_manifest(BARE).build_rows(two) is two
    assert ExpertTexts.from_manifest(FULL).build_rows(six) is six
