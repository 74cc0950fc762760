"""Named fields written as a JSON object. The argument is the values.

Nouns come from the training side only: no expert sees a noun held out from the plurals.
"""

import json
import random
from typing import TypeAlias

from examples.starter.kinds import Lora
from examples.starter.samples import Sample, Task
from examples.starter.tasks.plurals import TRAINING_NOUNS
from examples.starter.words import CITIES, COLOURS, FIRST_NAMES

Fields: TypeAlias = dict[str, str | int]

_WORDS = {
    "name": FIRST_NAMES,
    "owner": FIRST_NAMES,
    "author": FIRST_NAMES,
    "city": CITIES,
    "colour": COLOURS,
    "item": TRAINING_NOUNS,
    "title": TRAINING_NOUNS,
    "pet": TRAINING_NOUNS,
}
_AMOUNTS = ("age", "price", "year", "count", "size", "score", "id", "weight")
_TEMPLATES = (
    "Write as JSON: {fields}",
    "Turn these fields into JSON: {fields}",
    "Make a JSON object with {fields}",
    "Give me JSON for {fields}",
    "Format this record as a JSON object: {fields}",
    "I need {fields} as JSON.",
)
_STYLES = (("{key} {value}", ", "), ("{key}: {value}", "; "), ("{key} = {value}", ", "))


def draw_fields(rng: random.Random) -> Fields:
    """Two to four named values, words and whole numbers mixed."""
    keys = rng.sample((*_WORDS, *_AMOUNTS), rng.randint(2, 4))
    return {key: rng.choice(_WORDS[key]) if key in _WORDS else rng.randint(1, 9999) for key in keys}


def spell_fields(rng: random.Random, fields: Fields) -> str:
    """The fields in one of the ways in which people note them down."""
    pair, separator = rng.choice(_STYLES)
    return separator.join(pair.format(key=key, value=value) for key, value in fields.items())


def generate(rng: random.Random) -> Sample:
    """One record to be written as JSON."""
    fields = draw_fields(rng)
    prompt = rng.choice(_TEMPLATES).format(fields=spell_fields(rng, fields))
    return Sample(prompt, json.dumps(fields), ", ".join(map(str, fields.values())))


JSON_FIELDS = Task(
    name="starter/json",
    description="Writes named fields as a JSON object.",
    examples=(
        "Write as JSON: name Ada, age 36, city Oslo",
        "Turn these fields into JSON: item: lamp; price: 240",
        "Make a JSON object with owner = Felix, pet = parrot, year = 2019",
        "Give me JSON for title island, author Nora, count 12",
        "Format this record as a JSON object: id: 77; colour: green; size: 5",
        "I need city Lima, score 910 as JSON.",
    ),
    keywords=("json", "object", "fields", "record"),
    exclude_keywords=("sql", "plural"),
    preset="json_parsing",
    kind=Lora(rank=8, rslora=True),
    steps=100,
    generate=generate,
)
