"""The experts of the starter pack."""

from examples.starter.samples import Task
from examples.starter.tasks.dates import DATES
from examples.starter.tasks.json_fields import JSON_FIELDS
from examples.starter.tasks.past import PAST
from examples.starter.tasks.plurals import PLURALS
from examples.starter.tasks.sorting import SORTING
from examples.starter.tasks.sql import SQL
from examples.starter.tasks.styles import CAPITALS, EXCLAIM
from examples.starter.tasks.units import UNITS

EXPERTS: tuple[Task, ...] = (
    JSON_FIELDS,
    SORTING,
    PLURALS,
    DATES,
    SQL,
    UNITS,
    PAST,
    CAPITALS,
    EXCLAIM,
)
