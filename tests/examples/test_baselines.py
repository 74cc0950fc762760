"""What the starter experts are compared with is computed as it is told."""

import random

import pytest

from examples.starter.baselines import argument_parts, nearest_copies, share_right
from examples.starter.experts import EXPERTS
from examples.starter.samples import Sample, Task, held_out, training_set


def test_only_an_exact_answer_is_right() -> None:
    assert share_right(["a", "b ", "C", ""], ["a", "b", "c", "d"]) == 0.25
    assert share_right(["1, 2"], ["1, 2"]) == 1.0


def test_every_part_of_an_argument_counts() -> None:
    samples = [Sample("p", "a", "wolf|fox"), Sample("q", "b", "fox")]
    assert argument_parts(samples) == {"wolf", "fox"}


def test_the_answer_of_the_most_similar_prompt_is_copied() -> None:
    seen = [
        Sample("Sort these numbers: 4, 1", "1, 4", "1,4"),
        Sample("What is the plural of fox?", "foxes", "fox"),
        Sample("What is the plural of box and of many other nouns?", "boxes", "box"),
    ]
    asked = [Sample("What is the plural of ox?", "oxen", "ox"), Sample("Sort these: 4", "4", "4")]
    assert nearest_copies(asked, seen) == ["foxes", "1, 4"]


@pytest.mark.parametrize("task", EXPERTS, ids=lambda task: task.name)
def test_no_held_out_argument_is_trained_on(task: Task) -> None:
    asked = held_out(task, 50, seed=1)
    assert len({sample.prompt for sample in asked}) == 50
    assert argument_parts(asked).isdisjoint(argument_parts(training_set(task)))


@pytest.mark.parametrize("task", EXPERTS, ids=lambda task: task.name)
def test_samples_follow_from_their_seed(task: Task) -> None:
    first, second = (task.generate(random.Random(7)) for _ in range(2))
    assert first == second
    assert held_out(task, 5, seed=1) != held_out(task, 5, seed=2)
