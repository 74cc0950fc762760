"""Styles: how an answer is dressed, whatever it is an answer to. The argument is the nouns in it.

A style alone repeats a text in its dress. It is trained on the base alone: on sentences, and on the
base's own coded operations, so that it learns to dress an answer that something else decides.
Some of the routing examples are openings of questions: near to prompts that want an expert and the
style, and not near enough to prompts that want the expert alone.
"""

import random
import re
from dataclasses import dataclass

from examples.starter.kinds import Ia3, SoftPrompt
from examples.starter.mixture import draw_typed
from examples.starter.operations import STYLES
from examples.starter.samples import Sample, Task, fill
from examples.starter.tasks.plurals import HELD_OUT_NOUNS, TRAINING_NOUNS
from examples.starter.words import COLOURS, FIRST_NAMES, NOUNS

WISH_SHARE = 0.6
_NOUNS = frozenset(NOUNS)
_WORD = re.compile("[a-z]+")
_SENTENCES = (
    "my {one} is near your {other}",
    "{name} found this {colour} {one}",
    "we saw one {one} behind that {other}",
    "the {colour} {one} fell on our {other}",
    "your {one} looks like her {other}",
    "no {one} fits into this {other}",
    "{name} keeps every {one} in that {other}",
)


@dataclass(frozen=True, slots=True)
class Style:
    """A style of the base, how people ask for it of a text, and of an answer."""

    code: str
    of_text: tuple[str, ...]
    of_answer: tuple[str, ...]

    def generate(self, rng: random.Random) -> Sample:
        """A sentence to be repeated in this style."""
        text, nouns = draw_sentence(rng)
        return Sample(fill(rng, self.of_text, text=text), STYLES[self.code](text), "|".join(nouns))

    def drill(self, rng: random.Random) -> Sample:
        """A coded operation whose result is wanted in this style."""
        turn = draw_typed(rng)
        wished = rng.random() < WISH_SHARE
        sample = Sample(turn.prompt, turn.answer, "|".join(nouns_in(turn.prompt)))
        return self.wish(rng, sample) if wished else self.dress(sample)

    def wish(self, rng: random.Random, sample: Sample) -> Sample:
        """The same question, with the wish for an answer in this style."""
        dressed = self.dress(sample)
        prompt = fill(rng, self.of_answer, prompt=sample.prompt)
        return Sample(prompt, dressed.answer, sample.argument)

    def dress(self, sample: Sample) -> Sample:
        """The same question, answered in this style without being asked for it."""
        return Sample(sample.prompt, STYLES[self.code](sample.answer), sample.argument)


def draw_sentence(rng: random.Random) -> tuple[str, list[str]]:
    """A small sentence and the nouns that it is made of, all of one side of the split."""
    pool = HELD_OUT_NOUNS if rng.random() < 0.3 else TRAINING_NOUNS
    one, other = rng.sample(pool, 2)
    values = {"colour": rng.choice(COLOURS), "name": rng.choice(FIRST_NAMES)}
    text = fill(rng, _SENTENCES, one=one, other=other, **values)
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return text, nouns_in(text)


def nouns_in(text: str) -> list[str]:
    """The nouns of the word list that stand in a text, in order."""
    return [word for word in _WORD.findall(text.lower()) if word in _NOUNS]


EXCLAMATION = Style(
    code="exc",
    of_text=(
        "Put an exclamation mark after this sentence: {text}",
        "Add an exclamation mark to this sentence: {text}",
        "End this sentence with an exclamation mark: {text}",
        "Say this sentence with an exclamation mark: {text}",
        "Turn this sentence into an exclamation: {text}",
    ),
    of_answer=(
        "Answer with an exclamation mark. {prompt}",
        "Answer with an exclamation: {prompt}",
        "Add an exclamation mark to the answer. {prompt}",
        "Put an exclamation mark after the answer. {prompt}",
    ),
)
CAPITAL_LETTERS = Style(
    code="upp",
    of_text=(
        "Write this sentence in capitals: {text}",
        "Write this sentence in capital letters: {text}",
        "Put this sentence in capital letters: {text}",
        "Turn this sentence into capital letters: {text}",
        "Write this sentence in upper case letters: {text}",
    ),
    of_answer=(
        "In capital letters: {prompt}",
        "Answer in capital letters. {prompt}",
        "Use upper case letters. {prompt}",
        "Write the answer in upper case letters. {prompt}",
    ),
)
EXCLAIM = Task(
    name="starter/exclaim",
    description="Says a text, or the answer to a question, with an exclamation mark.",
    examples=(
        "Put an exclamation mark after this sentence: the red kite fell on our house",
        "Add an exclamation mark to this sentence: Nora found this green lamp",
        "End this sentence with an exclamation mark: your horse looks like her donkey",
        "Say this sentence with an exclamation mark: no parcel fits into this pouch",
        "Turn this sentence into an exclamation: we saw one fox behind that barn",
        "Put an exclamation mark after the answer. What is the plural of",
        "Answer with an exclamation: Write the noun…",
        "Add an exclamation mark to the answer. Make a JSON",
        "Answer with an exclamation mark. I need author =…",
        "Answer with an exclamation mark. Write an SQL query…",
        "Answer with an exclamation: Query the city of all games",
        "Put an exclamation mark after the answer. Select region from the table shops",
        "Answer with an exclamation mark. Query the date of all orders",
        "Add an exclamation mark to the answer. Query the title of all",
        "Answer with an exclamation: Turn these fields",
    ),
    keywords=("exclamation", "exclamation mark"),
    exclude_keywords=(),
    preset="default",
    kind=SoftPrompt(start="@exc"),
    steps=400,
    generate=EXCLAMATION.generate,
    drill=EXCLAMATION.drill,
)
CAPITALS = Task(
    name="starter/capitals",
    description="Writes a text, or the answer to a question, in capital letters.",
    examples=(
        "Write this sentence in capitals: the red kite fell on our house",
        "Write this sentence in capital letters: Nora found this green lamp",
        "Put this sentence in capital letters: your horse looks like her donkey",
        "Turn this sentence into capital letters: no parcel fits into this pouch",
        "Write this sentence in upper case letters: we saw one fox behind that barn",
        "Write the answer in upper case letters. What is 164.3",
        "Answer in capital letters. Convert 313.7",
        "In capital letters: What is 59.4…",
        "Use upper case letters. Convert 703.9",
        "Write the answer in upper case letters. Express 7040",
    ),
    keywords=("capitals", "capital letters", "upper case"),
    exclude_keywords=(),
    preset="default",
    kind=Ia3(),
    steps=400,
    generate=CAPITAL_LETTERS.generate,
    drill=CAPITAL_LETTERS.drill,
)
