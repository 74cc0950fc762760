"""What is thought, and what is answered."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.server.reasoning_parser import (
    MAX_SPACE,
    AnswerText,
    ReasoningParser,
    ReasoningPart,
    ReasoningText,
    prompt_opens_reasoning,
    split_reasoning,
)

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "hmm", "<thin"]),
    max_size=12,
).map("".join)


def merged(parts: list[ReasoningPart]) -> list[ReasoningPart]:
    result: list[ReasoningPart] = []
    for part in parts:
        if result and type(result[-1]) is type(part):
            result[-1] = type(part)(result[-1].text + part.text)
        else:
            result.append(part)
    return result


def cut(text: str, places: list[int], *, opened: bool) -> list[ReasoningPart]:
    parting, parts = ReasoningParser(starts_in_reasoning=opened), list[ReasoningPart]()
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    for begin, end in zip([0, *ends], ends, strict=False):
        parts += parting.push(text[begin:end])
    return merged([*parts, *parting.finish()])


@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("A<think>hidden</think>B", "AB", "hidden"),
        ("<think>\nTwo and two.\n</think>\n\nFour.", "Four.", "Two and two."),
        ("<think>\n\n</think>\n\nFour.", "Four.", ""),
        ("\n<think>a</think>B", "B", "a"),
        ("A <think>x</think> B", "A  B", "x"),
        ("<think>a</think>B<think>c</think>D", "BD", "ac"),
        ("<think>not closed", "", "not closed"),
        ("no block", "no block", ""),
        ("  no block ", "  no block ", ""),
        ("a < b <thinking> c", "a < b <thinking> c", ""),
        ("stray </think> tag", "stray </think> tag", ""),
        ("<think>a <think> b</think>c", "c", "a <think> b"),
        ("ends in <thi", "ends in <thi", ""),
        ("<think>ends in </thi", "", "ends in </thi"),
        ("", "", ""),
    ],
)
def test_a_block_is_parted_from_the_answer(text: str, answer: str, thought: str) -> None:
    assert split_reasoning(text) == (answer, thought)


def test_a_block_that_the_prompt_opened_needs_no_tag() -> None:
    assert split_reasoning("Two and two.\n</think>\n\nFour.", starts_in_reasoning=True) == (
        "Four.",
        "Two and two.",
    )
    assert split_reasoning("cut short", starts_in_reasoning=True) == ("", "cut short")


def test_a_prompt_opens_a_block_only_at_its_end() -> None:
    assert prompt_opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not prompt_opens_reasoning("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n")


@settings(deadline=None, max_examples=400)
@given(text=PIECES, places=st.lists(st.integers(0, 60), max_size=8), opened=st.booleans())
def test_where_the_text_is_cut_does_not_matter(text: str, places: list[int], opened: bool) -> None:
    whole = cut(text, [], opened=opened)
    assert cut(text, places, opened=opened) == whole
    assert cut(text, list(range(len(text))), opened=opened) == whole


def by_partition(text: str) -> tuple[str, str]:
    """The answer and what was thought, by plain searches in the whole text."""
    found, tags = ["", ""], itertools.cycle(["<think>", "</think>"])
    for number, tag in enumerate(tags):
        head, mark, text = text.partition(tag)
        found[number % 2] += head
        if not mark:
            return found[0], found[1]
    raise AssertionError("every text ends")


@settings(deadline=None, max_examples=400)
@given(text=PIECES)
def test_nothing_is_lost_but_tags_and_white_space(text: str) -> None:
    wanted, got = by_partition(text), split_reasoning(text)
    assert ["".join(part.split()) for part in got] == ["".join(part.split()) for part in wanted]


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parting = ReasoningParser()
    assert parting.push("Hello ") == [AnswerText("Hello ")]
    assert parting.push("<th") == []
    assert parting.push("e>") == [AnswerText("<the>")]
    assert parting.push("<think>so ") == [ReasoningText("so")]
    assert parting.push("it is") == [ReasoningText(" it is")]


@pytest.mark.parametrize("opened", [False, True])
def test_white_space_without_end_is_not_hoarded(opened: bool) -> None:
    parting = ReasoningParser(starts_in_reasoning=opened)
    parting.push("" if not opened else "x")
    given_out = sum(len(part.text) for _ in range(3) for part in parting.push(" " * MAX_SPACE))
    assert given_out >= 2 * MAX_SPACE
