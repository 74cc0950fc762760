"""The coded operations that the base learns: skills without the words in which people ask for them.

Each operation is a three-letter code with a drawing of its material and its result. Two-step
prompts add a style to the result of an operation. No drawing holds an argument that some task
holds out, so the base has not seen the held-out values either.
"""

import json
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from examples.starter.samples import is_held_out
from examples.starter.tasks import dates, json_fields, plurals, sorting, sql, units
from examples.starter.words import AMOUNTS, CITIES, COLUMNS, FILLER, FIRST_NAMES, TABLES


@dataclass(frozen=True, slots=True)
class Drawn:
    """The material of one operation, and what the operation makes of it."""

    material: str
    result: str


Operation = Callable[[random.Random], Drawn]
Style = Callable[[str], str]


def pseudo_word(rng: random.Random) -> str:
    """A word that exists nowhere, so that only its letters can be used."""
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))


def any_word(rng: random.Random) -> str:
    """A real or an invented word."""
    if rng.random() < 0.4:
        return pseudo_word(rng)
    pools = (plurals.TRAINING_NOUNS, FIRST_NAMES, CITIES, COLUMNS, TABLES, AMOUNTS, FILLER)
    return rng.choice(rng.choice(pools))


def any_number(rng: random.Random) -> str:
    """A whole number of one to five digits, each length as likely as the others."""
    return str(rng.randint(0, 10 ** rng.randint(1, 5) - 1))


def _item(rng: random.Random) -> str:
    return any_word(rng) if rng.random() < 0.6 else any_number(rng)


def _items(rng: random.Random) -> list[str]:
    return [_item(rng) for _ in range(rng.randint(1, 5))]


def _listed(edit: Callable[[list[str]], str]) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        items = _items(rng)
        return Drawn(", ".join(items), edit(items))

    return draw


def _numbers(edit: Callable[[list[int]], list[int]]) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        while is_held_out(sorting.number_set(numbers := sorting.draw_numbers(rng))):
            pass
        return Drawn(sorting.join_numbers(numbers), sorting.join_numbers(edit(numbers)))

    return draw


def _words(edit: Callable[[str], str], *, most: int) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        words = [any_word(rng) for _ in range(rng.randint(1, most))]
        return Drawn(" ".join(words), " ".join(map(edit, words)))

    return draw


def _nouns(edit: Callable[[str], str]) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        nouns = [_noun(rng) for _ in range(rng.randint(1, 3))]
        return Drawn(", ".join(nouns), ", ".join(map(edit, nouns)))

    return draw


def _noun(rng: random.Random) -> str:
    """A training noun, or an invented one with an ending that matters to plurals."""
    if rng.random() < 0.5:
        return rng.choice(plurals.TRAINING_NOUNS)
    endings = ("", "", "s", "x", "z", "ch", "sh", "by", "ly", "ty", "ry", "ay", "ey", "h", "e")
    while is_held_out(noun := pseudo_word(rng) + rng.choice(endings)):
        pass
    return noun


def _past(word: str) -> str:
    return word + ("d" if word.endswith("e") else "ed")


def _date(style: str) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        while is_held_out((date := dates.draw_date(rng)).isoformat()):
            pass
        return Drawn(dates.spell_date(rng, date), date.strftime(style))

    return draw


def _fields(edit: Callable[[json_fields.Fields], str]) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        fields = _draw_fields(rng)
        return Drawn(json_fields.spell_fields(rng, fields), edit(fields))

    return draw


def _draw_fields(rng: random.Random) -> json_fields.Fields:
    """Named values, half of them with names and values that no task uses."""
    while is_held_out(", ".join(map(str, (fields := json_fields.draw_fields(rng)).values()))):
        pass
    if rng.random() < 0.5:
        return fields
    return {
        any_word(rng): int(any_number(rng)) if rng.random() < 0.5 else any_word(rng)
        for _ in range(rng.randint(1, 4))
    }


def _pairs(fields: json_fields.Fields) -> str:
    return "&".join(f"{key}={value}" for key, value in fields.items())


def _query(rng: random.Random) -> Drawn:
    """A query whose parts stand in the order of SQL, with filler between them."""
    while is_held_out(str(query := sql.draw_query(rng))):
        pass
    if rng.random() < 0.3:
        names = {name: any_word(rng) for name in ("column", "table", "amount")}
        query = sql.Query(**names, comparison=query.comparison, value=query.value)
    words = sql.spell_comparison(rng, query.comparison)
    gap, end = rng.choice(((" | ", " "), (" of ", " with "), (", ", ", "), (" / ", " / ")))
    material = f"{query.column}{gap}{query.table}{end}{query.amount} {words} {query.value}"
    return Drawn(material, str(query))


def _scaled(factor: int, symbol: str) -> Operation:
    def draw(rng: random.Random) -> Drawn:
        while is_held_out(units.spell_tenths(tenths := units.draw_tenths(rng))):
            pass
        return Drawn(units.spell_tenths(tenths), f"{tenths * factor // 10}{symbol}")

    return draw


def _converted(rng: random.Random) -> Drawn:
    """An amount and the two units, in symbols."""
    while is_held_out(units.spell_tenths(tenths := units.draw_tenths(rng))):
        pass
    given, wanted, factor = rng.choice(units.CONVERSIONS)
    left, right = (given.symbol, wanted.symbol) if rng.random() < 0.6 else (given.name, wanted.name)
    amount = units.spell_tenths(tenths)
    material = rng.choice((f"{amount} {left} > {right}", f"{right} < {amount} {left}"))
    return Drawn(material, f"{tenths * factor // 10} {wanted.symbol}")


OPERATIONS: Mapping[str, tuple[int, Operation]] = {
    "cpy": (2, _listed(", ".join)),
    "rev": (2, _listed(lambda items: ", ".join(reversed(items)))),
    "fst": (1, _listed(lambda items: items[0])),
    "lst": (1, _listed(lambda items: items[-1])),
    "cnt": (1, _listed(lambda items: str(len(items)))),
    "abc": (1, _listed(lambda items: ", ".join(sorted(items)))),
    "arr": (1, _listed(json.dumps)),
    "bul": (1, _listed(lambda items: "- " + "\n- ".join(items))),
    "and": (1, _listed(" and ".join)),
    "asc": (14, _numbers(sorted)),
    "dsc": (14, _numbers(lambda numbers: sorted(numbers, reverse=True))),
    "max": (2, _numbers(lambda numbers: [max(numbers)])),
    "min": (2, _numbers(lambda numbers: [min(numbers)])),
    "spl": (1, _words("-".join, most=2)),
    "ini": (1, _words(lambda word: word[0], most=5)),
    "plu": (6, _nouns(plurals.pluralise)),
    "pst": (2, _nouns(_past)),
    "iso": (4, _date("%Y-%m-%d")),
    "slh": (2, _date("%d/%m/%Y")),
    "yer": (1, _date("%Y")),
    "jsn": (5, _fields(json.dumps)),
    "qst": (1, _fields(_pairs)),
    "key": (1, _fields(lambda fields: ", ".join(fields))),
    "val": (1, _fields(lambda fields: ", ".join(map(str, fields.values())))),
    "sel": (5, _query),
    "x10": (1, _scaled(10, "")),
    "x1h": (1, _scaled(100, "")),
    "x1k": (1, _scaled(1000, "")),
    "cnv": (4, _converted),
}
STYLES: Mapping[str, Style] = {
    "upp": str.upper,
    "low": str.lower,
    "cap": str.title,
    "quo": lambda text: f'"{text}"',
    "par": lambda text: f"({text})",
    "brk": lambda text: f"[{text}]",
    "exc": lambda text: f"{text}!",
    "ans": lambda text: f"Answer: {text}",
    "thx": lambda text: f"{text} - thank you",
    "str": lambda text: f"**{text}**",
}
