import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.routing.features import extract_features


@pytest.mark.parametrize(
    ("prompt", "language"),
    [
        ("What is the capital of France?", "en"),
        ("Was ist die Hauptstadt von Frankreich und wie heißt der Fluss?", "de"),
        ("Quelle est la capitale de la France et pour qui est ce livre?", "fr"),
        ("Escribe un poema para la clase y el profesor con los alumnos", "es"),
        ("Escreva uma história para os alunos e não para as mães", "pt"),
        ("Scrivi una poesia per gli amici che non sono della scuola", "it"),
        ("Wat is het verschil en hoe werkt dat met een fiets op de weg", "nl"),
        ("東京の天気は", "ja"),
        ("北京今天的天气", "zh"),
        ("오늘 날씨", "ko"),
        ("Какая сегодня погода", "ru"),
        ("كيف حالك", "ar"),
        ("מה שלומך", "he"),
        ("Γειά σου φίλε", "el"),  # noqa: RUF001  # Greek is meant
        ("आप कैसे हैं", "hi"),
        ("สวัสดี", "th"),
        ("12, 7, 99", None),
        ("", None),
    ],
)
def test_the_language_is_told_where_it_shows(prompt: str, language: str | None) -> None:
    assert extract_features(prompt).language == language


@pytest.mark.parametrize(
    ("prompt", "task", "format_"),
    [
        ("Write as JSON: name Ada", "json_parsing", "json"),
        ("Parse this", "json_parsing", None),
        ("Write a poem about rain", "creative_writing", None),
        ("Tell me a short funny story", "creative_writing", None),
        ("Write an SQL query", "code_generation", "sql"),
        ("Implement a function that adds", "code_generation", None),
        ("```\nx = 1\n```", "code_generation", None),
        ("Translate this to Spanish", "translation", None),
        ("tl;dr of this page", "summarisation", None),
        ("Classify the sentiment", "classification", None),
        ("config as yaml", "default", "yaml"),
        ("a csv file", "default", "csv"),
        ("What is the capital of France?", "default", None),
    ],
)
def test_task_and_format_are_told(prompt: str, task: str, format_: str | None) -> None:
    features = extract_features(prompt)
    assert (features.task, features.format) == (task, format_)


@pytest.mark.parametrize(
    ("prompt", "has_json", "has_code"),
    [
        ('{"a": 1}', True, False),
        ("as json", True, False),
        ("[ [1] ]", True, False),
        ("{x}", False, False),
        ("def f(x): pass", False, True),
        ("import os", False, True),
        ("x => x + 1", False, True),
        ("first class travel", False, True),
        ("a poem", False, False),
    ],
)
def test_json_and_code_are_seen(prompt: str, has_json: bool, has_code: bool) -> None:
    features = extract_features(prompt)
    assert (features.has_json, features.has_code) == (has_json, has_code)


def test_the_document_says_the_length_and_no_word_of_the_prompt() -> None:
    assert extract_features("as json").to_json() == {
        "characters": 7,
        "language": None,
        "format": "json",
        "task": "json_parsing",
        "has_json": True,
        "has_code": False,
    }


@pytest.mark.parametrize(
    "prompt",
    [
        "write " * 80_000,
        "{ " * 200_000,
        " " * 500_000,
        "a" * 500_000,
        "tell a " * 70_000,
        "`" * 500_000,
    ],
    ids=lambda prompt: prompt[:8],
)
def test_a_prompt_of_the_largest_size_is_read_quickly(prompt: str) -> None:
    assert extract_features(prompt).length == len(prompt)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=300))
def test_any_text_has_features(prompt: str) -> None:
    features = extract_features(prompt)
    assert features.length == len(prompt)
    assert features.task


_TOLD = """
json jsonl parse Extract fields values write tell POEM stories song haiku limericks joke tale lyrics
verses brainstorm ``` sql implement function class scripts program code method query regex unit test
translate translation summary summarize tl;dr tldr classify categorise sentiment def import x; =>
return yaml csv { [ the and der die
"""


@given(st.lists(st.sampled_from(_TOLD.split()), max_size=6))
def test_what_is_looked_for_first_hides_nothing(words: list[str]) -> None:
    """A letter beyond ASCII, which changes nothing else, has every pattern tried."""
    text = " ".join(words)
    short, whole = extract_features(f"{text} x\n"), extract_features(f"{text} \u00e9\n")
    assert (short.task, short.format) == (whole.task, whole.format)
    assert (short.has_json, short.has_code) == (whole.has_json, whole.has_code)


@pytest.mark.parametrize(
    ("prompt", "task"),
    [("A \u017fummary, please", "summarisation"), ("Categori\u017fe this", "classification")],
)
def test_letters_that_fold_into_others_tell_the_task(prompt: str, task: str) -> None:
    assert extract_features(prompt).task == task
