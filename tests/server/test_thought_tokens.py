"""Tokens that are thought are counted among those of an answer, with the tags around them."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.generation import GenerationOutput
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.server.reasoning_parser import CLOSE_TAG, OPEN_TAG, count_reasoning_tokens
from tests.factories import write_base

PIECES = st.lists(st.sampled_from([OPEN_TAG, CLOSE_TAG, "so", " ", "\n", "é", "🙂", "<", "think>"]))


@dataclass(frozen=True)
class Answer:
    """As much of a result as is looked at."""

    generated: GenerationOutput


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_base(tmp_path_factory.mktemp("thoughts") / "base", tie=True))


def counted(tokenizer: Tokenizer, *texts: str, opened: bool = False) -> int:
    answers: Any = [Answer(generated(text, tokenizer.encode(text))) for text in texts]
    return asyncio.run(count_reasoning_tokens(answers, tokenizer, starts_in_reasoning=opened))


def generated(text: str, tokens: list[int]) -> GenerationOutput:
    return GenerationOutput(
        text=text,
        tokens=tuple(tokens),
        finish_reason="stop",
        prefill_tokens=1,
        prefill_ms=1.0,
        first_token_ms=1.0,
        decode_ms=1.0,
        decode_steps=len(tokens),
    )


def by_offsets(directory_tokenizer: Tokenizer, text: str, *, opened: bool) -> int:
    """The same by where the tokenizer itself says that its tokens are."""
    inside, thinking, at = set[int](), opened, 0
    while at < len(text):
        tag = CLOSE_TAG if thinking else OPEN_TAG
        found = text.startswith(tag, at)
        step = len(tag) if found else 1
        if thinking or found:
            inside.update(range(at, at + step))
        thinking, at = thinking is not found, at + step
    encoding = directory_tokenizer._backend.encode(text)
    return sum(begin in inside for begin, _ in encoding.offsets)


@given(pieces=PIECES, opened=st.booleans())
def test_tokens_are_counted_by_where_the_tokenizer_says_they_are(
    tokenizer: Tokenizer, pieces: list[str], opened: bool
) -> None:
    text = "".join(pieces)
    wanted = by_offsets(tokenizer, text, opened=opened)
    assert counted(tokenizer, text, opened=opened) == wanted


def test_all_answers_of_a_call_are_counted(tokenizer: Tokenizer) -> None:
    one = counted(tokenizer, f"{OPEN_TAG}so{CLOSE_TAG}yes")
    assert one == len(tokenizer.encode(f"{OPEN_TAG}so{CLOSE_TAG}"))
    assert (
        counted(tokenizer, f"{OPEN_TAG}so{CLOSE_TAG}yes", "no", f"{OPEN_TAG}so{CLOSE_TAG}")
        == 2 * one
    )


def test_an_answer_without_a_thought_has_none(tokenizer: Tokenizer) -> None:
    assert counted(tokenizer, "no thought", "") == 0
