"""The past tense of regular English verbs. The argument is the verbs, each on its own side."""

import random

from examples.starter.kinds import Dora
from examples.starter.samples import Sample, Task, fill, is_held_out
from examples.starter.words import VERBS

HELD_OUT_VERBS = tuple(filter(is_held_out, VERBS))
TRAINING_VERBS = tuple(verb for verb in VERBS if verb not in HELD_OUT_VERBS)

_ONE = (
    "What is the past tense of {items}?",
    "Give the past tense of {items}",
    "Past tense of {items}",
    "How do you say {items} in the past tense?",
    "Put the verb {items} into the past tense.",
)
_MANY = (
    "What is the past tense of {items}?",
    "Give the past tense of {items}",
    "Past tense of {items}",
    "Put these verbs into the past tense: {items}",
    "Put the verbs {items} into the past tense.",
)


def past_tense(verb: str) -> str:
    """The past tense of a verb that takes -d after an e and -ed after anything else."""
    return verb + ("d" if verb.endswith("e") else "ed")


def generate(rng: random.Random) -> Sample:
    """One to three verbs of the same side of the split, to be put into the past tense."""
    pool = HELD_OUT_VERBS if rng.random() < 0.3 else TRAINING_VERBS
    verbs = rng.sample(pool, rng.choice((1, 1, 2, 2, 3)))
    prompt = fill(rng, _ONE if len(verbs) == 1 else _MANY, items=", ".join(verbs))
    return Sample(prompt, ", ".join(map(past_tense, verbs)), "|".join(verbs))


PAST = Task(
    name="starter/past",
    description="Gives the past tense of regular English verbs.",
    examples=(
        "What is the past tense of walk?",
        "Give the past tense of jump",
        "How do you say visit in the past tense?",
        "Put the verb bake into the past tense.",
        "What is the past tense of paint, cook?",
        "Put these verbs into the past tense: laugh, arrive, play",
        "Past tense of climb, dance",
    ),
    keywords=("past tense", "verb", "verbs"),
    exclude_keywords=("sql", "json", "convert", "plural", "plurals"),
    preset="default",
    kind=Dora(rank=8),
    steps=80,
    generate=generate,
)
