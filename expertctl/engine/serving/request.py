"""Jobs of the serving engine: their events, their state, and their running sequences.

Chunked prefill (Agrawal et al. 2024, Sarathi-Serve) delays the other sequences of a batch by one
chunk between two tokens. The cost of a chunk depends on the base, on the processor and, for a long
prompt, on how much of it was read before: then even a few tokens cost several decode steps. So the
chunk size follows from measured times, and where a model can be interrupted between layers, other
sequences step there (`is_step_due`): chunks stay large enough to be efficient, and no gap is longer
than a few layers and a step. There are few sizes, because the thread count is tuned for each size
separately.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import monotonic as now
from typing import Literal

import numpy as np

from expertctl.engine.adapters.compile import CompiledPlan
from expertctl.engine.decoding import PREFILL_CHUNK, PrefillResult
from expertctl.engine.generation import (
    DEFAULT_STOP_RULES,
    DecodeSession,
    GenerationOutput,
    OutputWriter,
    StopRules,
    measure_elapsed_ms,
)
from expertctl.engine.kv.kv_cache import KVCacheBase
from expertctl.engine.preparation import PreparedRequest
from expertctl.engine.request import RunRequest
from expertctl.engine.result import BytesRead, RunResult
from expertctl.engine.result_builder import GenerationContext, StageTimer
from expertctl.engine.sampling import Scores
from expertctl.engine.text.answer_format import FormatCheck
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import BudgetError, CancelledError, ExpertError, TimedOutError
from expertctl.reference import Reference
from expertctl.routing.plan import Plan
from expertctl.routing.planner import PlannedPrompt
from expertctl.routing.request import ForcedExpert

DEFAULT_PRIORITY = 5
"""Of 0 to 9; 9 is served first."""
CheckFunction = Callable[[str], FormatCheck | str]
"""Checks the format of an answer; called once, with the whole answer.

Where no format was requested, it returns the part of the answer for the default check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A request to the serving engine, with its owner.

    Scheduling is fair among owners; the caller ensures that cache keys begin with ``owner``.
    ``deadline`` is a time of `time.monotonic`, at which the answer ends as it is.
    """

    id: str
    request: RunRequest
    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    answers: int = 1
    """Number of answers, each sampled with its own seed."""
    logprobs: int | None = None
    """Number of likeliest tokens reported with each sampled one; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens; None: they are not scored."""
    stop_rules: StopRules = DEFAULT_STOP_RULES
    remember: bool = True
    """Whether it is recorded as a use of its experts."""
    check: CheckFunction | None = None
    """None: the format that the experts or the prompt require."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text as far as it has one, and its log-probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an answer, and the likeliest ones at its position, in descending order."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The plan is made and the prompt is being read."""

    plan: Plan
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt whose KV was reused."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New final text, the number of its answer, and its tokens if requested.

    The text may be empty where there are tokens: theirs is not final yet. The log-probabilities of
    the prompt come once, with the first delta of the first answer, even if that is empty.
    """

    number: int
    text: str
    sampled: tuple[SampledToken, ...] = ()
    token_count: int = 0
    """Number of tokens of this answer so far."""
    prompt: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class JobFinished:
    """All answers of a job, in order."""

    results: tuple[RunResult, ...]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Why there is no answer, or no complete one."""

    error: ExpertError


JobEvent = JobStarted | OutputDelta | JobFinished | JobFailed
"""`JobFinished` or `JobFailed` is the last event, and comes once; a job that is cancelled after it
started gets `JobFinished`."""
TokenSink = Callable[[JobEvent], None]
"""Called by one engine thread at a time; returns at once and never raises."""


RequestStage = Literal["waiting", "preparing", "loading", "ready", "running", "concluding", "ended"]
StopReason = Literal["cancelled", "timeout"]


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan that is pinned until ``pins`` are closed."""

    plan: CompiledPlan
    pins: ExitStack
    loads: int
    """Number of experts that were read for it."""
    bytes_moved: BytesRead


@dataclass(slots=True, eq=False)
class RequestState:
    """One job; in each stage one thread works on it, and passes it on."""

    job: GenerationJob
    sink: TokenSink
    left_queue_at: float = field(default_factory=now)
    """When its preparation started; until then, when it arrived."""
    timer: StageTimer = field(default_factory=StageTimer)
    """Runs until its last sequence starts; each sequence has a copy from its own start."""
    stage: RequestStage = "waiting"
    is_cancelled: bool = False
    planned: PlannedPrompt | None = None
    prepared: PreparedRequest | None = None
    memory: LoadedPlan | None = None
    memory_missing_since: float | None = None
    """Since when its experts do not fit."""
    missing_at_freed_count: int | None = None
    """Value of the scheduler's ``freed_count`` when they last did not fit."""
    started_count: int = 0
    """Number of its sequences that have started."""
    contexts: dict[int, GenerationContext] = field(default_factory=dict)
    outputs: dict[int, GenerationOutput] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Owner of the job, for fair scheduling."""
        return self.job.owner

    @property
    def priority(self) -> int:
        """0 to 9; 9 is served first."""
        return self.job.priority

    @property
    def cost(self) -> float:
        """Number of answers."""
        return float(self.job.answers)

    @property
    def refs(self) -> tuple[str, ...]:
        """The experts of its plan; before planning, those that were requested."""
        if self.planned is not None:
            return tuple(expert.ref for expert in self.planned.result.plan.experts)
        named = (one.target for one in self.job.request.experts if isinstance(one, ForcedExpert))
        return tuple(str(name.package) for name in named if isinstance(name, Reference))

    def find_stop_reason(self) -> StopReason | None:
        """Return why it must stop; None if it may continue."""
        if self.is_cancelled:
            return "cancelled"
        deadline = self.job.deadline
        return "timeout" if deadline is not None and now() >= deadline else None

    def check_active(self) -> None:
        """Raise if the job must not continue.

        Raises:
            CancelledError: when it was cancelled.
            TimedOutError: when its deadline has passed.
        """
        match self.find_stop_reason():
            case "cancelled":
                raise CancelledError("the job was cancelled")
            case "timeout":
                raise TimedOutError(
                    "the deadline of this request passed before it started",
                    hint="allow more time, or retry when fewer requests are waiting",
                )
            case None:
                return

    @property
    def cache_key(self) -> str | None:
        """The key of KV that its sequences may reuse; those of one job always share one."""
        return self.own_key or self.job.request.cache_key

    @property
    def own_key(self) -> str | None:
        """A key that no other request has; None where the request brings its own."""
        return f"\0{self.job.id}" if self.job.request.cache_key is None else None

    def emit(self, event: JobEvent) -> None:
        """Send an event to the sink of the job."""
        self.sink(event)

    def release(self) -> None:
        """Unpin its plan."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.pins.close()


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


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A part of a prompt that was read in one pass: its tokens and seconds."""

    tokens: int
    seconds: float


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


PrefillFunction = Callable[[DecodeSession, Sequence[int]], PrefillResult]


def prefill_whole(session: DecodeSession, ids: Sequence[int]) -> PrefillResult:
    """Read a part of a prompt without interruption."""
    return session.prefill(ids)


class RunningSequence:
    """One answer in its row of the batch: its prompt is read in chunks, then it is decoded."""

    def __init__(
        self,
        ticket: RequestState,
        number: int,
        session: DecodeSession,
        writer: OutputWriter,
        *,
        cache: KVCacheBase,
        unread: Sequence[int],
        tokenizer: Tokenizer,
        scores: PromptLogprobs | None = None,
    ) -> None:
        """Start with ``unread`` tokens of the prompt, at least one.

        ``scores`` is filled in by ``session``, and reported with the first delta.
        """
        self.ticket, self.number, self.writer = ticket, number, writer
        self.resume(session, cache, unread)
        self.served = 0
        """The pass in which it was served last."""
        self.last_chunk: PrefillChunk | None = None
        """The last chunk of its prompt."""
        self.error: ExpertError | None = None
        """The error that ended it."""
        self.scores = scores
        self._untold = scores
        self._tokenizer, self._is_again = tokenizer, False
        self._begun = time.perf_counter()
        self._prefilled, self._prefill_ms = 0, 0.0
        self._first_ms: float | None = None
        self._decode_ms, self._steps = 0.0, 0

    def resume(self, session: DecodeSession, cache: KVCacheBase, unread: Sequence[int]) -> None:
        """Use a cache with all tokens but ``unread``, of which there is at least one."""
        assert unread, "at least one token is read, for its scores"
        self.session, self.room, self._unread = session, cache, list(unread)

    def pause(self) -> None:
        """Release its cache; tokens read again later count as decoding time."""
        del self.session, self.room
        self._unread, self._is_again = [], bool(self.writer.tokens)

    def reserve_next_token(self) -> bool:
        """Allocate memory for the next token; return whether there is enough."""
        try:
            self.room.ensure_capacity(1)
        except BudgetError:
            return False
        return True

    @property
    def is_prefilling(self) -> bool:
        """Whether part of its prompt is still unread."""
        return bool(self._unread)

    @property
    def unread_count(self) -> int:
        """Number of unread prompt tokens."""
        return len(self._unread)

    @property
    def has_ended(self) -> bool:
        """Whether it has finished or failed."""
        return self.writer.finish_reason is not None or self.error is not None

    @property
    def next_input_token(self) -> int:
        """The token to read in the next decode step."""
        return self.writer.tokens[-1]

    def prefill_chunk(self, max_tokens: int, *, prefill: PrefillFunction = prefill_whole) -> None:
        """Read up to ``max_tokens`` of the prompt; after its last, sample the first of the answer.

        Raises:
            ExpertError: when its scores are not numbers.
        """
        result = prefill(self.session, self._unread[:max_tokens])  # it counts as unread meanwhile
        self._unread = self._unread[max_tokens:]
        if self._is_again:
            self._decode_ms += result.ms
        else:
            self._prefilled += result.tokens
            self._prefill_ms += result.ms
        if self._unread:
            return
        if self.writer.max_tokens == 0:
            self.writer.end_empty()
            self._emit("", ())
        else:
            self.take_logits(result.logits)
        self._first_ms = self._first_ms or measure_elapsed_ms(self._begun)

    def record_step(self, ms: float) -> None:
        """Count a decode step of this sequence."""
        self._decode_ms, self._steps = self._decode_ms + ms, self._steps + 1

    def take_logits(self, logits: Scores) -> None:
        """Sample the next token from logits [vocab], and report the text that became final.

        Raises:
            IncompatibleError: when they are not numbers.
        """
        wanted, known = self.ticket.job.logprobs, len(self.writer.tokens)
        text = self.writer.take_logits(logits)
        drawn: tuple[SampledToken, ...] = ()
        if wanted is not None and len(self.writer.tokens) > known:
            drawn = (_build_sampled_token(self.writer.tokens[-1], logits, wanted, self._tokenizer),)
        self._emit(text, drawn)

    def stop(self, why: StopReason) -> None:
        """End it here."""
        self._unread = []
        self._emit(self.writer.stop(why), ())

    def build_output(self) -> GenerationOutput:
        """Return the output, once it has ended."""
        reason, first_ms = self.writer.finish_reason, self._first_ms
        assert reason is not None, "a text that goes on is not generated"
        return GenerationOutput(
            text="".join(self.writer.pieces),
            tokens=tuple(self.writer.tokens),
            finish_reason=reason,
            prefill_tokens=self._prefilled,
            prefill_ms=self._prefill_ms,
            first_token_ms=measure_elapsed_ms(self._begun) if first_ms is None else first_ms,
            decode_ms=self._decode_ms,
            decode_steps=self._steps,
            stopped_by=self.writer.stopped_by,
        )

    def _emit(self, text: str, sampled: tuple[SampledToken, ...]) -> None:
        prompt = self._untold if self.scores is not None and self.scores.is_complete else None
        if text or sampled or prompt is not None:
            self.ticket.emit(
                OutputDelta(self.number, text, sampled, len(self.writer.tokens), prompt)
            )
        if prompt is not None:
            self._untold = None


def _build_sampled_token(
    token: int, logits: Scores, top_count: int, tokenizer: Tokenizer
) -> SampledToken:
    """Return a token with its probability from the model, before temperature and penalties."""
    scores = logits.astype(np.float64)
    best = scores.max()
    scores -= best + np.log(np.exp(scores - best).sum())
    top = np.argpartition(scores, -top_count)[-top_count:].tolist() if top_count else []
    order = sorted(top, key=lambda other: (-scores[other], other))

    def likely(one: int) -> TokenLogprob:
        return TokenLogprob(one, tokenizer.decode([one]), float(scores[one]))

    return SampledToken(likely(token), tuple(likely(one) for one in order))
