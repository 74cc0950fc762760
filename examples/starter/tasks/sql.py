"""Questions about one table, written in a small subset of SQL. The argument is the whole query."""

import random
from dataclasses import dataclass

from examples.starter.kinds import Lora
from examples.starter.samples import Sample, Task, fill
from examples.starter.words import AMOUNTS, COLUMNS, TABLES

_COMPARISONS = {
    ">": ("over", "above", "greater than"),
    "<": ("under", "below", "less than"),
    "=": ("equal to", "exactly"),
}
_TEMPLATES = (
    "Write an SQL query for the {column} of {table} with {amount} {words} {value}",
    "SQL: select the {column} from {table} where {amount} is {words} {value}",
    "Query the {column} of all {table} whose {amount} is {words} {value}.",
    "What SQL query lists the {column} of {table} where the {amount} is {words} {value}?",
    "Select {column} from the table {table} with {amount} {words} {value}",
)


@dataclass(frozen=True, slots=True)
class Query:
    """One column of one table under one condition."""

    column: str
    table: str
    amount: str
    comparison: str
    value: int

    def __str__(self) -> str:
        """The query as SQL."""
        condition = f"{self.amount} {self.comparison} {self.value}"
        return f"SELECT {self.column} FROM {self.table} WHERE {condition};"  # noqa: S608  # never run


def draw_query(rng: random.Random) -> Query:
    """Any query that the word lists allow."""
    return Query(
        column=rng.choice(COLUMNS),
        table=rng.choice(TABLES),
        amount=rng.choice(AMOUNTS),
        comparison=rng.choice(tuple(_COMPARISONS)),
        value=rng.randint(1, 9999),
    )


def spell_comparison(rng: random.Random, comparison: str) -> str:
    """The comparison in English words."""
    return rng.choice(_COMPARISONS[comparison])


def generate(rng: random.Random) -> Sample:
    """One question to be answered by a query."""
    query = draw_query(rng)
    prompt = fill(
        rng,
        _TEMPLATES,
        column=query.column,
        table=query.table,
        amount=query.amount,
        words=spell_comparison(rng, query.comparison),
        value=str(query.value),
    )
    return Sample(prompt, str(query), str(query))


SQL = Task(
    name="starter/sql",
    description="Writes an SQL SELECT query for a question about one table.",
    examples=(
        "Write an SQL query for the name of users with age over 30",
        "SQL: select the title from books where price is under 25",
        "Query the email of all customers whose balance is greater than 900.",
        "What SQL query lists the city of hotels where the rating is exactly 4?",
        "Select phone from the table suppliers with distance below 120",
        "SQL: select the status from orders where total is above 5000",
    ),
    keywords=("sql", "query", "select", "table", "where"),
    exclude_keywords=("json", "plural"),
    preset="default",
    kind=Lora(rank=8),
    steps=100,
    generate=generate,
)
