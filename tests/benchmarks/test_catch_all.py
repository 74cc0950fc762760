"""What `benchmarks.grab_all` draws and counts."""

import json
from pathlib import Path

import pytest

from benchmarks.grab_all import (
    CATCH_ALL,
    COPIED_EXAMPLES,
    EXAMPLES,
    INTENTS,
    PROMPTS,
    IntentDataset,
    IntentSample,
    make_rows,
    measure,
)
from benchmarks.routing_home import DescribedExpert

LABELS = [f"label_{number}" for number in range(12)]


@pytest.fixture
def intents(tmp_path: Path) -> IntentDataset:
    """Thirty texts of each of twelve labels, forty of a test, and some of none."""
    path = tmp_path / "data.json"
    document = {
        "train": [[f"train {label} {n}", label] for n in range(30) for label in LABELS],
        "test": [[f"test {label} {n}", label] for n in range(40) for label in LABELS],
        "oos_test": [[f"outside {n}", "oos"] for n in range(120)],
    }
    path.write_text(json.dumps(document))
    return IntentDataset.read(path)


def label_of(name: str) -> str:
    return name.removeprefix("intents/").replace("-", "_")


def test_a_data_set_is_read_by_its_labels(intents: IntentDataset) -> None:
    assert sorted(intents.texts) == sorted(f"intents/label-{number}" for number in range(12))
    assert intents.texts["intents/label-3"] == [f"train label_3 {n}" for n in range(30)]
    assert intents.tests[13] == ("test label_1 1", "intents/label-1")
    assert (len(intents.tests), intents.outside[7]) == (480, "outside 7")


@pytest.mark.parametrize("number", [0, 1, 7])
def test_prompts_are_of_those_who_are_there_of_others_and_of_nobody(
    intents: IntentDataset, number: int
) -> None:
    draw = IntentSample.sample(intents, 5, number)
    names = [each.name for each in draw.honest]
    assert len(set(names)) == 5
    for each in draw.honest:
        assert len(set(each.examples)) == EXAMPLES
        assert all(text.startswith(f"train {label_of(each.name)} ") for text in each.examples)
    assert [
        len(set(part)) for part in (draw.honest_prompts, draw.other_prompts, draw.out_of_scope)
    ] == [PROMPTS] * 3
    assert {name for _, name in draw.honest_prompts} == set(names)
    assert all(text.startswith(f"test {label_of(name)} ") for text, name in draw.honest_prompts)
    strange = [label for label in LABELS if f"intents/{label.replace('_', '-')}" not in names]
    assert {text.split()[1] for text in draw.other_prompts} == set(strange)
    assert set(draw.out_of_scope) < set(intents.outside)


def test_the_package_about_everything_has_texts_of_all_and_its_own_words_each_time(
    intents: IntentDataset,
) -> None:
    first, second = (IntentSample.sample(intents, 5, number) for number in (0, 1))
    assert (first.catch_all.name, len(set(first.catch_all.examples))) == (
        CATCH_ALL,
        COPIED_EXAMPLES,
    )
    assert {text.split()[1] for text in first.catch_all.examples} == set(LABELS)
    assert first.catch_all.description != second.catch_all.description


def test_draws_are_the_same_each_time_and_others_for_each_number(intents: IntentDataset) -> None:
    assert IntentSample.sample(intents, 5, 3) == IntentSample.sample(intents, 5, 3)
    drawn = {IntentSample.sample(intents, 5, number).honest_prompts for number in range(4)}
    assert len(drawn) == 4


def test_an_expert_that_is_not_asked_for_is_right_nowhere() -> None:
    theirs = (("a", "x/one"), ("b", "x/two"), ("c", "x/one"), ("d", "x/one"))
    grabber = DescribedExpert(CATCH_ALL, "", (), ())
    draw = IntentSample(
        (), grabber, theirs, other_prompts=("e", "f"), out_of_scope=("g", "h", "i", "j", "k")
    )
    chosen = {
        "a": ("x/one",),
        "b": ("x/one",),
        "c": (),
        "d": ("x/one", CATCH_ALL),
        "e": (CATCH_ALL,),
    }
    found = draw.score(lambda prompt: chosen.get(prompt, ("x/two",) if prompt == "k" else ()))
    assert found == (25, 50, 80), "two experts for a prompt of one are not right either"


def test_rows_are_means_of_the_draws_flagged_beside_not_flagged() -> None:
    shares = {
        "without": [(90.0, 80.0, 70.0), (92.0, 82.0, 73.0)],
        "plain": [(50.0, 40.0, 30.0), (60.0, 40.0, 31.0)],
        "flagged": [(88.0, 79.0, 60.0), (91.0, 79.0, 64.0)],
    }
    theirs, others, outside = make_rows(20, shares)
    assert theirs.case == "20 experts, theirs right"
    assert [(row.ours, row.theirs) for row in (theirs, others, outside)] == [
        (89.5, 55.0),
        (79.0, 40.0),
        (62.0, 30.5),
    ]
    assert outside.note == "without it 71.5 %; 2 draws"
    assert {(row.unit, row.better) for row in (theirs, others, outside)} == {("%", "higher")}


def test_without_a_data_set_nothing_is_measured_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(INTENTS, raising=False)
    [row] = measure(1)
    assert (row.ours, row.theirs, row.ok) == (None, None, None)
    assert INTENTS in str(row.note)
