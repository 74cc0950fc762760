"""A prompt fits, or is refused, or is cut as asked and said so."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.chat_template import Prompt
from expertctl.engine.context import fit_context
from expertctl.errors import UsageError


def encode(text: str) -> Prompt:
    """Three tokens of a template around one token per byte."""
    return Prompt(text, (1, 2, *text.encode(), 3))


def test_a_prompt_that_fits_leaves_what_is_asked_for_or_what_there_is() -> None:
    prompt = fit_context("abcd", encode, context=20, max_tokens=5, truncate=False)
    assert (prompt.ids, prompt.max_tokens, prompt.warnings) == (encode("abcd").ids, 5, ())
    assert fit_context("abcd", encode, context=20, max_tokens=50, truncate=True).max_tokens == 13
    assert fit_context("abcd", encode, context=8, max_tokens=50, truncate=False).max_tokens == 1


def test_a_prompt_without_room_for_one_token_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match="7 tokens, the base reads 7") as caught:
        fit_context("abcd", encode, context=7, max_tokens=5, truncate=False)
    assert "--truncate" in caught.value.hint


def test_a_cut_prompt_keeps_its_beginning_and_the_template_and_says_so() -> None:
    prompt = fit_context("abcdefghij", encode, context=8, max_tokens=100, truncate=True)
    assert prompt.ids == (1, 2, *b"abc", 3)
    assert prompt.max_tokens == 2
    assert prompt.warnings == ("the prompt was cut: 3 of 10 characters were read",)


def test_a_template_larger_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing of the prompt fits"):
        fit_context("abc", encode, context=4, max_tokens=1, truncate=True)


@given(st.text(min_size=1, max_size=60), st.integers(5, 40), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_what_is_cut_is_as_long_as_can_be(text: str, context: int, max_tokens: int) -> None:
    try:
        prompt = fit_context(text, encode, context=context, max_tokens=max_tokens, truncate=True)
    except UsageError:
        return
    assert 1 <= prompt.max_tokens <= max_tokens
    assert len(prompt.ids) + prompt.max_tokens <= context
    kept = bytes(prompt.ids[2:-1]).decode()
    assert text.startswith(kept)
    if prompt.warnings:
        room = context - max(1, min(max_tokens, context // 4))
        assert len(encode(text[: len(kept) + 1]).ids) > room >= len(prompt.ids)
