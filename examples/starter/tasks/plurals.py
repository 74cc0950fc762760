"""Regular English plurals. The argument is the nouns, each on its own side of the split."""

import random

from examples.starter.kinds import Lora
from examples.starter.samples import Sample, Task, fill, is_held_out
from examples.starter.words import NOUNS

HELD_OUT_NOUNS = tuple(filter(is_held_out, NOUNS))
TRAINING_NOUNS = tuple(noun for noun in NOUNS if noun not in HELD_OUT_NOUNS)

_ONE = (
    "What is the plural of {items}?",
    "Give the plural of {items}",
    "Plural of {items}",
    "How do you say {items} in the plural?",
    "Write the noun {items} in its plural form.",
)
_MANY = (
    "What are the plurals of {items}?",
    "Give the plurals of {items}",
    "Plurals of {items}",
    "Make these nouns plural: {items}",
    "Write the nouns {items} in their plural form.",
)


def pluralise(noun: str) -> str:
    """The regular plural of an English noun."""
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def generate(rng: random.Random) -> Sample:
    """One to three nouns of the same side of the split, to be made plural."""
    pool = HELD_OUT_NOUNS if rng.random() < 0.3 else TRAINING_NOUNS
    nouns = rng.sample(pool, rng.choice((1, 1, 2, 2, 3)))
    prompt = fill(rng, _ONE if len(nouns) == 1 else _MANY, items=", ".join(nouns))
    return Sample(prompt, ", ".join(map(pluralise, nouns)), "|".join(nouns))


PLURALS = Task(
    name="starter/plurals",
    description="Gives the regular plural of English nouns.",
    examples=(
        "What is the plural of city?",
        "Give the plural of dish",
        "How do you say kettle in the plural?",
        "Write the noun class in its plural form.",
        "What are the plurals of lamp, fox?",
        "Make these nouns plural: berry, glove, church",
        "Plurals of bridge, witch",
    ),
    keywords=("plural", "plurals", "noun", "nouns"),
    exclude_keywords=("sql", "json", "convert"),
    preset="default",
    kind=Lora(rank=8),
    steps=150,
    generate=generate,
)
