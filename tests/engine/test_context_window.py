"""A conversation fits, or is refused, or is cut as asked and said so."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.context_window import FittedPrompt, fit_to_context, insert_samples
from expertctl.engine.text.chat_template import EncodedPrompt
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import UsageError


def encode(messages: Sequence[ConversationMessage]) -> EncodedPrompt:
    """Three tokens of a template around one token per byte of each message."""
    ids = [token for m in messages for token in (1, 2, *m.content.encode(), 3)]
    return EncodedPrompt("", tuple(ids))


def fit(*texts: str, context: int, max_tokens: int, truncate: bool, soft: int = 0) -> FittedPrompt:
    """Fit a conversation of the user and the assistant in turn; the last message is the user's."""
    messages = talk(*texts)
    return fit_to_context(
        messages, encode, context=context, max_tokens=max_tokens, truncate=truncate, virtual=soft
    )


def talk(*texts: str) -> list[ConversationMessage]:
    return [
        ConversationMessage("assistant" if n % 2 else "user", text) for n, text in enumerate(texts)
    ]


def ids_of(*texts: str) -> tuple[int, ...]:
    return encode(talk(*texts)).ids


def test_a_prompt_that_fits_leaves_what_is_asked_for_or_what_there_is() -> None:
    prompt = fit("abcd", context=20, max_tokens=5, truncate=False)
    assert (prompt.ids, prompt.max_tokens, prompt.warnings) == (ids_of("abcd"), 5, ())
    assert fit("abcd", context=20, max_tokens=50, truncate=True).max_tokens == 13
    assert fit("abcd", context=8, max_tokens=50, truncate=False).max_tokens == 1


def test_a_prompt_without_room_for_one_token_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match="7 tokens, the context of the base is 7") as caught:
        fit("abcd", context=7, max_tokens=5, truncate=False)
    assert "--truncate" in caught.value.hint


def test_a_cut_prompt_keeps_its_beginning_and_the_template_and_says_so() -> None:
    prompt = fit("abcdefghij", context=8, max_tokens=100, truncate=True)
    assert prompt.ids == (1, 2, *b"abc", 3)
    assert prompt.max_tokens == 2
    assert prompt.warnings == ("the prompt was cut: 3 of 10 characters were read",)


def test_a_template_without_any_token_is_refused() -> None:
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        fit_to_context(
            talk("x"), lambda _: EncodedPrompt("", ()), context=9, max_tokens=1, truncate=True
        )


def test_a_template_larger_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="no part of the prompt fits"):
        fit("abc", context=4, max_tokens=1, truncate=True)


def test_virtual_tokens_take_their_part_of_the_context() -> None:
    prompt = fit("abcd", context=20, max_tokens=50, truncate=False, soft=5)
    assert (prompt.max_tokens, prompt.capacity) == (8, 20)
    with pytest.raises(
        UsageError, match=r"7 tokens, the context of the base is 12 .* and 5 virtual tokens"
    ):
        fit("abcd", context=12, max_tokens=5, truncate=False, soft=5)
    assert fit("abcd", context=12, max_tokens=1, truncate=True, soft=5).ids == ids_of("abc")
    with pytest.raises(UsageError, match="no part of the prompt fits"):
        fit("abcd", context=12, max_tokens=1, truncate=True, soft=12)


TALK = ("aaaa", "bbb", "cccc", "ddd", "eee")
"""Tokens of its turns: 13, 13, 6."""


def test_a_conversation_that_does_not_fit_is_refused_unless_it_may_be_cut() -> None:
    assert fit(*TALK, context=33, max_tokens=9, truncate=False).max_tokens == 1
    with pytest.raises(
        UsageError, match=r"the conversation has 32 tokens, .* base is 32"
    ) as caught:
        fit(*TALK, context=32, max_tokens=9, truncate=False)
    assert "oldest turns" in caught.value.hint


@pytest.mark.parametrize(
    ("context", "left", "gone"),
    [
        (42, TALK, 0),
        (41, TALK[2:], 1),
        (25, TALK[2:], 1),
        (24, TALK[4:], 2),
        (8, TALK[4:], 2),
    ],
)
def test_the_oldest_turns_go_first_and_whole_and_room_is_left_for_the_answer(
    context: int, left: tuple[str, ...], gone: int
) -> None:
    prompt = fit(*TALK, context=context, max_tokens=100, truncate=True)
    assert prompt.ids == ids_of(*left)
    assert len(prompt.warnings) == bool(gone)
    for warning in prompt.warnings:
        assert ("the oldest of 2 turns" if gone == 1 else "all 2 turns before") in warning


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (("a" * 9, "b", "c"), "the turn before did not fit into the context and was dropped"),
        (
            ("a" * 9, "b", "c", "d", "e"),
            "the oldest of 2 turns did not fit into the context and was",
        ),
    ],
)
def test_what_is_left_out_is_told_in_the_number_that_it_has(
    texts: tuple[str, ...], told: str
) -> None:
    context = len(ids_of(*texts[2:])) + 3
    [warning] = fit(*texts, context=context, max_tokens=2, truncate=True).warnings
    assert warning.startswith(told)


def test_the_message_is_cut_only_when_no_turn_is_left() -> None:
    prompt = fit(*TALK, context=6, max_tokens=2, truncate=True)
    assert prompt.ids == (*ids_of("ee")[:-1], 3)
    assert [w.split(":")[0] for w in prompt.warnings] == [
        "the prompt was cut",
        "all 2 turns before did not fit into the context and were dropped",
    ]


@given(
    st.lists(st.text("ab", max_size=9), min_size=1, max_size=9).filter(lambda t: len(t) % 2),
    st.integers(1, 60),
    st.integers(1, 50),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_what_is_left_of_a_conversation_is_its_end(
    texts: list[str], context: int, max_tokens: int, soft: int
) -> None:
    try:
        prompt = fit(*texts, context=context, max_tokens=max_tokens, truncate=True, soft=soft)
    except UsageError:
        return
    assert 1 <= prompt.max_tokens <= max_tokens
    assert prompt.capacity <= context
    ends = [ids_of(*texts[n:]) for n in range(0, len(texts), 2)]
    assert prompt.ids in ends or prompt.ids[:-1] == ends[-1][: len(prompt.ids) - 1]
    assert bool(prompt.warnings) == (prompt.ids != ends[0])


@given(st.text(min_size=1, max_size=60), st.integers(5, 40), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_what_is_cut_is_as_long_as_can_be(text: str, context: int, max_tokens: int) -> None:
    try:
        prompt = fit(text, context=context, max_tokens=max_tokens, truncate=True)
    except UsageError:
        return
    assert 1 <= prompt.max_tokens <= max_tokens
    assert len(prompt.ids) + prompt.max_tokens <= context
    kept = bytes(prompt.ids[2:-1]).decode()
    assert text.startswith(kept)
    if prompt.warnings:
        room = context - max(1, min(max_tokens, context // 4))
        assert len(ids_of(text[: len(kept) + 1])) > room >= len(prompt.ids)


SAMPLES = talk("give", "{}")
SAMPLE_TOKENS = len(encode(SAMPLES).ids)


def test_samples_follow_the_system_messages() -> None:
    system = ConversationMessage("system", "be brief")
    said = [system, *talk("hi", "ho", "go")]
    extended = insert_samples(said, SAMPLES, encode, room=1000, max_tokens=10)
    assert list(extended) == [system, *SAMPLES, *talk("hi", "ho", "go")]
    assert insert_samples(said, (), encode, room=1000, max_tokens=10) is said


@pytest.mark.parametrize("more", [0, 1])
def test_samples_take_at_most_an_eighth_of_the_context(more: int) -> None:
    said = talk("hi")
    room = 8 * SAMPLE_TOKENS - 1 + more
    extended = insert_samples(said, SAMPLES, encode, room=room, max_tokens=1)
    assert len(extended) == (3 if more else 1)


@pytest.mark.parametrize(("max_tokens", "kept"), [(20, 20), (1000, 100)])
def test_samples_leave_room_for_the_answer(max_tokens: int, kept: int) -> None:
    room = 400
    most = room - kept - SAMPLE_TOKENS - 3
    for size, count in ((most, 3), (most + 1, 1)):
        said = talk("x" * size)
        extended = insert_samples(said, SAMPLES, encode, room=room, max_tokens=max_tokens)
        assert len(extended) == count


def test_samples_that_a_template_refuses_are_left_out() -> None:
    def encode_one(messages: Sequence[ConversationMessage]) -> EncodedPrompt:
        if len(messages) > 1:
            raise UsageError("one turn")
        return encode(messages)

    said = talk("hi")
    assert insert_samples(said, SAMPLES, encode_one, room=1000, max_tokens=1) is said


@pytest.mark.parametrize("systems", [["sys"], ["one", "two"]])
def test_system_messages_stay_when_turns_are_dropped(systems: list[str]) -> None:
    first = [ConversationMessage("system", text) for text in systems]
    messages = [*first, *talk("a" * 30, "b" * 30, "question")]
    size = len(encode([*first, *talk("question")]).ids)
    prompt = fit_to_context(messages, encode, context=size + 8, max_tokens=8, truncate=True)
    assert prompt.ids == encode([*first, *talk("question")]).ids
    assert prompt.warnings == ("the turn before did not fit into the context and was dropped",)
    cut = fit_to_context(messages, encode, context=size - 2, max_tokens=1, truncate=True)
    assert cut.ids == encode([*first, *talk("quest")]).ids
    with pytest.raises(UsageError, match="no part of the prompt fits"):
        fit_to_context(messages, encode, context=6, max_tokens=1, truncate=True)


def test_a_system_message_alone_is_cut_as_a_prompt_is() -> None:
    alone = [ConversationMessage("system", "abcdefghij")]
    prompt = fit_to_context(alone, encode, context=8, max_tokens=100, truncate=True)
    assert prompt.ids == (1, 2, *b"abc", 3)
