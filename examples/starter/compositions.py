"""Plans of two experts that together do what neither does alone.

The two are trained apart. Which pairs compose was measured (`score`, `evaluate`), and the manifests
declare these pairs and no others.
"""

import random
from dataclasses import dataclass

from examples.starter.samples import Sample, Task
from examples.starter.tasks.json_fields import JSON_FIELDS
from examples.starter.tasks.plurals import PLURALS
from examples.starter.tasks.sql import SQL
from examples.starter.tasks.styles import CAPITAL_LETTERS, CAPITALS, EXCLAIM, EXCLAMATION, Style
from examples.starter.tasks.units import UNITS


@dataclass(frozen=True, slots=True)
class Composition:
    """A task and a style in one plan."""

    task: Task
    dress: Task
    style: Style

    @property
    def plan(self) -> tuple[Task, Task]:
        """The experts, in order."""
        return self.task, self.dress

    @property
    def name(self) -> str:
        """Both names."""
        return " + ".join(task.name for task in self.plan)

    def generate(self, rng: random.Random) -> Sample:
        """A question of the task with the wish for an answer in the style."""
        return self.style.wish(rng, self.task.generate(rng))


COMPOSITIONS = (
    Composition(UNITS, CAPITALS, CAPITAL_LETTERS),
    Composition(PLURALS, EXCLAIM, EXCLAMATION),
    Composition(JSON_FIELDS, EXCLAIM, EXCLAMATION),
    Composition(SQL, EXCLAIM, EXCLAMATION),
)
