"""The running batch: the sequences that are computed together, each row with its own plan.

One pass reads a chunk of one prompt and then one token of every sequence that is past its prompt.
A run is a batch of one row (`generate_text`), the engine of a server has many. One thread computes.
The other sequences of a batch affect a result in the last bits of floating point only, and on a
base that kernels run not at all: neither the batch nor the chunk size changes a bit there.

Chunked prefill (Agrawal et al. 2024, Sarathi-Serve) delays the other sequences of a batch by one
chunk between two tokens. The cost of a chunk depends on the base, on the processor and, for a long
prompt, on how much of it was read before: then even a few tokens cost several decode steps. So the
chunk size follows from measured times, and where a model can be interrupted between layers, other
sequences step there (`is_step_due`): chunks stay large enough to be efficient, and no gap is longer
than a few layers and a step. There are few sizes, because the thread count is tuned for each size
separately.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Generic

from expertctl.engine.arrays import AnyArray
from expertctl.engine.decoding import PREFILL_CHUNK, PrefillResult
from expertctl.engine.generation import (
    CancelCheck,
    DecodeSession,
    GenerationOutput,
    SteppedModel,
    never_cancelled,
)
from expertctl.engine.running_sequence import (
    Consumer,
    OutputDelta,
    PrefillChunk,
    PrefillFunction,
    RunningSequence,
    StopReason,
)
from expertctl.errors import CancelledError, ExpertError

STEPS_BETWEEN_STEPS = 0.8
"""Time of a prompt between two steps, in decode steps; the rest absorbs variation."""
STEPS_A_CHUNK = 1.0
"""Maximum decode steps for a whole chunk where it cannot be interrupted."""
STEPS_A_LAYER = 0.4
"""Maximum decode steps for one layer of a chunk: the shortest time that can be chosen."""
MIN_CHUNK = 4
"""Minimum tokens per pass, whatever the time, so that every prompt makes progress."""
MIN_CHUNK_FROM_DISK = 128
"""The same where not all routed experts are in memory: each chunk may read most of them."""
FIRST_CHUNK = 8
"""Size of a prompt's first chunk, before any measurement."""
CHUNK_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, PREFILL_CHUNK)
MAX_GROWTH = 2.0
"""Maximum growth from one chunk to the next: one short measurement is not reliable."""


def choose_chunk_size(
    last: PrefillChunk | None,
    step_seconds: Sequence[float],
    *,
    parts: int = 1,
    min_tokens: int = MIN_CHUNK,
) -> int:
    """Return the number of prompt tokens to read next, beside sequences being decoded.

    ``last`` is the last chunk of the same prompt, without the steps of others; ``step_seconds`` are
    the times of recent steps; ``parts`` is the number of parts of a pass. The result is one of
    `CHUNK_SIZES`, or ``min_tokens`` where that is larger.
    """
    if last is None or not last.tokens or not step_seconds:
        return max(FIRST_CHUNK, min_tokens)
    steps = max(STEPS_A_CHUNK, STEPS_A_LAYER * parts)
    allowed, most = steps * median(step_seconds), MAX_GROWTH * last.tokens
    fitting = most if last.seconds <= 0 else min(most, last.tokens * allowed / last.seconds)
    sizes = [size for size in CHUNK_SIZES if size <= fitting]
    return max(sizes[-1] if sizes else CHUNK_SIZES[0], min_tokens)


def is_step_due(*, waited: float, part: float, step_seconds: Sequence[float]) -> bool:
    """Return whether other sequences step before the next part of a pass.

    They have ``waited`` so many seconds; the last part took ``part``, and so will the next.
    """
    return not step_seconds or waited + part > STEPS_BETWEEN_STEPS * median(step_seconds)


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


class RunningBatch(Generic[Consumer]):
    """The owner of the rows."""

    def __init__(
        self,
        model: SteppedModel,
        *,
        rows: int,
        min_chunk: int = MIN_CHUNK,
        max_chunk: int = PREFILL_CHUNK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start empty; ``clock`` returns seconds.

        A prompt is read in chunks of ``max_chunk`` tokens, or, while others decode, of at least
        ``min_chunk``.
        """
        self.rows, self.counts = rows, StepCounters()
        self._min_chunk, self._max_chunk, self._clock = min_chunk, max_chunk, clock
        self._step_seconds = deque[float](maxlen=RECENT_STEPS)
        self._stepped = self._part_begun = 0.0
        """When sequences last stepped or started to wait; when a part of a pass started."""
        self.blocked: list[RunningSequence[Consumer]] = []
        """Sequences that could not continue in the last pass because of missing memory."""
        self._model = model
        self._sequences: list[RunningSequence[Consumer]] = []
        self._pass = 0

    @property
    def sequences(self) -> Sequence[RunningSequence[Consumer]]:
        """The sequences of the batch."""
        return tuple(self._sequences)

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.rows - len(self._sequences)

    def add(self, sequence: RunningSequence[Consumer]) -> None:
        """Add a sequence."""
        assert self.free > 0, "the caller has looked"
        sequence.served = self._pass
        self._sequences.append(sequence)

    def run_pass(self) -> list[RunningSequence[Consumer]]:
        """Run one pass; return the sequences that ended or failed, which are removed.

        If it raises, all sequences are still in the batch.
        """
        self._prefill()
        self._stop_expired()
        self._decode_step()
        return self._remove_ended()

    def run_prefill(self) -> list[RunningSequence[Consumer]]:
        """Run the first half of a pass, which reads a chunk of one prompt."""
        self._prefill()
        return self._remove_ended()

    def run_decode(self) -> list[RunningSequence[Consumer]]:
        """Run the second half of a pass, which decodes one token of every sequence."""
        self._stop_expired()
        self._decode_step()
        return self._remove_ended()

    def fail_all(self, error: ExpertError) -> list[RunningSequence[Consumer]]:
        """Fail all sequences, and return them."""
        over, self._sequences, self.blocked = self._sequences, [], []
        _fail(over, error)
        return over

    def remove(self, sequence: RunningSequence[Consumer]) -> None:
        """Remove a sequence, if it is in the batch."""
        self._sequences = [other for other in self._sequences if other is not sequence]

    def check_integrity(self) -> None:
        """Assert the invariants that hold between passes."""
        assert len(self._sequences) <= self.rows
        assert not any(sequence.has_ended for sequence in self._sequences)
        assert len({id(sequence.session) for sequence in self._sequences}) == len(self._sequences)

    def _prefill(self) -> None:
        self._pass += 1
        self.blocked = []
        self._stop_expired()
        self._prefill_next()

    def _remove_ended(self) -> list[RunningSequence[Consumer]]:
        over = [one for one in self._sequences if one.has_ended]
        if over:
            self._sequences = [one for one in self._sequences if not one.has_ended]
        return over

    def _stop_expired(self) -> None:
        """Stop sequences that are cancelled or past their deadline."""
        for sequence in self._sequences:
            why = sequence.consumer.find_stop_reason()
            if why is not None and not sequence.has_ended:
                sequence.stop(why)

    def _prefill_next(self) -> None:
        """Read a chunk of the prompt that was served least recently."""
        waiting = [one for one in self._sequences if one.is_prefilling and not one.has_ended]
        if not waiting:
            return
        sequence = min(waiting, key=lambda one: one.served)
        sequence.served = self._pass
        before, start, stepped = sequence.unread_count, self._clock(), self.counts.step_seconds
        prefill: PrefillFunction = self._model.prefill
        if len(waiting) == len(self._sequences):
            most = self._max_chunk
        else:
            most = choose_chunk_size(
                sequence.last_chunk,
                self._step_seconds,
                parts=self._model.prefill_parts,
                min_tokens=self._min_chunk,
            )
            prefill = self._prefill_interleaved
        try:
            sequence.prefill_chunk(most, prefill)
        except ExpertError as error:
            _fail([sequence], error)
        stepped = self.counts.step_seconds - stepped
        seconds = self._clock() - start - stepped
        sequence.last_chunk = chunk = PrefillChunk(before - sequence.unread_count, seconds)
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
        decoding = [one for one in self._sequences if _is_decoding(one)]
        sequences = [one for one in decoding if one.reserve_next_token()]
        self.blocked = [one for one in decoding if one not in sequences]
        if not sequences:
            return
        start = self._clock()
        try:
            logits = self._model.step([(one.session, one.next_input_token) for one in sequences])
        except ExpertError as error:
            _fail(sequences, error)
        else:
            _sample(sequences, logits)
        seconds = self._clock() - start
        self._step_seconds.append(seconds)
        for sequence in sequences:
            sequence.record_step(seconds * 1e3)
        self.counts.steps += 1
        self.counts.step_rows += len(sequences)
        self.counts.step_seconds += seconds


def _sample(sequences: Sequence[RunningSequence[Consumer]], logits: AnyArray) -> None:
    """Sample the next token of each sequence, from logits [sequences, vocab]."""
    for sequence, row in zip(sequences, logits, strict=True):
        try:
            sequence.take_logits(row)
        except ExpertError as error:
            _fail([sequence], error)


def _fail(sequences: Sequence[RunningSequence[Consumer]], error: ExpertError) -> None:
    for sequence in sequences:
        sequence.error = error


def _is_decoding(sequence: RunningSequence[Consumer]) -> bool:
    """Return whether a sequence waits for its next token."""
    return not (
        sequence.is_prefilling or sequence.has_ended or sequence.consumer.find_stop_reason()
    )


@dataclass(slots=True)
class TextConsumer:
    """The consumer of one sequence, who takes pieces of its text between two passes."""

    cancelled: CancelCheck = never_cancelled
    pieces: list[str] = field(default_factory=list, init=False)
    _is_cancelled: bool = field(default=False, init=False)

    def check_cancelled(self) -> None:
        """Ask whether the text is still needed; that holds until the next time."""
        self._is_cancelled = self._is_cancelled or self.cancelled()

    def check_prefill(self, _: int) -> None:
        """Ask the same after each chunk of a prompt, as its progress.

        Raises:
            CancelledError: when the text is no longer needed.
        """
        self.check_cancelled()
        if self._is_cancelled:
            raise CancelledError("the prompt is no longer needed")

    def find_stop_reason(self) -> StopReason | None:
        """Return why the sequence must stop; None if it may continue."""
        return "cancelled" if self._is_cancelled else None

    def emit(self, event: OutputDelta) -> None:
        """Take new text."""
        if event.text:
            self.pieces.append(event.text)


def generate_text(
    model: SteppedModel,
    sequence: RunningSequence[TextConsumer],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[str, None, GenerationOutput]:
    """Run a batch of one row: yield text as it becomes final, return the output.

    The prompt is read at once: a decoder splits it. Whether the text is cancelled is asked before
    each token, and during the prompt where its session has `TextConsumer.check_prefill` as
    progress. Timings exclude the time that the consumer of the pieces takes.

    Raises:
        ExpertError: when a pass fails, or its memory does not suffice.
    """
    batch = RunningBatch[TextConsumer](model, rows=1, max_chunk=sequence.unread_count, clock=clock)
    batch.add(sequence)
    pieces = sequence.consumer.pieces
    while batch.sequences:
        if sequence.is_prefilling:
            batch.run_prefill()
        else:
            sequence.consumer.check_cancelled()
            batch.run_decode()
        yield from pieces
        pieces.clear()
        if batch.blocked:
            sequence.ensure_capacity()  # nothing else can free memory: this raises
    error, sequence.error = sequence.error, None
    if isinstance(error, CancelledError) and sequence.consumer.find_stop_reason():
        error = None  # raised by `check_prefill`
        sequence.stop("cancelled")
    if error is None:
        return sequence.build_output()
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame
