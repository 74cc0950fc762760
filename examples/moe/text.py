"""The text that the base of routed experts is trained and measured on: questions and answers.

They are those of the starter pack: its nine tasks in the words that people use, and the coded
operations that its base learns. A document is a talk of many turns that mostly stays with what it
is about. Held-out documents ask tasks only about arguments that training never sees (`samples.py`),
and draw their codes anew.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from examples.starter.experts import EXPERTS
from examples.starter.mixture import Turn, draw_turn
from examples.starter.samples import Task, is_held_out
from examples.starter.vocab import encode_answer, encode_prompt

LENGTH = 512
"""Tokens of a document; the last turn is cut."""
CODED_SHARE = 0.3
STAYS = 0.75
"""How often the next turn is about the same."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text as token ids, and where in it answers stand: one flag a token."""

    ids: tuple[int, ...]
    answers: tuple[bool, ...]


def training_documents(count: int, *, seed: int, step: int) -> list[Document]:
    """Return the documents of one step of training, always the same."""
    rng = random.Random(f"moe training {seed} {step}")
    return [_document(rng, unseen=False) for _ in range(count)]


def held_out_documents(count: int, *, seed: int = 0) -> list[Document]:
    """Return documents that training does not see."""
    rng = random.Random(f"moe held out {seed}")
    return [_document(rng, unseen=True) for _ in range(count)]


def encode_turn(turn: Turn) -> Document:
    """Return one question and its answer, with the line break before the next."""
    prompt, answer = encode_prompt(turn.prompt, system=turn.system), encode_answer(turn.answer)
    flags = (*[False] * len(prompt), *[True] * len(answer), False)
    return Document((*prompt, *answer, *b"\n"), flags)


def _document(rng: random.Random, *, unseen: bool) -> Document:
    ids: list[int] = []
    answers: list[bool] = []
    turns = _turns(rng, unseen=unseen)
    while len(ids) < LENGTH:
        turn = encode_turn(next(turns))
        ids += turn.ids
        answers += turn.answers
    return Document(tuple(ids[:LENGTH]), tuple(answers[:LENGTH]))


def _turns(rng: random.Random, *, unseen: bool) -> Iterator[Turn]:
    task = _draw_task(rng)
    while True:
        yield draw_turn(rng) if task is None else _question(rng, task, unseen=unseen)
        if rng.random() >= STAYS:
            task = _draw_task(rng)


def _draw_task(rng: random.Random) -> Task | None:
    """Return what turns are about; None: coded operations."""
    return None if rng.random() < CODED_SHARE else rng.choice(EXPERTS)


def _question(rng: random.Random, task: Task, *, unseen: bool) -> Turn:
    while True:
        sample = task.generate(rng)
        held_out = [is_held_out(part) for part in sample.argument.split("|")]
        if all(held_out) if unseen else not any(held_out):
            return Turn(sample.prompt, sample.answer)
