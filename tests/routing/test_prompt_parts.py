"""A request is told from what it is about."""

import pytest

from expertctl.routing.prompt_normalisation import (
    LONG_WORDS,
    extract_request,
    find_asking_paragraph,
    is_keyword_pile,
    is_request,
    select_asking_sentences,
    split_sentences,
    strip_keyword_lists,
    strip_repeats,
)

STORY = "The rain went on for hours. A window was open."


@pytest.mark.parametrize(
    "mark", ["---", "=====", '"""', "```", "```python", "<document>", "Text:", "> quoted"]
)
def test_a_body_is_left_out_where_the_request_says_enough(mark: str) -> None:
    assert (
        extract_request(f"sort these numbers\n{mark}\nquery the table").strip()
        == "sort these numbers"
    )


@pytest.mark.parametrize("head", ["Please do this for me", "Answer the following question", "It"])
def test_a_request_that_only_points_at_its_body_keeps_it(head: str) -> None:
    text = f"{head}\n---\nsort 3, 1, 2"
    assert extract_request(text) == text


def test_a_prompt_that_begins_with_a_mark_is_no_body() -> None:
    assert extract_request("---\nsort 3, 1, 2") == "---\nsort 3, 1, 2"


@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        ("one paragraph", "one paragraph"),
        (f"{STORY}\n\nsort these numbers", "sort these numbers"),
        (f"sort these numbers\n\n{STORY}", "sort these numbers"),
        (f"{STORY}\n\nmy card is lost", "my card is lost"),
        (f"what is it\n\nhow is it\n\n{STORY}", "what is it"),
        (f"{STORY}\n\n{STORY} Again.", STORY),
        ("", ""),
    ],
)
def test_the_paragraph_that_asks_is_taken(text: str, paragraph: str) -> None:
    assert find_asking_paragraph(text) == paragraph


def test_sentences_end_with_stops_and_lines() -> None:
    text = "Sort 3.5 and 2. Then\nstop! \u505c\u3002\u8d70"
    assert split_sentences(text) == ["Sort 3.5 and 2.", "Then", "stop!", "\u505c\u3002", "\u8d70"]


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        ("is it late", True),
        ("Hello, please tell me", True),
        ("I would like a table", True),
        ("it is late, right?", True),
        ("Please, a table for two", True),
        ("SQL: select the author", True),
        ("Express 12 km in metres", True),
        ("Plan B was not bad, said she", True),
        ("planets turn", False),
        ("the window was open", False),
    ],
)
def test_questions_and_wishes_ask(sentence: str, answer: bool) -> None:
    assert is_request(sentence) is answer


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        ("sql query select table where join", True),
        ("sql query select", False),
        ("what is the query for all my tables", False),
    ],
)
def test_words_that_nothing_joins_are_a_pile(sentence: str, answer: bool) -> None:
    assert is_keyword_pile(sentence) is answer


def test_of_a_long_text_only_what_asks_is_left() -> None:
    story = ["The rain went on for hours and hours."] * LONG_WORDS
    assert select_asking_sentences([*story, "sort it", *story]) == ["sort it"]
    assert select_asking_sentences([*story, "my card is lost"]) == ["my card is lost"]
    assert select_asking_sentences(story) == story[:1]
    assert select_asking_sentences(["The rain went on.", "sort it"]) == [
        "The rain went on.",
        "sort it",
    ]


def test_words_said_again_and_again_are_left_out() -> None:
    assert strip_repeats("sort it sql sql sql sql").split() == ["sort", "it"]
    assert strip_repeats("sort 4 4 4 4 4") == "sort 4 4 4 4 4"
    assert strip_repeats("the cat and the dog and the hen") == "the cat and the dog and the hen"


@pytest.mark.parametrize(
    ("sentence", "left"),
    [
        ("roll, dice, sided, need, die, 6 how do you cook eggs", "how do you cook eggs"),
        ("date, iso, 8601, month day tell me about rain in Oslo", "tell me about rain in Oslo"),
        ("milk, eggs, bread, butter: put these on my list", "butter: put these on my list"),
        ("convert, metres, grams, write the name as JSON", "write the name as JSON"),
        ("sort the numbers (sql, query, select, table, where)", "sort the numbers"),
        ("(sql, query, select, table, where)", ""),
    ],
)
def test_attack_105_lists_of_keywords_around_a_request_are_left_out(
    sentence: str, left: str
) -> None:
    assert strip_keyword_lists(sentence).strip() == left


@pytest.mark.parametrize(
    "sentence",
    [
        "Sort pear, fig, plum, apple in ascending order",
        "Sort 15, 49, 34, 48, 42 in ascending order.",
        "41, 17, 23, 5 in ascending order please",
        "Sort these numbers (41, 17, 23, 5)",
        "Write as JSON: name Ada, age 36, city Oslo, pet cat",
        "yes, no, maybe, sorted",
        "move the money (all of it, if you can)",
        "Yesterday, in Paris, my wife, who loves music, bought a violin",
        "Berlin, Paris, Rome, Madrid weather tomorrow",
        "Quickly, quietly, carefully, the cat came in",
    ],
)
def test_lists_that_a_request_is_about_are_kept(sentence: str) -> None:
    assert strip_keyword_lists(sentence) == sentence
