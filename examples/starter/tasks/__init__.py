"""The tasks of the starter pack, one module each, and the tuple of them all."""

from examples.starter.samples import Sample, Task, held_out, training, training_set
from examples.starter.tasks.dates import DATES
from examples.starter.tasks.json_fields import JSON_FIELDS
from examples.starter.tasks.plurals import PLURALS
from examples.starter.tasks.sorting import SORTING
from examples.starter.tasks.sql import SQL
from examples.starter.tasks.units import UNITS

TASKS: tuple[Task, ...] = (JSON_FIELDS, SORTING, PLURALS, DATES, SQL, UNITS)

__all__ = ["TASKS", "Sample", "Task", "held_out", "training", "training_set"]
