"""One pass after the other, without threads: who is read, who is written, who is put out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.engine.arrays import AnyArray
from expertctl.engine.decoding import PREFILL_CHUNK, DecodeResult, PrefillResult
from expertctl.engine.generation import DecodeSession, OutputWriter
from expertctl.engine.kv.kv_cache import KVCacheBase
from expertctl.engine.request import RunRequest
from expertctl.engine.running_batch import FIRST_CHUNK, MIN_CHUNK, RunningBatch
from expertctl.engine.running_sequence import OutputDelta, RunningSequence
from expertctl.engine.serving.request import GenerationJob, JobEvent, RequestState
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import ExpertError, IncompatibleError
from expertctl.routing.plan import SamplingParams
from expertctl.routing.request import RouteRequest
from expertctl.user_request import UserMessage
from tests.factories import write_tokenizer

A = ord("a")
STEP, TOKEN = 0.012, 0.001
"""Seconds, about those of a base of 135M parameters on two cores."""
GREEDY = SamplingParams(max_tokens=100).to_greedy()


@dataclass
class ComputeClock:
    """Seconds that pass only when something is computed."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Alphabet:
    """A model that says the letter behind the last one (a follows z), and remembers its input."""

    log: list[tuple[str, list[int]]]
    name: str
    clock: ComputeClock = field(default_factory=ComputeClock)
    token_seconds: float = 0.0
    """What a token of a prompt takes for each thousand tokens before it, and once more."""
    broken: bool = False
    ids: list[int] = field(default_factory=list)

    def scores(self) -> AnyArray:
        logits = np.zeros(300, np.float32)
        logits[A + (self.ids[-1] + 1 - A) % 26] = float("nan") if self.broken else 1.0
        return logits

    def cost(self, ids: Sequence[int]) -> float:
        return len(ids) * self.token_seconds * (1 + len(self.ids) / 1000)

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        self.clock.now += self.cost(ids)
        return self.read(ids)

    def read(self, ids: Sequence[int]) -> PrefillResult:
        self.log.append((self.name, list(ids)))
        self.ids += ids
        return PrefillResult(self.scores(), len(ids), 1.0)

    def decode(self, token: int) -> DecodeResult:
        self.ids.append(token)
        return DecodeResult(self.scores(), len(self.ids), 1.0)


class ScriptedModel:
    """Steps readings; a step of all may fail, too."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.error: Exception | None = None
        self.clock, self.step_seconds = ComputeClock(), 0.0
        self.prefill_parts = 1
        self.stepped_at: list[float] = []

    def prefill(
        self,
        reading: DecodeSession,
        ids: Sequence[int],
        *,
        between_layers: Callable[[], None] | None = None,
    ) -> PrefillResult:
        assert isinstance(reading, Alphabet)
        seconds = reading.cost(ids)
        for part in range(self.prefill_parts):
            if part and between_layers is not None:
                between_layers()
            self.clock.now += seconds / self.prefill_parts
        return reading.read(ids)

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> AnyArray:
        self.steps.append([reading.name for reading, _ in texts])  # type: ignore[attr-defined]
        self.clock.now += self.step_seconds
        self.stepped_at.append(self.clock.now)
        if self.error is not None:
            raise self.error
        return np.stack([reading.decode(token).logits for reading, token in texts])


@dataclass
class BatchHarness:
    tokenizer: Tokenizer
    model: ScriptedModel = field(default_factory=ScriptedModel)
    log: list[tuple[str, list[int]]] = field(default_factory=list)
    events: dict[str, list[JobEvent]] = field(default_factory=dict)

    def batch(self, rows: int = 4, **options: Any) -> RunningBatch[RequestState]:
        clock = self.model.clock
        return RunningBatch(self.model, rows=rows, clock=clock, **options)  # type: ignore[arg-type]  # of a model only this is needed

    def text(
        self, name: str, prompt: Sequence[int] = (A,), **options: Any
    ) -> RunningSequence[RequestState]:
        message = UserMessage(prompt=name)
        job = GenerationJob(
            id=name, request=RunRequest(message=message, route=RouteRequest(prompt=name))
        )
        events = self.events[name] = []
        most, room = options.pop("max_tokens", 100), KVCacheBase(options.pop("room", 1000))
        return RunningSequence(
            RequestState(job, events.append),
            Alphabet(self.log, name, self.model.clock, **options),
            OutputWriter(self.tokenizer, GREEDY, seed=0, max_tokens=most),
            cache=room,
            unread=prompt,
        )

    def said(self, name: str) -> str:
        return "".join(event.text for event in self.events[name] if isinstance(event, OutputDelta))


@pytest.fixture
def bench(tmp_path: Path) -> BatchHarness:
    write_tokenizer(tmp_path)
    return BatchHarness(Tokenizer.open(tmp_path))


def test_a_pass_reads_one_prompt_and_then_writes_one_letter_of_every_text(
    bench: BatchHarness,
) -> None:
    batch = bench.batch()
    batch.add(bench.text("one", [A], max_tokens=3))
    batch.add(bench.text("two", [A + 5], max_tokens=9))
    assert batch.run_pass() == []
    assert (bench.said("one"), bench.said("two")) == ("bc", "")
    over = batch.run_pass()
    assert [text.build_output().text for text in over] == ["bcd"]
    assert over[0].build_output().finish_reason == "length"
    assert bench.said("two") == "gh"
    assert [text.consumer.job.id for text in batch.sequences] == ["two"]
    batch.check_integrity()


def test_prompts_are_read_in_turns_and_shorter_stretches_beside_texts_that_are_written(
    bench: BatchHarness,
) -> None:
    batch, long = bench.batch(), [A] * (3 * PREFILL_CHUNK)
    bench.model.step_seconds = STEP
    batch.add(bench.text("long", long, token_seconds=TOKEN))
    batch.run_pass()
    assert [len(ids) for _, ids in bench.log] == [PREFILL_CHUNK]
    batch.add(bench.text("short", [A] * 5))
    batch.run_pass()
    batch.run_pass()
    assert [name for name, _ in bench.log] == ["long", "long", "short"]
    batch.run_pass()
    assert bench.log[-1][0] == "long"
    assert MIN_CHUNK <= len(bench.log[-1][1]) <= STEP / TOKEN  # somebody waits for tokens now


def test_a_prompt_is_read_whole_whatever_its_length(bench: BatchHarness) -> None:
    batch, prompt = bench.batch(), [A + n % 20 for n in range(2 * PREFILL_CHUNK + 7)]
    batch.add(bench.text("long", prompt, max_tokens=1))
    over: list[RunningSequence[RequestState]] = []
    while not over:
        over = batch.run_pass()
    assert [token for _, ids in bench.log for token in ids] == prompt
    assert over[0].build_output().prefill_tokens == len(prompt)
    assert over[0].build_output().text == chr(prompt[-1] + 1)


def test_scores_that_are_no_numbers_end_their_own_text(bench: BatchHarness) -> None:
    batch = bench.batch()
    good, bad = bench.text("good"), bench.text("bad")
    batch.add(good)
    batch.add(bad)
    batch.run_pass()
    batch.run_pass()
    assert isinstance(bad.session, Alphabet)
    bad.session.broken = True
    assert batch.run_pass() == [bad]
    assert isinstance(bad.error, IncompatibleError)
    assert batch.sequences == (good,)
    assert bench.said("good") == "bcde"


def test_a_step_that_fails_ends_all_that_took_part_and_leaves_who_is_read(
    bench: BatchHarness,
) -> None:
    batch = bench.batch()
    batch.add(bench.text("one"))
    batch.run_pass()
    bench.model.error = IncompatibleError("no")
    reader = bench.text("two", [A] * 1000)
    batch.add(reader)
    [over] = batch.run_pass()
    assert (over.consumer.job.id, over.error) == ("one", bench.model.error)
    assert batch.sequences == (reader,)


def test_a_pass_that_raises_loses_no_sequence(bench: BatchHarness) -> None:
    batch = bench.batch()
    running, short = bench.text("running"), bench.text("short", max_tokens=1)
    batch.add(running)
    batch.run_pass()
    batch.add(short)
    bench.model.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        batch.run_pass()
    assert bench.said("short") == "b", "it ended in the first half of the pass"
    error = ExpertError("a bug")
    assert batch.fail_all(error) == [running, short]
    assert batch.sequences == ()


def test_a_pass_that_raises_leaves_no_sequence_blocked(bench: BatchHarness) -> None:
    batch = bench.batch()
    lacks = bench.text("one", [A], room=0)
    batch.add(lacks)
    batch.run_pass()
    batch.run_pass()
    assert batch.blocked == [lacks]
    reader = bench.text("two", [A])
    batch.add(reader)
    reader.session = None  # type: ignore[assignment]  # reading it is a bug
    with pytest.raises(AssertionError):
        batch.run_pass()
    batch.fail_all(ExpertError("a bug"))
    assert batch.blocked == []


def test_a_text_that_is_called_off_ends_before_another_token_of_it_is_read(
    bench: BatchHarness,
) -> None:
    batch, text = bench.batch(), bench.text("one")
    batch.add(text)
    batch.run_pass()
    text.consumer.is_cancelled = True
    assert batch.run_pass() == [text]
    assert text.build_output().finish_reason == "cancelled"
    assert text.build_output().text == bench.said("one") == "bc"
    assert bench.model.steps == [["one"]]


def test_a_text_whose_prompt_is_being_read_can_be_called_off(bench: BatchHarness) -> None:
    batch, text = bench.batch(), bench.text("one", [A] * (2 * PREFILL_CHUNK))
    batch.add(text)
    batch.run_pass()
    text.consumer.is_cancelled = True
    assert batch.run_pass() == [text]
    assert text.build_output().text == ""
    assert len(bench.log) == 1


def test_what_was_computed_is_counted(bench: BatchHarness) -> None:
    batch = bench.batch()
    batch.add(bench.text("one", [A] * 3))
    batch.add(bench.text("two", [A] * 4))
    for _ in range(4):
        batch.run_pass()
    counts = batch.counts
    assert counts.prompt_tokens == 7
    assert (counts.steps, counts.step_rows) == (3 + 1, 3 + 4)


def test_a_text_without_memory_is_told_and_holds_up_nobody(bench: BatchHarness) -> None:
    batch = bench.batch()
    lacks = bench.text("one", [A], room=0)
    batch.add(lacks)
    batch.add(bench.text("two", [A + 5]))
    for _ in range(3):
        batch.run_pass()
    assert batch.blocked == [lacks]
    assert (bench.said("one"), bench.said("two")) == ("b", "ghi")
    lacks.cache.capacity = 1
    batch.run_pass()
    assert batch.blocked == []
    assert bench.said("one") == "bc"


def measure_gaps(bench: BatchHarness, *prompts: int, parts: int) -> list[float]:
    """The gaps between steps of a text beside prompts of so many tokens, until all are read."""
    model = bench.model
    model.step_seconds, model.prefill_parts = STEP, parts
    batch = bench.batch(rows=1 + len(prompts))
    batch.add(bench.text("stream", [A], max_tokens=10**6, room=10**6))
    for _ in range(10):
        batch.run_pass()
    for number, length in enumerate(prompts):
        batch.add(bench.text(f"long {number}", [A] * length, max_tokens=1, token_seconds=TOKEN))
    first = len(model.stepped_at)
    while len(batch.sequences) > 1:
        batch.run_pass()
    assert [len(read) for read in _read_by(bench, len(prompts))] == list(prompts)
    times = model.stepped_at[first - 1 :]
    return [later - sooner for sooner, later in pairwise(times)]


def _read_by(bench: BatchHarness, prompts: int) -> list[list[int]]:
    names = [f"long {number}" for number in range(prompts)]
    return [[token for who, ids in bench.log if who == name for token in ids] for name in names]


def test_a_stream_beside_a_prompt_of_6900_tokens_never_waits_three_steps(
    bench: BatchHarness,
) -> None:
    gaps = measure_gaps(bench, 6900, parts=30)
    assert max(gaps) <= 3 * STEP
    whole = 6900 * TOKEN * (1 + 6900 / 2000)
    assert sum(gaps) <= 3 * whole  # and the prompt is read at a third of its speed at least


def test_a_stream_beside_three_long_prompts_never_waits_three_steps(bench: BatchHarness) -> None:
    gaps = measure_gaps(bench, 3000, 2000, 4000, parts=30)
    assert max(gaps) <= 3 * STEP


def test_prompts_that_cannot_be_stopped_between_layers_are_read_in_shorter_chunks(
    bench: BatchHarness,
) -> None:
    gaps = measure_gaps(bench, 1500, parts=1)
    assert max(gaps) <= 3 * STEP


def test_a_prompt_whose_least_chunk_is_long_goes_on_all_the_same(bench: BatchHarness) -> None:
    bench.model.step_seconds = STEP / 100
    batch = bench.batch()
    batch.add(bench.text("stream", [A], max_tokens=10**6, room=10**6))
    batch.run_pass()
    batch.add(bench.text("long", [A] * 100, token_seconds=TOKEN))
    for _ in range(100 // MIN_CHUNK):
        batch.run_pass()
    assert [token for who, ids in bench.log if who == "long" for token in ids] == [A] * 100


def test_with_experts_on_the_disk_chunks_stay_as_large_as_the_batch_was_told(
    bench: BatchHarness,
) -> None:
    bench.model.step_seconds = STEP
    batch = bench.batch(min_chunk=128)
    batch.add(bench.text("stream", [A], max_tokens=10**6, room=10**6))
    batch.run_pass()
    batch.add(bench.text("long", [A] * 300, token_seconds=TOKEN))
    for _ in range(3):
        batch.run_pass()
    assert [len(ids) for who, ids in bench.log if who == "long"] == [128, 128, 44]


def test_a_prompt_is_read_at_full_size_again_when_its_neighbour_has_ended(
    bench: BatchHarness,
) -> None:
    bench.model.step_seconds = STEP
    batch = bench.batch()
    batch.add(bench.text("stream", [A], max_tokens=3))
    batch.run_pass()
    batch.add(bench.text("long", [A] * 2000, token_seconds=TOKEN))
    for _ in range(4):
        batch.run_pass()
    sizes = [len(ids) for who, ids in bench.log if who == "long"]
    assert sizes[0] == FIRST_CHUNK
    assert sizes[-1] == PREFILL_CHUNK


def test_a_stream_goes_on_while_a_chunk_is_read_and_may_end_there(bench: BatchHarness) -> None:
    model = bench.model
    model.step_seconds, model.prefill_parts = STEP, 10
    batch = bench.batch()
    batch.add(bench.text("stream", [A], max_tokens=12, room=1000))
    for _ in range(8):
        batch.run_pass()
    batch.add(bench.text("long", [A] * 64, max_tokens=1, token_seconds=10 * TOKEN))
    over = batch.run_pass()
    assert [text.consumer.job.id for text in over] == ["stream"]
    assert over[0].build_output().text == "bcdefghijklm"
    assert over[0].build_output().finish_reason == "length"
    batch.check_integrity()


def test_a_stream_that_is_called_off_is_not_stepped_while_a_chunk_is_read(
    bench: BatchHarness,
) -> None:
    model = bench.model
    model.step_seconds, model.prefill_parts = STEP, 10
    batch, stream = bench.batch(), bench.text("stream", [A])
    batch.add(stream)
    batch.run_pass()
    steps = len(model.steps)
    batch.add(bench.text("long", [A] * 64, token_seconds=10 * TOKEN))
    clock, seen = model.clock, []

    class Leaving(Alphabet):
        def cost(self, ids: Sequence[int]) -> float:
            stream.consumer.is_cancelled = True
            seen.append(clock.now)
            return super().cost(ids)

    batch.sequences[1].session = Leaving([], "long", clock, token_seconds=10 * TOKEN)
    assert batch.run_pass() == [stream]
    assert seen
    assert len(model.steps) == steps


def test_a_long_prompt_that_is_called_off_midway_leaves_the_stream(bench: BatchHarness) -> None:
    model = bench.model
    model.step_seconds, model.prefill_parts = STEP, 30
    batch, stream = bench.batch(), bench.text("stream", [A], max_tokens=20)
    batch.add(stream)
    batch.run_pass()
    long = bench.text("long", [A] * 5000, token_seconds=TOKEN)
    batch.add(long)
    batch.run_pass()
    long.consumer.is_cancelled = True
    assert batch.run_pass() == [long]
    assert long.build_output().finish_reason == "cancelled"
    assert batch.sequences == (stream,)


def test_the_time_of_a_chunk_is_without_the_steps_of_others(bench: BatchHarness) -> None:
    model = bench.model
    model.step_seconds, model.prefill_parts = STEP, 10
    batch = bench.batch()
    batch.add(bench.text("stream", [A], max_tokens=100))
    batch.run_pass()
    batch.add(bench.text("long", [A] * 64, token_seconds=10 * TOKEN))
    batch.run_pass()
    assert len(model.steps) > 2
    assert batch.counts.prompt_seconds == pytest.approx(FIRST_CHUNK * 10 * TOKEN)
    assert batch.counts.step_seconds == pytest.approx(len(model.steps) * STEP)
