"""One task's samples and the split that keeps held-out arguments out of training.

An argument is the value a prompt is about: the date, the noun, the set of numbers. `|` separates
the parts of an argument that are split one by one (two nouns in one prompt, say). The split is a
hash of the part, so it needs no list and never moves.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from examples.starter.kinds import Kind

HELD_OUT_IN = 10
BATCH = 32
DRILL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, its only right answer, and the argument that decides its side of the split."""

    prompt: str
    answer: str
    argument: str


@dataclass(frozen=True, slots=True)
class Task:
    """What one expert learns, and the facts by which a router finds it."""

    name: str
    description: str
    examples: tuple[str, ...]
    keywords: tuple[str, ...]
    exclude_keywords: tuple[str, ...]
    preset: str
    kind: Kind
    steps: int
    generate: Callable[[random.Random], Sample]
    drill: Callable[[random.Random], Sample] | None = None
    """Coded turns that only training sees, beside what `generate` draws."""

    @property
    def short_name(self) -> str:
        """The name without its namespace: the name of the expert's folder."""
        return self.name.rpartition("/")[2]


class Asking(Protocol):
    """What draws samples under a name: a task, or a composition of two."""

    @property
    def name(self) -> str:
        """The name that keeps its samples apart from others'."""

    @property
    def generate(self) -> Callable[[random.Random], Sample]:
        """The function that draws one sample."""


def held_out(task: Asking, n: int, seed: int) -> list[Sample]:
    """`n` samples whose every argument is kept out of training, no two prompts the same."""
    rng = random.Random(f"held out {task.name} {seed}")
    found: dict[str, Sample] = {}
    while len(found) < n:
        sample = task.generate(rng)
        if all(map(is_held_out, sample.argument.split("|"))):
            found[sample.prompt] = sample
    return list(found.values())


def training(task: Task, n: int, seed: int) -> list[Sample]:
    """`n` samples that share no argument with any held-out sample."""
    rng = random.Random(f"training {task.name} {seed}")
    found: list[Sample] = []
    while len(found) < n:
        sample = _draw_training(task, rng)
        if not any(map(is_held_out, sample.argument.split("|"))):
            found.append(sample)
    return found


def training_set(task: Task, seed: int = 0) -> list[Sample]:
    """Every sample that the training of an expert sees, each of them once."""
    return training(task, task.steps * BATCH, seed)


def _draw_training(task: Task, rng: random.Random) -> Sample:
    if task.drill is not None and rng.random() < DRILL_SHARE:
        return task.drill(rng)
    return task.generate(rng)


@lru_cache(maxsize=65536)
def is_held_out(part: str) -> bool:
    """Whether this part of an argument belongs to the held-out tenth."""
    return int.from_bytes(hashlib.sha256(part.encode()).digest()) % HELD_OUT_IN == 0


def fill(rng: random.Random, templates: tuple[str, ...], **values: str) -> str:
    """One of the templates, chosen at random, with its values put in."""
    return rng.choice(templates).format(**values)
