"""Metric lengths, weights and volumes in the next smaller unit. The argument is the amount."""

import random
from dataclasses import dataclass

from examples.starter.kinds import Lora
from examples.starter.samples import Sample, Task, fill


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measure: its name, its symbol."""

    name: str
    symbol: str


CONVERSIONS = (
    (Unit("kilometres", "km"), Unit("metres", "m"), 1000),
    (Unit("metres", "m"), Unit("centimetres", "cm"), 100),
    (Unit("centimetres", "cm"), Unit("millimetres", "mm"), 10),
    (Unit("kilograms", "kg"), Unit("grams", "g"), 1000),
    (Unit("litres", "l"), Unit("millilitres", "ml"), 1000),
)
_TEMPLATES = (
    "Convert {amount} {given} to {wanted}",
    "How many {wanted} are in {amount} {given}?",
    "How many {wanted} is {amount} {given}?",
    "Express {amount} {given} in {wanted}.",
    "What is {amount} {given} in {wanted}?",
)


def draw_tenths(rng: random.Random) -> int:
    """An amount in tenths: half of the amounts are whole."""
    if rng.random() < 0.5:
        return 10 * rng.randint(1, 9999)
    return rng.randint(1, 9999)


def spell_tenths(tenths: int) -> str:
    """The amount in decimal notation, without a trailing zero."""
    whole, rest = divmod(tenths, 10)
    return f"{whole}.{rest}" if rest else str(whole)


def generate(rng: random.Random) -> Sample:
    """One amount to be converted."""
    tenths = draw_tenths(rng)
    given, wanted, factor = rng.choice(CONVERSIONS)
    names = rng.random() < 0.5
    prompt = fill(
        rng,
        _TEMPLATES,
        amount=spell_tenths(tenths),
        given=given.name if names else given.symbol,
        wanted=wanted.name if names else wanted.symbol,
    )
    answer = f"{tenths * factor // 10} {wanted.symbol}"
    return Sample(prompt, answer, spell_tenths(tenths))


UNITS = Task(
    name="starter/units",
    description="Converts metric lengths, weights and volumes to a smaller unit.",
    examples=(
        "Convert 12 kilometres to metres",
        "How many grams are in 3.5 kg?",
        "How many centimetres is 48 metres?",
        "Express 7.4 litres in millilitres.",
        "What is 150 cm in mm?",
        "Convert 2.5 km to m",
    ),
    keywords=("convert", "metres", "grams", "litres", "km", "kg", "cm", "mm", "ml", "express"),
    exclude_keywords=("sql", "json", "plural"),
    preset="default",
    kind=Lora(rank=8),
    steps=120,
    generate=generate,
)
