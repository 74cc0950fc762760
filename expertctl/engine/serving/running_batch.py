"""`ExpertJobCounts`: how many jobs each expert had a part in, for a bounded number of experts.

Users may install experts of any name, and versions come and go: the first so many that answer
have a number of their own, all others share one.

`AdapterStatus`: an installed expert, and what it is to a server of one base.

`Batch`: the texts that are being written on one model, each row with a plan of its own.

One pass reads a chunk of one prompt and then one token of every text that is past its prompt. Where
the model can be stopped between layers, these texts take steps there, too: they wait about one step
for a chunk, however long the prompt (`chunk_size`). One thread computes. What a text gets depends
on other texts of the batch in the last bits of floating point only, and on a base that kernels run
not at all: neither the batch nor the size of chunks changes a bit there.

What the engine of a server is doing, in numbers that are read now and then to be shown.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from expertctl.engine.generation import DecodeSession
from expertctl.engine.memory.adapter_cache import TierTraffic
from expertctl.engine.memory.budget import Purpose
from expertctl.engine.model.backends import RunnableModel
from expertctl.engine.model.decoder import PREFILL_CHUNK, PrefillResult
from expertctl.engine.moe.counters import CounterSnapshot
from expertctl.engine.moe.stats import RoutedExpertStats
from expertctl.engine.serving.request import (
    MIN_CHUNK,
    PrefillChunk,
    RunningSequence,
    choose_chunk_size,
    is_step_due,
)
from expertctl.errors import ExpertError
from expertctl.routing.candidate import InstalledExpert

MAX_COUNTED_EXPERTS = 1_000
OTHER_EXPERTS = "other"
"""Stands for all without a number of their own; no reference, for those have a slash."""


@dataclass(slots=True)
class ExpertJobCounts:
    """The owner of the numbers."""

    limit: int = MAX_COUNTED_EXPERTS
    _jobs: dict[str, int] = field(default_factory=dict)

    def count(self, refs: Iterable[str]) -> None:
        """Count a job once for each expert of its plan, however often the plan has it."""
        for ref in sorted(set(refs)):
            is_known = ref in self._jobs or len(self._jobs) < self.limit
            name = ref if is_known else OTHER_EXPERTS
            self._jobs[name] = self._jobs.get(name, 0) + 1

    def get(self, ref: str) -> int:
        """Return how many jobs an expert had a part in; 0 where it has no number of its own."""
        return self._jobs.get(ref, 0)

    def copy(self) -> "ExpertJobCounts":
        """Return a copy of what was counted so far."""
        return ExpertJobCounts(self.limit, dict(self._jobs))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield references and numbers."""
        return iter(self._jobs.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """One version of one expert."""

    expert: InstalledExpert
    fits: bool
    """Whether it was made for the base that is served."""
    in_memory: bool
    """Whether its weights are there for the next job that wants it."""


RECENT_STEPS = 8
"""The duration of so many steps is known, to choose the size of chunks by."""


@dataclass(slots=True)
class StepCounters:
    """What was computed so far."""

    steps: int = 0
    step_rows: int = 0
    """Rows of all steps: divided by steps, how many texts shared one."""
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    step_seconds: float = 0.0


class RunningBatch:
    """The owner of the rows."""

    def __init__(
        self,
        model: RunnableModel,
        *,
        rows: int,
        min_chunk: int = MIN_CHUNK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin without a text; beside others a prompt is read by ``least_chunk`` tokens at least.

        ``clock`` returns seconds.
        """
        self.rows, self.counts = rows, StepCounters()
        self._least_chunk, self._clock = min_chunk, clock
        self._step_seconds = deque[float](maxlen=RECENT_STEPS)
        self._stepped = self._part_begun = 0.0
        """When texts took a step or began to wait for one; when a part of a pass began."""
        self.blocked: list[RunningSequence] = []
        """Texts that could not go on in the last pass for want of memory."""
        self._model = model
        self._texts: list[RunningSequence] = []
        self._pass = 0

    @property
    def sequences(self) -> Sequence[RunningSequence]:
        """The texts that are in it."""
        return tuple(self._texts)

    @property
    def free(self) -> int:
        """How many more texts there is room for."""
        return self.rows - len(self._texts)

    def add(self, text: RunningSequence) -> None:
        """Take a text in."""
        assert self.free > 0, "the caller has looked"
        text.served = self._pass
        self._texts.append(text)

    def run_pass(self) -> list[RunningSequence]:
        """Do one pass; return the texts that ended or failed, which are out of it now."""
        self._pass += 1
        self.blocked = []
        self._stop_expired()
        self._prefill_next()
        self._decode_step()
        over = [text for text in self._texts if text.has_ended]
        self._texts = [text for text in self._texts if not text.has_ended]
        return over

    def fail_all(self, error: ExpertError) -> list[RunningSequence]:
        """Let all texts fail, and return them."""
        over, self._texts = self._texts, []
        for text in over:
            text.error = error
        return over

    def remove(self, text: RunningSequence) -> None:
        """Remove a text, if it is in."""
        self._texts = [other for other in self._texts if other is not text]

    def check_integrity(self) -> None:
        """Assert what holds between passes."""
        assert len(self._texts) <= self.rows
        assert not any(text.has_ended for text in self._texts)
        assert len({id(text.session) for text in self._texts}) == len(self._texts)

    def _stop_expired(self) -> None:
        """End texts that are no longer wanted or took too long."""
        for text in self._texts:
            why = text.ticket.find_stop_reason()
            if why is not None:
                text.stop(why)

    def _prefill_next(self) -> None:
        """Read a chunk of the prompt that was served longest ago."""
        waiting = [text for text in self._texts if text.is_prefilling and not text.has_ended]
        if not waiting:
            return
        text = min(waiting, key=lambda text: text.served)
        text.served = self._pass
        before, begun, stepped = text.unread_count, self._clock(), self.counts.step_seconds
        if len(waiting) == len(self._texts):
            self._run_guarded([text], partial(text.prefill_chunk, PREFILL_CHUNK))
        else:
            most = self._choose_chunk_size(text)
            self._run_guarded(
                [text], partial(text.prefill_chunk, most, prefill=self._prefill_interleaved)
            )
        stepped = self.counts.step_seconds - stepped
        text.last_chunk = chunk = PrefillChunk(
            before - text.unread_count, self._clock() - begun - stepped
        )
        self.counts.prompt_tokens += chunk.tokens
        self.counts.prompt_seconds += chunk.seconds

    def _choose_chunk_size(self, text: RunningSequence) -> int:
        """Return how many tokens of a prompt are read while other texts are decoded."""
        return choose_chunk_size(
            text.last_chunk,
            self._step_seconds,
            parts=self._model.prefill_parts,
            min_tokens=self._least_chunk,
        )

    def _prefill_interleaved(self, session: DecodeSession, ids: Sequence[int]) -> PrefillResult:
        """Read a chunk; other texts step between its layers, which is no part of its time."""
        self._stepped = self._part_begun = self._clock()
        before = self.counts.step_seconds
        result = self._model.prefill(session, ids, between_layers=self._step_if_due)
        stepped = self.counts.step_seconds - before
        return replace(result, ms=result.ms - stepped * 1e3)

    def _step_if_due(self) -> None:
        """Between two layers of a chunk, have other texts take a step if they waited for long."""
        now = self._clock()
        part, self._part_begun = now - self._part_begun, now
        if is_step_due(waited=now - self._stepped, part=part, step_seconds=self._step_seconds):
            self._decode_step()
            self._stepped = self._part_begun = self._clock()

    def _decode_step(self) -> None:
        """Read one token of every text that is past its prompt, and draw the next ones."""
        written = [text for text in self._texts if _is_decoding(text)]
        texts = [text for text in written if text.reserve_next_token()]
        self.blocked = [text for text in written if text not in texts]
        if not texts:
            return
        begun = self._clock()
        self._run_guarded(texts, partial(self._decode_together, texts))
        seconds = self._clock() - begun
        self._step_seconds.append(seconds)
        for text in texts:
            text.record_step(seconds * 1e3)
        self.counts.steps += 1
        self.counts.step_rows += len(texts)
        self.counts.step_seconds += seconds

    def _decode_together(self, texts: Sequence[RunningSequence]) -> None:
        scores = self._model.step([(text.session, text.next_input_token) for text in texts])
        for text, logits in zip(texts, scores, strict=True):
            self._run_guarded([text], partial(text.take_logits, logits))

    def _run_guarded(self, texts: Sequence[RunningSequence], work: Callable[[], None]) -> None:
        """Do something for texts; if it fails, they fail with it."""
        try:
            work()
        except ExpertError as error:
            for text in texts:
                text.error = error


def _is_decoding(text: RunningSequence) -> bool:
    """Tell whether a text waits for its next token."""
    return not (text.is_prefilling or text.has_ended or text.ticket.find_stop_reason())


KV_BLOCK_TOKENS = 16
"""Tokens of a block of keys and values; packed bases hold them in pages of as many."""


@dataclass(slots=True)
class JobTotals:
    """What became of jobs so far."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """For want of a place in the queue."""
    paused: int = 0
    """Texts that gave their memory to those that began before them, and went on later."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    experts: ExpertJobCounts = field(default_factory=ExpertJobCounts)
    """How many answered jobs each expert had a part in."""

    def copy(self) -> "JobTotals":
        """Return what became of jobs until now."""
        return replace(self, experts=self.experts.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """One moment; sizes in bytes, counts since the start."""

    waiting: int
    """Jobs in the queue."""
    preparing: int
    """Jobs that are being planned or loaded, or are ready for a row."""
    running: int
    """Texts in the batch."""
    rows: int
    """How many there may be."""
    totals: JobTotals
    counts: StepCounters
    held: Mapping[Purpose, int]
    limit: int
    peak: int
    kv_limit: int
    """What keys and values may take beside what else is held."""
    kv_in_use: int
    """Keys and values of texts that run; `held` counts those that are kept, too."""
    kv_kept_limit: int
    """What those may take that are kept for later requests."""
    kv_block: int
    """Bytes of the keys and values of `BLOCK` tokens."""
    traffic: Mapping[str, TierTraffic]
    """By tier."""
    running_plans: tuple[tuple[str, ...], ...]
    """The experts of each text in the batch."""
    waiting_plans: tuple[tuple[str, ...], ...]
    """The experts of each prepared job, and those that jobs in the queue ask for."""
    routed: RoutedExpertStats | None = None
    """What became of routed experts; None where the base has none."""
    observed: CounterSnapshot | None = None
    """What was counted of them, layer by layer; None where nothing is counted."""
    resident_experts: Mapping[int, int] = field(default_factory=dict)
    """How many of them have a slot, by the number of the layer; empty where none needs one."""
