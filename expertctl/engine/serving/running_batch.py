"""The running batch of sequences, each row with its own plan, and the engine's counters.

One pass reads a chunk of one prompt and then one token of every sequence that is past its prompt.
Where the model can be interrupted between layers, these sequences also step there: they wait about
one step for a chunk, however long the prompt (`choose_chunk_size`). One thread computes. The other
sequences of a batch affect a result in the last bits of floating point only, and on a base that
kernels run not at all: neither the batch nor the chunk size changes a bit there.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from expertctl.engine.decoding import PREFILL_CHUNK, PrefillResult
from expertctl.engine.generation import DecodeSession
from expertctl.engine.memory.adapter_cache import TierTraffic
from expertctl.engine.memory.budget import Purpose
from expertctl.engine.model.backends import RunnableModel
from expertctl.engine.moe.counters import CounterSnapshot, RoutedExpertStats
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
"""Name for all experts that are not counted separately; references always contain a slash."""


@dataclass(slots=True)
class ExpertJobCounts:
    """Number of jobs per expert, for a bounded number of experts.

    Users may install experts of any name, and versions come and go: the first ``limit`` that answer
    are counted separately, all others together.
    """

    limit: int = MAX_COUNTED_EXPERTS
    _jobs: dict[str, int] = field(default_factory=dict)

    def count(self, refs: Iterable[str]) -> None:
        """Count a job once for each expert of its plan."""
        for ref in sorted(set(refs)):
            is_known = ref in self._jobs or len(self._jobs) < self.limit
            name = ref if is_known else OTHER_EXPERTS
            self._jobs[name] = self._jobs.get(name, 0) + 1

    def get(self, ref: str) -> int:
        """Return the number of jobs of an expert; 0 where it is not counted separately."""
        return self._jobs.get(ref, 0)

    def copy(self) -> "ExpertJobCounts":
        """Return a copy of the counts."""
        return ExpertJobCounts(self.limit, dict(self._jobs))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield references and counts."""
        return iter(self._jobs.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """Status of one version of an expert on a server."""

    expert: InstalledExpert
    fits: bool
    """Whether it was made for the served base."""
    in_memory: bool
    """Whether its weights are in memory for the next job that uses it."""


RECENT_STEPS = 8
"""Number of recent steps whose duration determines the chunk size."""


@dataclass(slots=True)
class StepCounters:
    """Work computed so far."""

    steps: int = 0
    step_rows: int = 0
    """Rows of all steps: divided by steps, the average batch size."""
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
        """Start empty; while others decode, a prompt is read in chunks of at least ``min_chunk``.

        ``clock`` returns seconds.
        """
        self.rows, self.counts = rows, StepCounters()
        self._least_chunk, self._clock = min_chunk, clock
        self._step_seconds = deque[float](maxlen=RECENT_STEPS)
        self._stepped = self._part_begun = 0.0
        """When sequences last stepped or started to wait; when a part of a pass started."""
        self.blocked: list[RunningSequence] = []
        """Sequences that could not continue in the last pass because of missing memory."""
        self._model = model
        self._texts: list[RunningSequence] = []
        self._pass = 0

    @property
    def sequences(self) -> Sequence[RunningSequence]:
        """The sequences of the batch."""
        return tuple(self._texts)

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.rows - len(self._texts)

    def add(self, text: RunningSequence) -> None:
        """Add a sequence."""
        assert self.free > 0, "the caller has looked"
        text.served = self._pass
        self._texts.append(text)

    def run_pass(self) -> list[RunningSequence]:
        """Run one pass; return the sequences that ended or failed, which are removed."""
        self._pass += 1
        self.blocked = []
        self._stop_expired()
        self._prefill_next()
        self._decode_step()
        over = [text for text in self._texts if text.has_ended]
        self._texts = [text for text in self._texts if not text.has_ended]
        return over

    def fail_all(self, error: ExpertError) -> list[RunningSequence]:
        """Fail all sequences, and return them."""
        over, self._texts = self._texts, []
        for text in over:
            text.error = error
        return over

    def remove(self, text: RunningSequence) -> None:
        """Remove a sequence, if it is in the batch."""
        self._texts = [other for other in self._texts if other is not text]

    def check_integrity(self) -> None:
        """Assert the invariants that hold between passes."""
        assert len(self._texts) <= self.rows
        assert not any(text.has_ended for text in self._texts)
        assert len({id(text.session) for text in self._texts}) == len(self._texts)

    def _stop_expired(self) -> None:
        """Stop sequences that are cancelled or past their deadline."""
        for text in self._texts:
            why = text.ticket.find_stop_reason()
            if why is not None:
                text.stop(why)

    def _prefill_next(self) -> None:
        """Read a chunk of the prompt that was served least recently."""
        waiting = [text for text in self._texts if text.is_prefilling and not text.has_ended]
        if not waiting:
            return
        text = min(waiting, key=lambda text: text.served)
        text.served = self._pass
        before, start, stepped = text.unread_count, self._clock(), self.counts.step_seconds
        if len(waiting) == len(self._texts):
            self._run_guarded([text], partial(text.prefill_chunk, PREFILL_CHUNK))
        else:
            most = choose_chunk_size(
                text.last_chunk,
                self._step_seconds,
                parts=self._model.prefill_parts,
                min_tokens=self._least_chunk,
            )
            prefill = partial(text.prefill_chunk, most, prefill=self._prefill_interleaved)
            self._run_guarded([text], prefill)
        stepped = self.counts.step_seconds - stepped
        seconds = self._clock() - start - stepped
        text.last_chunk = chunk = PrefillChunk(before - text.unread_count, seconds)
        self.counts.prompt_tokens += chunk.tokens
        self.counts.prompt_seconds += chunk.seconds

    def _prefill_interleaved(self, session: DecodeSession, ids: Sequence[int]) -> PrefillResult:
        """Read a chunk; other sequences step between its layers, which its time excludes."""
        self._stepped = self._part_begun = self._clock()
        before = self.counts.step_seconds
        result = self._model.prefill(session, ids, between_layers=self._step_if_due)
        stepped = self.counts.step_seconds - before
        return replace(result, ms=result.ms - stepped * 1e3)

    def _step_if_due(self) -> None:
        """Between two layers of a chunk, run a decode step if the others waited too long."""
        now = self._clock()
        part, self._part_begun = now - self._part_begun, now
        if is_step_due(waited=now - self._stepped, part=part, step_seconds=self._step_seconds):
            self._decode_step()
            self._stepped = self._part_begun = self._clock()

    def _decode_step(self) -> None:
        """Read one token of every decoding sequence, and sample the next ones."""
        written = [text for text in self._texts if _is_decoding(text)]
        texts = [text for text in written if text.reserve_next_token()]
        self.blocked = [text for text in written if text not in texts]
        if not texts:
            return
        start = self._clock()
        self._run_guarded(texts, partial(self._decode_together, texts))
        seconds = self._clock() - start
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
        """Run work for sequences; if it fails, they fail with it."""
        try:
            work()
        except ExpertError as error:
            for text in texts:
                text.error = error


def _is_decoding(text: RunningSequence) -> bool:
    """Return whether a sequence waits for its next token."""
    return not (text.is_prefilling or text.has_ended or text.ticket.find_stop_reason())


KV_BLOCK_TOKENS = 16
"""Tokens of a KV block; packed bases have pages of this size."""


@dataclass(slots=True)
class JobTotals:
    """Counts of jobs so far."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Jobs refused because the queue was full."""
    paused: int = 0
    """Sequences that gave their memory to earlier ones, and resumed later."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    experts: ExpertJobCounts = field(default_factory=ExpertJobCounts)
    """Number of answered jobs per expert."""

    def copy(self) -> "JobTotals":
        """Return a copy of the counts."""
        return replace(self, experts=self.experts.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State of the engine at one moment; sizes in bytes, counts since the start."""

    waiting: int
    """Jobs in the queue."""
    preparing: int
    """Jobs that are being planned or loaded, or are ready for a row."""
    running: int
    """Sequences in the batch."""
    rows: int
    """Maximum number of sequences."""
    totals: JobTotals
    counts: StepCounters
    held: Mapping[Purpose, int]
    limit: int
    peak: int
    kv_limit: int
    """Memory available to KV beside everything else that is held."""
    kv_in_use: int
    """KV of running sequences; `held` includes kept KV."""
    kv_kept_limit: int
    """Maximum kept KV."""
    kv_block: int
    """Bytes of a block of `KV_BLOCK_TOKENS` tokens."""
    traffic: Mapping[str, TierTraffic]
    """By tier."""
    running_plans: tuple[tuple[str, ...], ...]
    """The experts of each sequence in the batch."""
    waiting_plans: tuple[tuple[str, ...], ...]
    """The experts of each prepared job, and those that jobs in the queue request."""
    routed: RoutedExpertStats | None = None
    """Routed-expert statistics; None where the base has no such experts."""
    observed: CounterSnapshot | None = None
    """Counts of routed experts, layer by layer; None where nothing is counted."""
    resident_experts: Mapping[int, int] = field(default_factory=dict)
    """Number of experts with a slot, by layer number; empty where none needs one."""
