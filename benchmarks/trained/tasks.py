"""Three tasks that a small base learns in minutes: order to JSON, question to SQL, ten intents.

Prompts are generated from phrases and values. The values (JSON), tables (SQL) and phrases (intents)
of test prompts never occur in training, so an expert is only right if it learned the task. Each
prompt has one right answer, and an answer is right if it equals that one.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task by name; ``draw`` makes one sample, of the test if its second argument is true."""

    name: str
    draw: Callable[[random.Random, bool], Sample]
    max_tokens: int
    """Maximum length of an answer."""

    def make_training_samples(self, count: int, *, seed: int = 0) -> list[Sample]:
        """Return different samples for training."""
        return list(itertools.islice(self._iterate_samples(seed, test=False), count))

    def make_test_samples(self, count: int, *, seed: int = 1) -> list[Sample]:
        """Return different samples that are not drawn for training."""
        return list(itertools.islice(self._iterate_samples(seed, test=True), count))

    def _iterate_samples(self, seed: int, *, test: bool) -> Iterator[Sample]:
        rng, seen = random.Random(f"{self.name} {seed} {test}"), set[str]()
        while True:
            sample = self.draw(rng, test)
            if sample.prompt not in seen:
                seen.add(sample.prompt)
                yield sample


def count_exact(samples: Sequence[Sample], answers: Sequence[str]) -> int:
    """Return how many answers equal the right one, apart from surrounding white space."""
    pairs = zip(samples, answers, strict=True)
    return sum(sample.answer == answer.strip() for sample, answer in pairs)


def _divide(values: Sequence[Value], test: bool) -> Sequence[Value]:
    """Return every fourth value for tests, the others for training."""
    return values[3::4] if test else [value for i, value in enumerate(values) if i % 4 != 3]


FIRST_NAMES = (
    *("Anna", "Ben", "Carla", "David", "Elena", "Frank", "Grace", "Henry", "Ivan", "Julia"),
    *("Karl", "Laura", "Maria", "Nina", "Oscar", "Paula", "Robert", "Sofia", "Thomas", "Vera"),
)
LAST_NAMES = (
    *("Adams", "Brown", "Clark", "Diaz", "Evans", "Fischer", "Garcia", "Hill", "Jones", "Keller"),
    *("Lopez", "Miller", "Nelson", "Owens", "Parker", "Reed", "Smith", "Turner", "Walker", "Young"),
)
CITIES = (
    *("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Dublin", "Oslo"),
    *("Boston", "Chicago", "Denver", "Seattle", "Tokyo", "Delhi", "Cairo", "Lima", "Sydney"),
)
ITEMS = (
    *("lamp", "chair", "table", "book", "mirror", "carpet", "clock", "bottle", "kettle", "pillow"),
    *("camera", "jacket", "basket", "candle", "guitar", "bicycle", "blanket", "keyboard"),
)
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")
NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ORDERS = (
    "{name} from {city} orders {number} {item}.",
    "Please send {number} {item} to {name} in {city}.",
    "{number} {item} for {name}, to be delivered to {city}.",
    "My name is {name}, I live in {city} and I would like {number} {item}.",
    "We sold {number} {item} to {name}, a customer in {city}.",
    "The customer in {city} is called {name} and wants {number} {item}.",
    "Ship {number} {item} to {city}. The order is in the name of {name}.",
    "{name} asks for {number} {item}; the address is in {city}.",
)


def _draw_order(rng: random.Random, test: bool) -> Sample:
    name = f"{rng.choice(FIRST_NAMES)} {rng.choice(_divide(LAST_NAMES, test))}"
    city, number = rng.choice(_divide(CITIES, test)), rng.randint(2, 60)
    item = f"{rng.choice(COLOURS)} {rng.choice(_divide(ITEMS, test))}s"
    in_words = number <= 10 and rng.random() < 0.5
    said = NUMBER_WORDS[number - 2] if in_words else str(number)
    order = rng.choice(ORDERS).format(name=name, city=city, number=said, item=item)
    order = order[0].upper() + order[1:]
    fields = {"name": name, "city": city, "item": item, "quantity": number}
    return Sample(f"Order as JSON: {order}", json.dumps(fields))


TABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("users", ("name", "city", "email"), ("age", "score")),
    ("orders", ("customer", "status"), ("price", "quantity")),
    ("books", ("title", "author", "genre"), ("pages", "year")),
    ("films", ("title", "director"), ("length", "year")),
    ("cars", ("brand", "model", "colour"), ("price", "speed")),
    ("teams", ("name", "country"), ("wins", "points")),
    ("students", ("name", "school"), ("grade", "age")),
    ("players", ("name", "team", "position"), ("goals", "height")),
    ("employees", ("name", "department", "city"), ("salary", "age")),
    ("products", ("name", "category"), ("price", "weight")),
    ("flights", ("origin", "destination"), ("distance", "duration")),
    ("hotels", ("name", "city"), ("stars", "rooms")),
)
"""Name, text columns and number columns of a table."""
WORDS = ("Berlin", "Smith", "red", "open", "north", "Anna", "gold", "main", "spring", "Delta")
COMPARISONS = (("above", ">"), ("below", "<"), ("at least", ">="), ("at most", "<="))
AGGREGATES = (("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM"))


def _draw_query(rng: random.Random, test: bool) -> Sample:
    table, texts, numbers = rng.choice(_divide(TABLES, test))
    text, number = rng.choice(texts), rng.choice(numbers)
    asked, query = rng.choice(QUESTIONS)(rng, text, number)
    condition, where = _draw_condition(rng, texts, numbers)
    question = f"{asked} of {table}{condition}?"
    columns = ", ".join((*texts, *numbers))
    answer = f"SELECT {query.format(rest=f'FROM {table}{where}')};"
    return Sample(f"SQL for table {table}({columns}): {question}", answer)


def _draw_condition(
    rng: random.Random, texts: Sequence[str], numbers: Sequence[str]
) -> tuple[str, str]:
    kind = rng.randrange(3)
    if kind == 0:
        return "", ""
    if kind == 1:
        column, word = rng.choice(texts), rng.choice(WORDS)
        return f" with {column} {word}", f" WHERE {column} = '{word}'"
    column, number = rng.choice(numbers), rng.randint(2, 99)
    said, sign = rng.choice(COMPARISONS)
    return f" with {column} {said} {number}", f" WHERE {column} {sign} {number}"


def _ask_column(rng: random.Random, text: str, number: str) -> tuple[str, str]:
    return f"What is the {text}", f"{text} {{rest}}"


def _ask_count(rng: random.Random, text: str, number: str) -> tuple[str, str]:
    return "What is the number", "COUNT(*) {rest}"


def _ask_aggregate(rng: random.Random, text: str, number: str) -> tuple[str, str]:
    said, function = rng.choice(AGGREGATES)
    return f"What is the {said} {number}", f"{function}({number}) {{rest}}"


def _ask_top(rng: random.Random, text: str, number: str) -> tuple[str, str]:
    count = rng.randint(2, 20)
    asked = f"What are the top {count} by {number}"
    return asked, f"* {{rest}} ORDER BY {number} DESC LIMIT {count}"


QUESTIONS = (_ask_column, _ask_count, _ask_aggregate, _ask_top)

PLACES = ("Paris", "London", "Berlin", "Rome", "Boston", "Tokyo", "Cairo", "Lima")
TIMES = (
    "tomorrow",
    "on Monday",
    "tonight",
    "next week",
    "on Friday",
    "at noon",
    "this evening",
    "today",
    "on Sunday",
)
PEOPLE = ("Anna", "my mother", "Tom", "my boss", "the doctor", "Sarah", "my brother")
SLOTS = {"place": PLACES, "time": TIMES, "person": PEOPLE}
INTENTS = {
    "weather": (
        "Will it rain in {place} {time}?", "How warm will it be {time}?",
        "Do I need an umbrella {time}?", "What is the weather like in {place} {time}?",
        "Is it going to snow in {place}?", "Give me the forecast for {place}.",
        "How cold does it get in {place} {time}?", "Is it sunny in {place} {time}?",
        "Will the sun shine {time}?", "Is there a storm coming {time}?",
        "Tell me the temperature in {place}.", "How windy is it in {place} {time}?",
    ),
    "alarm": (
        "Wake me up {time}.", "Set an alarm for {time}.", "I need an alarm {time} at seven.",
        "Let the alarm ring {time}.", "Turn off my alarm {time}.", "Cancel the alarm {time}.",
        "Make sure I get up early {time}.", "Wake me at six {time}, please.",
        "Change my alarm to eight {time}.", "Let me sleep until nine {time}, then ring.",
        "Delete the alarm that I set for {time}.", "Please set my alarm clock {time}.",
    ),
    "music": (
        "Play some jazz {time}.", "Play the new song of {person}.", "Put on some rock music.",
        "I want to hear a song for {person}.", "Skip this song.", "Turn up the music.",
        "Play my favourite album {time}.", "Start the playlist of {person}.",
        "Shuffle all my songs {time}.", "I want to listen to music {time}.",
        "Put on the radio {time}.", "Play a song from {place}.",
    ),
    "message": (
        "Send a text to {person}.", "Tell {person} that I am late.", "Write to {person} {time}.",
        "Text {person} that I am coming {time}.", "Send {person} a message.",
        "Reply to {person} that I agree.", "Message {person} that we meet {time}.",
        "Let {person} know that I am in {place}.", "Write a message to {person} for me.",
        "Answer the text of {person}.", "Write {person} that I cannot come {time}.",
        "Send a message to {person} {time}.",
    ),
    "call": (
        "Call {person} {time}.", "Phone {person}, please.", "Dial the number of {person}.",
        "I want to talk to {person} on the phone.", "Ring up {person} {time}.",
        "Give {person} a call {time}.", "Start a phone call with {person}.",
        "Call {person} on the mobile.", "Redial {person}.", "Make a call to {person} {time}.",
        "Get {person} on the phone.", "Please call {person} back {time}.",
    ),
    "flight": (
        "Book a flight to {place} {time}.", "Find me a plane ticket to {place}.",
        "When does the plane to {place} leave?", "I want to fly to {place} {time}.",
        "What is the cheapest flight to {place}?", "Are there flights to {place} {time}?",
        "Show flights from {place} {time}.", "Reserve a seat on the plane to {place}.",
        "Is the flight from {place} late?", "Cancel my flight to {place} {time}.",
        "Change my plane ticket to {place}.", "How much is it to fly to {place}?",
    ),
    "restaurant": (
        "Book a table for two {time}.", "Find a good restaurant in {place}.",
        "Where can I eat pizza in {place}?", "Reserve a table at the restaurant {time}.",
        "Is there a good place for dinner in {place}?", "I want to eat out {time}.",
        "Which restaurants are open {time}?", "Show me places to have lunch in {place}.",
        "Where do they serve sushi in {place}?", "Get us a table for dinner {time}.",
        "Recommend a restaurant for {person}.", "Where can we have dinner {time}?",
    ),
    "bank": (
        "How much money is in my account?", "Transfer fifty dollars to {person}.",
        "Show my account balance {time}.", "Send money to {person} {time}.",
        "What did I spend {time}?", "Pay the bill of {person}.", "Block my credit card.",
        "Pay {person} twenty dollars {time}.", "How much did I pay to {person}?",
        "Show the last payments to {person}.", "Move money to my savings {time}.",
        "What is the balance of my bank account?",
    ),
    "calendar": (
        "Add a meeting with {person} {time}.", "What is on my schedule {time}?",
        "Am I free {time}?", "Move the meeting with {person} to {time}.",
        "Put the appointment with {person} in my calendar.", "When is my meeting with {person}?",
        "Schedule an appointment {time}.", "Show my appointments {time}.",
        "Cancel the meeting with {person}.", "Which appointments do I have {time}?",
        "Do I have a meeting {time}?", "Plan a meeting in {place} {time}.",
    ),
    "lights": (
        "Turn off the lights {time}.", "Switch on the lamp in the kitchen.",
        "Make the living room brighter.", "Dim the lights {time}.",
        "It is too dark in here.", "Switch off all lamps {time}.",
        "Turn the bedroom light on {time}.", "Turn on the light for {person}.",
        "Make the light in the hall red.", "Set the lamps to half brightness.",
        "Light up the garden {time}.", "Switch the kitchen light off {time}.",
    ),
}  # fmt: skip


def _draw_intent(rng: random.Random, test: bool) -> Sample:
    intent = rng.choice(list(INTENTS))
    phrase = rng.choice(_divide(INTENTS[intent], test))
    values = {name: rng.choice(values) for name, values in SLOTS.items()}
    return Sample(f"Intent of: {phrase.format(**values)}", intent)


JSON = Task("json", _draw_order, 48)
SQL = Task("sql", _draw_query, 48)
INTENT = Task("intents", _draw_intent, 8)
TASKS = {task.name: task for task in (JSON, SQL, INTENT)}
