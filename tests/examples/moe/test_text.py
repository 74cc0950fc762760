"""The text that the base of routed experts is trained and measured on."""

import re

from examples.moe.text import (
    LENGTH,
    Document,
    encode_turn,
    held_out_documents,
    training_documents,
)
from examples.starter.mixture import Turn
from examples.starter.samples import is_held_out
from examples.starter.vocab import END, SPECIALS, encode_prompt

NOUN = re.compile(r"What is the plural of (\w+)\?")


def spelled(document: Document) -> str:
    return bytes(token for token in document.ids if token < 256).decode(errors="replace")


def test_a_step_reads_the_same_documents_whenever_it_is_done_and_no_other_step_does() -> None:
    first = training_documents(3, seed=0, step=7)
    assert first == training_documents(3, seed=0, step=7)
    assert not set(first) & set(training_documents(3, seed=0, step=8))
    assert not set(first) & set(training_documents(3, seed=1, step=7))


def test_documents_are_of_one_length_with_a_flag_for_each_token() -> None:
    for document in training_documents(4, seed=0, step=0) + held_out_documents(4):
        assert (len(document.ids), len(document.answers)) == (LENGTH, LENGTH)
        assert 0 < sum(document.answers) < LENGTH


def test_flags_stand_at_the_answer_of_a_turn_and_at_what_ends_it() -> None:
    turn = encode_turn(Turn("What is the plural of fox?", "foxes", system="@plu"))
    flagged = [token for token, flag in zip(turn.ids, turn.answers, strict=True) if flag]
    assert flagged == [*b"foxes", SPECIALS[END]]
    prompt = encode_prompt("What is the plural of fox?", system="@plu")
    assert list(turn.ids) == [*prompt, *flagged, *b"\n"]


def test_tasks_are_asked_about_other_arguments_in_held_out_text_than_in_training() -> None:
    seen = " ".join(map(spelled, training_documents(200, seed=0, step=0)))
    unseen = " ".join(map(spelled, held_out_documents(200)))
    known, new = set(NOUN.findall(seen)), set(NOUN.findall(unseen))
    assert len(known) > 5
    assert len(new) > 5
    assert not any(map(is_held_out, known))
    assert all(map(is_held_out, new))
