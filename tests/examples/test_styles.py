"""Styles dress an answer, and keep to their side of the split."""

import random

import pytest

from examples.starter.baselines import argument_parts
from examples.starter.compositions import COMPOSITIONS, Composition
from examples.starter.pack import manifest
from examples.starter.samples import Sample, held_out, training_set
from examples.starter.tasks.plurals import HELD_OUT_NOUNS
from examples.starter.tasks.styles import CAPITAL_LETTERS, EXCLAMATION, Style, nouns_in

STYLES = [CAPITAL_LETTERS, EXCLAMATION]


@pytest.mark.parametrize(
    ("style", "dressed"), [(CAPITAL_LETTERS, "1500 MM"), (EXCLAMATION, "1500 mm!")]
)
def test_a_style_changes_the_prompt_and_the_answer(style: Style, dressed: str) -> None:
    asked = Sample("What is 150 cm in mm?", "1500 mm", "150")
    wished = style.wish(random.Random(0), asked)
    assert wished.answer == dressed
    assert wished.argument == "150"
    assert asked.prompt in wished.prompt != asked.prompt


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.code)
def test_a_sentence_is_repeated_in_its_dress(style: Style) -> None:
    sample = style.generate(random.Random(3))
    text = sample.prompt.partition(": ")[2]
    assert sample.answer == style.dress(Sample("", text, "")).answer
    assert sample.argument == "|".join(nouns_in(text))


def test_nouns_are_whole_words_of_the_list() -> None:
    assert nouns_in("31st of March: Seat, earring, a bee") == ["seat", "bee"]


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda each: each.name)
def test_no_held_out_argument_of_a_composition_is_trained_on(composition: Composition) -> None:
    asked = argument_parts(held_out(composition, 100, seed=2026))
    assert asked.isdisjoint(argument_parts(training_set(composition.task)))


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda each: each.name)
def test_styles_are_trained_without_held_out_nouns(composition: Composition) -> None:
    for sample in training_set(composition.dress):
        assert not set(nouns_in(sample.prompt)) & set(HELD_OUT_NOUNS)


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda each: each.name)
def test_both_manifests_declare_a_composition_and_the_style_comes_last(
    composition: Composition,
) -> None:
    task, style = (manifest(each)["composition"] for each in composition.plan)
    assert style["role"] in task["composes_with"]  # type: ignore[index]  # a JSON object
    assert task["role"] in style["composes_with"]  # type: ignore[index]  # a JSON object
    assert task["load_order"] < style["load_order"]  # type: ignore[index]  # a JSON object
