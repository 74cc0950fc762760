"""One pass after the other, without threads: who is read, who is written, who is put out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.decoder import DecodeResult, PrefillResult
from expertctl.engine.generate import Reading, Writer
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.batch import BESIDE, STRETCH, Batch
from expertctl.engine.serving.job import Event, Job, Piece
from expertctl.engine.serving.text import Text
from expertctl.engine.serving.ticket import Ticket
from expertctl.engine.tokenizer import Tokenizer
from expertctl.errors import ExpertError, IncompatibleError
from expertctl.routing.plan import SamplingParams
from expertctl.routing.request import RouteRequest
from tests.factories import write_tokenizer

A = ord("a")
GREEDY = SamplingParams(max_tokens=100).greedy()


@dataclass(eq=False)
class Alphabet:
    """A model that says the letter behind the last one, and remembers what it was given."""

    log: list[tuple[str, list[int]]]
    name: str
    broken: bool = False
    ids: list[int] = field(default_factory=list)

    def scores(self) -> torch.Tensor:
        logits = torch.zeros(300)
        logits[self.ids[-1] + 1] = float("nan") if self.broken else 1.0
        return logits

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        self.log.append((self.name, list(ids)))
        self.ids += ids
        return PrefillResult(self.scores(), len(ids), 1.0)

    def decode(self, token: int) -> DecodeResult:
        self.ids.append(token)
        return DecodeResult(self.scores(), len(self.ids), 1.0)


class Model:
    """Steps readings; a step of all may fail, too."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.error: ExpertError | None = None

    def step(self, texts: Sequence[tuple[Reading, int]]) -> torch.Tensor:
        self.steps.append([reading.name for reading, _ in texts])  # type: ignore[attr-defined]
        if self.error is not None:
            raise self.error
        return torch.stack([reading.decode(token).logits for reading, token in texts])


@dataclass
class Bench:
    tokenizer: Tokenizer
    model: Model = field(default_factory=Model)
    log: list[tuple[str, list[int]]] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)

    def batch(self, rows: int = 4) -> Batch:
        return Batch(self.model, rows=rows)  # type: ignore[arg-type]  # only steps are needed

    def text(self, name: str, prompt: Sequence[int] = (A,), **options: Any) -> Text:
        message = UserMessage(prompt=name)
        job = Job(id=name, request=RunRequest(message=message, route=RouteRequest(prompt=name)))
        events = self.events[name] = []
        most, room = options.pop("max_tokens", 100), KVRoom(options.pop("room", 1000))
        return Text(
            Ticket(job, events.append),
            0,
            Alphabet(self.log, name, **options),
            Writer(self.tokenizer, GREEDY, seed=0, max_tokens=most),
            room=room,
            unread=prompt,
            tokenizer=self.tokenizer,
        )

    def said(self, name: str) -> str:
        return "".join(event.text for event in self.events[name] if isinstance(event, Piece))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    write_tokenizer(tmp_path)
    return Bench(Tokenizer.open(tmp_path))


def test_a_pass_reads_one_prompt_and_then_writes_one_letter_of_every_text(bench: Bench) -> None:
    batch = bench.batch()
    batch.add(bench.text("one", [A], max_tokens=3))
    batch.add(bench.text("two", [A + 5], max_tokens=9))
    assert batch.advance() == []
    assert (bench.said("one"), bench.said("two")) == ("bc", "")
    over = batch.advance()
    assert [text.generated().text for text in over] == ["bcd"]
    assert over[0].generated().finish_reason == "length"
    assert bench.said("two") == "gh"
    assert [text.ticket.job.id for text in batch.texts] == ["two"]
    batch.check_integrity()


def test_prompts_are_read_in_turns_and_shorter_stretches_beside_texts_that_are_written(
    bench: Bench,
) -> None:
    batch, long = bench.batch(), [A] * (3 * STRETCH)
    batch.add(bench.text("long", long))
    batch.advance()
    assert [len(ids) for _, ids in bench.log] == [STRETCH]
    batch.add(bench.text("short", [A] * 5))
    batch.advance()
    batch.advance()
    assert [name for name, _ in bench.log] == ["long", "long", "short"]
    batch.advance()
    assert bench.log[-1] == ("long", [A] * BESIDE)  # somebody waits for tokens now


def test_a_prompt_is_read_whole_whatever_its_length(bench: Bench) -> None:
    batch, prompt = bench.batch(), [A + n % 20 for n in range(2 * STRETCH + 7)]
    batch.add(bench.text("long", prompt, max_tokens=1))
    over: list[Text] = []
    while not over:
        over = batch.advance()
    assert [token for _, ids in bench.log for token in ids] == prompt
    assert over[0].generated().prefill_tokens == len(prompt)
    assert over[0].generated().text == chr(prompt[-1] + 1)


def test_scores_that_are_no_numbers_end_their_own_text(bench: Bench) -> None:
    batch = bench.batch()
    good, bad = bench.text("good"), bench.text("bad")
    batch.add(good)
    batch.add(bad)
    batch.advance()
    batch.advance()
    assert isinstance(bad.reading, Alphabet)
    bad.reading.broken = True
    assert batch.advance() == [bad]
    assert isinstance(bad.error, IncompatibleError)
    assert batch.texts == (good,)
    assert bench.said("good") == "bcde"


def test_a_step_that_fails_ends_all_that_took_part_and_leaves_who_is_read(bench: Bench) -> None:
    batch = bench.batch()
    batch.add(bench.text("one"))
    batch.advance()
    bench.model.error = IncompatibleError("no")
    reader = bench.text("two", [A] * 1000)
    batch.add(reader)
    [over] = batch.advance()
    assert (over.ticket.job.id, over.error) == ("one", bench.model.error)
    assert batch.texts == (reader,)


def test_a_text_that_is_called_off_ends_before_another_token_of_it_is_read(bench: Bench) -> None:
    batch, text = bench.batch(), bench.text("one")
    batch.add(text)
    batch.advance()
    text.ticket.is_cancelled = True
    assert batch.advance() == [text]
    assert text.generated().finish_reason == "cancelled"
    assert text.generated().text == bench.said("one") == "bc"
    assert bench.model.steps == [["one"]]


def test_a_text_whose_prompt_is_being_read_can_be_called_off(bench: Bench) -> None:
    batch, text = bench.batch(), bench.text("one", [A] * (2 * STRETCH))
    batch.add(text)
    batch.advance()
    text.ticket.is_cancelled = True
    assert batch.advance() == [text]
    assert text.generated().text == ""
    assert len(bench.log) == 1


def test_what_was_computed_is_counted(bench: Bench) -> None:
    batch = bench.batch()
    batch.add(bench.text("one", [A] * 3))
    batch.add(bench.text("two", [A] * 4))
    for _ in range(4):
        batch.advance()
    counts = batch.counts
    assert counts.prompt_tokens == 7
    assert (counts.steps, counts.step_rows) == (3 + 1, 3 + 4)


def test_a_text_without_memory_is_told_and_holds_up_nobody(bench: Bench) -> None:
    batch = bench.batch()
    lacks = bench.text("one", [A], room=0)
    batch.add(lacks)
    batch.add(bench.text("two", [A + 5]))
    for _ in range(3):
        batch.advance()
    assert batch.lacking == [lacks]
    assert (bench.said("one"), bench.said("two")) == ("b", "ghi")
    lacks.room.capacity = 1
    batch.advance()
    assert batch.lacking == []
    assert bench.said("one") == "bc"
