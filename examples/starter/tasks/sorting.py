"""Numbers of two digits put in order. The argument is the set of the numbers."""

import random

from examples.starter.kinds import Lora
from examples.starter.samples import Sample, Task, fill

_UP = (
    "Sort these numbers: {items}",
    "Sort {items} in ascending order.",
    "Put {items} in ascending order",
    "Sort the numbers {items} from smallest to largest.",
    "Arrange {items} from low to high",
    "Please order {items}, smallest first.",
    "Can you rank these numbers from lowest to highest: {items}?",
)
_DOWN = (
    "Sort {items} in descending order.",
    "Put {items} in descending order",
    "Sort the numbers {items} from largest to smallest.",
    "Arrange {items} from high to low",
    "Please order {items}, largest first.",
    "Can you rank these numbers from highest to lowest: {items}?",
)


def draw_numbers(rng: random.Random) -> list[int]:
    """Three to five different numbers of two digits, in no order."""
    return rng.sample(range(10, 100), rng.randint(3, 5))


def number_set(numbers: list[int]) -> str:
    """The argument for these numbers: the same for every order they may stand in."""
    return " ".join(map(str, sorted(numbers)))


def join_numbers(numbers: list[int]) -> str:
    """Numbers as people list them."""
    return ", ".join(map(str, numbers))


def generate(rng: random.Random) -> Sample:
    """One list of numbers to be sorted."""
    numbers = draw_numbers(rng)
    falling = rng.random() < 0.4
    prompt = fill(rng, _DOWN if falling else _UP, items=join_numbers(numbers))
    answer = join_numbers(sorted(numbers, reverse=falling))
    return Sample(prompt, answer, number_set(numbers))


SORTING = Task(
    name="starter/sorting",
    description="Sorts a list of two-digit numbers in ascending or descending order.",
    examples=(
        "Sort these numbers: 41, 17, 23",
        "Put 41, 17, 23 in ascending order",
        "Sort 12, 90, 34, 56 in descending order.",
        "Sort the numbers 28, 77, 31 from smallest to largest.",
        "Arrange 64, 19, 50, 88 from low to high",
        "Please order 27, 95, 60, largest first.",
        "Can you rank these numbers from highest to lowest: 14, 21, 39, 72?",
    ),
    keywords=("sort", "order", "ascending", "descending", "arrange", "rank", "smallest", "largest"),
    exclude_keywords=("sql", "json"),
    preset="default",
    kind=Lora(rank=8),
    steps=300,
    generate=generate,
)
