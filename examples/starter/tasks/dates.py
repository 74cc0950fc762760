"""Dates in words rewritten in the ISO 8601 form. The argument is the date."""

import datetime
import random

from examples.starter.kinds import Lora
from examples.starter.samples import Sample, Task, fill

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_FIRST = datetime.date(1900, 1, 1).toordinal()
_LAST = datetime.date(2099, 12, 31).toordinal()
_SPELLINGS = ("{day} {month} {year}", "{month} {day}, {year}", "{day}{suffix} of {month} {year}")
_TEMPLATES = (
    "Write {date} as an ISO date",
    "What is {date} in ISO format?",
    "Give the date {date} in ISO 8601 form.",
    "ISO date for {date}",
    "Change the date {date} to year-month-day.",
    "Rewrite this date as YYYY-MM-DD: {date}",
)


def draw_date(rng: random.Random) -> datetime.date:
    """Any day of two centuries."""
    return datetime.date.fromordinal(rng.randint(_FIRST, _LAST))


def spell_date(rng: random.Random, date: datetime.date) -> str:
    """The date as one of the ways in which people write it in English."""
    month = MONTHS[date.month - 1]
    values = {"day": str(date.day), "suffix": _suffix(date.day), "year": str(date.year)}
    return fill(rng, _SPELLINGS, month=month, **values)


def generate(rng: random.Random) -> Sample:
    """One date to be rewritten."""
    date = draw_date(rng)
    prompt = fill(rng, _TEMPLATES, date=spell_date(rng, date))
    return Sample(prompt, date.isoformat(), date.isoformat())


def _suffix(day: int) -> str:
    if day in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


DATES = Task(
    name="starter/dates",
    description="Rewrites an English date as an ISO 8601 date.",
    examples=(
        "Write 7 March 2024 as an ISO date",
        "What is December 25, 1998 in ISO format?",
        "Give the date 1st of May 2011 in ISO 8601 form.",
        "ISO date for 30 September 1948",
        "Change the date August 3, 2062 to year-month-day.",
        "Rewrite this date as YYYY-MM-DD: 22nd of June 1985",
    ),
    keywords=("date", "iso", "8601", "year-month-day", "yyyy-mm-dd", "month"),
    exclude_keywords=("sql", "json"),
    preset="default",
    kind=Lora(rank=8),
    steps=400,
    generate=generate,
)
