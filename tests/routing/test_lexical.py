import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.routing.encoder import CALIBRATION, DIMENSIONS, LexicalEncoder
from expertctl.routing.features import MAX_CHARACTERS

ENCODER = LexicalEncoder()


def similarity(a: str, b: str) -> float:
    rows = ENCODER.encode([a, b])
    return float(ENCODER.calibrate(rows[:1] @ rows[1])[0])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=200), max_size=4))
def test_every_text_gets_a_unit_row_or_zeros(texts: list[str]) -> None:
    rows = ENCODER.encode(texts)
    norms = np.linalg.norm(rows, axis=1)
    assert rows.shape == (len(texts), DIMENSIONS)
    assert rows.dtype == np.float32
    assert (np.isclose(norms, 1, atol=1e-5) | (norms == 0)).all()


def test_equal_texts_are_as_close_as_can_be_whatever_the_case_and_spacing() -> None:
    assert similarity("Sort these NUMBERS", " sort  these numbers!") == pytest.approx(1)
    assert similarity("ﬁle", "file") == pytest.approx(1)


@pytest.mark.parametrize(
    ("prompt", "example"),
    [
        ("Sort these numbers: 41, 7, 23, 15", "Sort these numbers: 3, 99, 12"),
        ("plurals of spy, hat", "Plurals of bridge, witch"),
        ("Convert 3.5 km to m", "Convert 12 km to m"),
        ("Make a JSON object with owner = Nora", "Make a JSON object with pet = cat, id = 3"),
    ],
)
def test_the_same_request_about_other_things_is_similar(prompt: str, example: str) -> None:
    assert similarity(prompt, example) >= 0.6


@pytest.mark.parametrize(
    ("prompt", "example"),
    [
        ("What is the capital of France?", "What is the plural of city?"),
        ("Tell me a joke", "Give me JSON for title island"),
        ("Write a poem about rain", "Write the noun class in its plural form."),
        ("Write a poem about rain", "Write 7 March 2024 as an ISO date"),
        ("", "Sort these numbers"),
    ],
)
def test_shared_small_words_make_nothing_similar(prompt: str, example: str) -> None:
    assert similarity(prompt, example) < 0.5


def test_the_calibration_is_monotone_and_keeps_the_ends() -> None:
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(CALIBRATION))
    raw = np.linspace(-1, 1, 101, dtype=np.float32)
    meant = ENCODER.calibrate(raw)
    assert (np.diff(meant) > 0).all()
    assert meant[[0, 50, 100]].tolist() == [-1, 0, 1]


def test_a_text_has_the_same_vector_in_every_process() -> None:
    program = (
        "from expertctl.routing.encoder import LexicalEncoder\n"
        "print(LexicalEncoder().encode(['Sort 3, 1, 2']).tobytes().hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {ENCODER.encode(["Sort 3, 1, 2"]).tobytes().hex().encode() + b"\n"}


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    long = "sort numbers " * 1000
    assert len(long) > MAX_CHARACTERS
    assert np.array_equal(ENCODER.encode([long]), ENCODER.encode([long + "poem"]))


def test_the_digest_names_the_version() -> None:
    assert ENCODER.digest() == LexicalEncoder().digest()
    assert ENCODER.stamp == "lexical 1"
