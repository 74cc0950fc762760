import pytest

from expertctl.routing.features import evaluate_hint, extract_features
from expertctl.schema.manifest import parse_hint


@pytest.mark.parametrize(
    ("hint", "prompt", "expected"),
    [
        ("format=sql OR keyword(query)", "Write SQL for me", True),
        ("format=sql OR keyword(query)", "Query the users", True),
        ("format=sql OR keyword(query)", "Write a poem", False),
        ("keyword(query)", "inquery", False),
        ('keyword("window function")', "an SQL window function please", True),
        ('keyword("window function")', "function window", False),
        ("NOT has_json=true", "no data", True),
        ("has_json=true AND length<30", "as json", True),
        ("has_json=true AND length<5", "as json", False),
        ("length>=7", "seven c", True),
        ("length>7", "seven c", False),
        ("length<=7", "seven c", True),
        ("length!=7", "seven c", False),
        ("language=de", "was ist das und wie", True),
        ("language=de", "…", False),
        ("language!=de", "…", True),
        ("task=creative_writing", "write a poem", True),
        ("has_code=true", "def f(x): return x", True),
    ],
)
def test_a_hint_holds_or_not(hint: str, prompt: str, expected: bool) -> None:
    assert evaluate_hint(parse_hint(hint), extract_features(prompt)) is expected
