"""Training data: examples of a file of JSON Lines, and their division into three parts.

A line is an object with ``prompt`` and ``answer``, or with ``messages``, a conversation that ends
with an answer (``schemas/training-example.schema.json``). The file is bounded and read strictly:
all problems are reported at once, with their lines. Repeated examples and empty answers are left
out and counted.

Which part an example belongs to follows from the SHA-256 of its prompt alone, without differences
of case and white space: the parts share no prompt, and an example never changes its part when
others are added. `TEST_SHARE` of the prompts are the test, which training never sees, and
`HELD_OUT_SHARE` decide when training stops.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import InvalidPackageError
from expertctl.package.evaluation import Metric, find_unfit_values
from expertctl.schema.strict_json import JsonObject
from expertctl.schema.validation import MAX_PROBLEMS, JsonLinesReader, read_json_lines

TEST_SHARE = HELD_OUT_SHARE = 0.1
MIN_EXAMPLES = 20
MAX_HELD_OUT = 100
"""How many held-out examples are used: their loss is computed several times."""
MAX_TEST = 200
"""How many test examples are used: the base and the expert answer each of them."""
_HINT = 'each line is an object such as {"prompt": "Sort 3, 1, 2", "answer": "1, 2, 3"}'


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One line: a conversation, the last message of which is an answer."""

    line: int
    messages: tuple[ConversationMessage, ...]

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.messages[-1].content

    @property
    def prompt(self) -> str | None:
        """The prompt, if the conversation is one prompt and one answer."""
        first = self.messages[0]
        return first.content if len(self.messages) == 2 and first.role == "user" else None

    @property
    def position(self) -> float:
        """The hash of what precedes the last answer, in [0, 1); it decides the part."""
        turns = [[m.role, " ".join(m.content.casefold().split())] for m in self.messages[:-1]]
        data = json.dumps(turns, ensure_ascii=False).encode()
        return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / (1 << 48)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The examples of a file by part, each in the order of their hashes or lines."""

    path: Path
    digest: Digest
    train: tuple[TrainingExample, ...]
    """In the order of the file."""
    held_out: tuple[TrainingExample, ...]
    test: tuple[TrainingExample, ...]
    duplicates: int
    """Lines left out because an earlier one has the same messages."""
    empty: int
    """Lines left out because the answer is empty."""
    repeated_prompts: int
    """Lines with the prompt of an earlier line, but for case and white space."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about the file."""
        counts = {
            "repeated examples were left out": self.duplicates,
            "examples with an empty answer were left out": self.empty,
            "examples repeat the prompt of an earlier one": self.repeated_prompts,
        }
        return tuple(f"{self.path}: {count} {what}" for what, count in counts.items() if count)


def read_training_data(path: Path) -> TrainingData:
    """Read and divide a file of training examples.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file, or when it has too few examples.
    """
    data = read_json_lines(path)
    reader = JsonLinesReader(
        str(path), schema="training-example", hint=_HINT, aliases={"completion": "answer"}
    )
    found: list[TrainingExample] = []
    ids: list[tuple[int, str | None]] = []
    for number, document in reader.read(data):
        name = document.get("id")
        ids.append((number, name if isinstance(name, str) else None))
        example = TrainingExample(number, _read_messages(document))
        reader.add_problems(number, *_find_message_problems(document, example))
        found.append(example)
    reader.check_duplicate_ids(ids)
    reader.raise_problems()
    answered = [example for example in found if example.answer.strip()]
    unique = _drop_duplicates(answered)
    _require_enough(path, unique)
    return _divide(
        path,
        Digest.compute(data),
        unique,
        duplicates=len(answered) - len(unique),
        empty=len(found) - len(answered),
    )


def check_answers(data: TrainingData, metric: Metric) -> None:
    """Require answers that a metric can compare, before training.

    Raises:
        InvalidPackageError: with the lines of the others.
    """
    problems = [
        f"line {example.line}: {problem}"
        for example in sorted((*data.train, *data.held_out, *data.test), key=lambda e: e.line)
        for problem in find_unfit_values({"answer": example.answer}, metric)
    ]
    if problems:
        shown = [*problems[:MAX_PROBLEMS], *(["… and more"] if problems[MAX_PROBLEMS:] else [])]
        hint = f"leave out `--metric {metric}`, or correct the answers"
        raise InvalidPackageError(str(data.path), shown, hint=hint)


def _read_messages(document: JsonObject) -> tuple[ConversationMessage, ...]:
    messages = document.get("messages")
    if not isinstance(messages, list):
        question = ConversationMessage("user", str(document.get("prompt", "")))
        return question, ConversationMessage("assistant", str(document.get("answer", "")))
    roles = {"system": "system", "user": "user", "assistant": "assistant"}
    return tuple(
        ConversationMessage(roles[str(each["role"])], str(each["content"]))  # type: ignore[arg-type]  # the schema lists them
        for each in messages
        if isinstance(each, dict)
    )


def _find_message_problems(document: JsonObject, example: TrainingExample) -> list[str]:
    if ("messages" in document) == ("prompt" in document):
        return ["it needs either a prompt and an answer, or messages"]
    problems = []
    roles = [message.role for message in example.messages]
    if roles[-1] != "assistant":
        problems.append("messages: the last one must be the answer of the assistant")
    if "user" not in roles[:-1]:
        problems.append("messages: a message of the user must precede the answer")
    return problems


def _drop_duplicates(examples: Iterable[TrainingExample]) -> list[TrainingExample]:
    first: dict[tuple[tuple[str, str], ...], TrainingExample] = {}
    for example in examples:
        first.setdefault(tuple((m.role, m.content) for m in example.messages), example)
    return list(first.values())


def _require_enough(path: Path, examples: Sequence[TrainingExample]) -> None:
    if len(examples) < MIN_EXAMPLES:
        problem = f"{len(examples)} different examples, at least {MIN_EXAMPLES} are needed"
        hint = "a few hundred are a good start; examples of one task, answered in one way"
        raise InvalidPackageError(str(path), [problem], hint=hint)


def _divide(
    path: Path, digest: Digest, examples: Sequence[TrainingExample], *, duplicates: int, empty: int
) -> TrainingData:
    train: list[TrainingExample] = []
    held_out: list[tuple[float, int, TrainingExample]] = []
    test: list[tuple[float, int, TrainingExample]] = []
    positions: set[float] = set()
    for example in examples:
        position = example.position
        positions.add(position)
        if position < TEST_SHARE:
            test.append((position, example.line, example))
        elif position < TEST_SHARE + HELD_OUT_SHARE:
            held_out.append((position, example.line, example))
        else:
            train.append(example)
    named = {"train": train, "held-out": held_out, "test": test}
    empty_parts = [name for name, part in named.items() if not part]
    if empty_parts:
        problem = f"no example falls into the part {' or '.join(empty_parts)}"
        hint = "the part follows from the hash of the prompt: add more examples"
        raise InvalidPackageError(str(path), [problem], hint=hint)
    return TrainingData(
        path,
        digest,
        tuple(train),
        tuple(example for *_, example in sorted(held_out)[:MAX_HELD_OUT]),
        tuple(example for *_, example in sorted(test)[:MAX_TEST]),
        duplicates=duplicates,
        empty=empty,
        repeated_prompts=len(examples) - len(positions),
    )
