"""What is asked of the batch, and what comes back: events, each to the sink of its job.

`Ticket`: one job on its way through the engine, and what has been gathered for it.

How much of a prompt is read at a time while other texts wait for their next token.

Chunked prefill (Agrawal et al. 2024, Sarathi-Serve) holds up the other texts of a batch by one
chunk between two tokens. What a chunk costs depends on the base, on the processor and, once a
prompt is long, on how much of it was read before: then even a few tokens cost several decode steps.
So the size of a chunk follows from measured times, and where a model can be stopped between layers,
other texts step there (`is_step_due`): chunks stay large enough to be efficient, and no gap is
longer than a few layers and a step. Sizes are few, because the number of threads is tuned for each
size apart (`engine.pace`).

`Text`: one answer that is being written, in its row of the batch.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import monotonic as now
from typing import Any, Literal

import numpy as np
from torch import Tensor

from expertctl.engine.adapters.compile import CompiledPlan
from expertctl.engine.generation import (
    DEFAULT_STOP_RULES,
    DecodeSession,
    GenerationOutput,
    OutputWriter,
    StopRules,
)
from expertctl.engine.kv.sequence_cache import KVCacheBase
from expertctl.engine.model.backends import RunnableModel
from expertctl.engine.model.decoder import PREFILL_CHUNK, PrefillResult
from expertctl.engine.preparation import PreparedRequest
from expertctl.engine.request import RunRequest
from expertctl.engine.result import BytesRead, RunResult
from expertctl.engine.result_builder import GenerationContext, StageTimer
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
"""Tells whether an answer has the form that was asked for; called once, with the whole answer.

Where none was asked for, it returns the part of the answer that the usual check is for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A request that takes part in the batch, and its owner.

    Turns are fair among owners; the caller sees to it that keys of kept texts begin with ``owner``.
    ``deadline`` is a time of `time.monotonic`: what is there by then is the answer.
    """

    id: str
    request: RunRequest
    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    answers: int = 1
    """How many answers, each drawn with a seed of its own."""
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each drawn one; None: no scores at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; None: they are not scored."""
    stop_rules: StopRules = DEFAULT_STOP_RULES
    remember: bool = True
    """Whether it counts as a use of its experts."""
    check: CheckFunction | None = None
    """None: the form that the experts or the prompt call for."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text as far as it has one, and the logarithm of its probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an answer, and the likeliest ones in its place, the likeliest first."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The plan is made and the prompt is being read."""

    plan: Plan
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt that an earlier text of the same key and plan had read."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Text that has become certain, the number of its answer, and its tokens if asked for.

    The text may be empty where there are tokens: theirs is not certain yet. The log-probabilities
    of the prompt come once, with the first piece of the first answer, however empty that is.
    """

    number: int
    text: str
    sampled: tuple[SampledToken, ...] = ()
    token_count: int = 0
    """How many tokens of this answer there are by now."""
    prompt: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class JobFinished:
    """All answers of a job, in order."""

    results: tuple[RunResult, ...]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Why there is no answer, or no more of it."""

    error: ExpertError


JobEvent = JobStarted | OutputDelta | JobFinished | JobFailed
"""`JobFinished` or `JobFailed` comes last, and once; a job cancelled after it began gets `JobFinished`."""
TokenSink = Callable[[JobEvent], None]
"""Called by the threads of the engine, one after the other; returns at once and never raises."""


RequestStage = Literal["waiting", "preparing", "loading", "ready", "running", "concluding", "ended"]
StopReason = Literal["cancelled", "timeout"]


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan that is pinned, until ``pins`` are closed."""

    model: RunnableModel
    plan: CompiledPlan
    pins: ExitStack
    loads: int
    """How many experts were read for it."""
    bytes_moved: BytesRead


@dataclass(slots=True, eq=False)
class RequestState:
    """One job; in each stage one thread works at it, and hands it on."""

    job: GenerationJob
    sink: TokenSink
    left_queue_at: float = field(default_factory=now)
    """When it began to be prepared; until then, when it came."""
    timer: StageTimer = field(default_factory=StageTimer)
    """Runs until its last text begins; each text has a copy from its own beginning."""
    stage: RequestStage = "waiting"
    is_cancelled: bool = False
    planned: PlannedPrompt | None = None
    prepared: PreparedRequest | None = None
    memory: LoadedPlan | None = None
    memory_missing_since: float | None = None
    """Since when its experts find no memory."""
    missing_at_freed_count: int | None = None
    """How often memory had been given back when they last found too little."""
    started_count: int = 0
    """How many of its texts have begun."""
    contexts: dict[int, GenerationContext] = field(default_factory=dict)
    outputs: dict[int, GenerationOutput] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Who asked."""
        return self.job.owner

    @property
    def priority(self) -> int:
        """0 to 9."""
        return self.job.priority

    @property
    def cost(self) -> float:
        """How many answers it wants."""
        return float(self.job.answers)

    @property
    def refs(self) -> tuple[str, ...]:
        """The experts of its plan; until there is a plan, those that were asked for."""
        if self.planned is not None:
            return tuple(expert.ref for expert in self.planned.result.plan.experts)
        named = (one.target for one in self.job.request.experts if isinstance(one, ForcedExpert))
        return tuple(str(name.package) for name in named if isinstance(name, Reference))

    def find_stop_reason(self) -> StopReason | None:
        """Why it must not go on; None if it may."""
        if self.is_cancelled:
            return "cancelled"
        deadline = self.job.deadline
        return "timeout" if deadline is not None and now() >= deadline else None

    def check_active(self) -> None:
        """Go no further with a job that is no longer wanted.

        Raises:
            CancelledError: when it was called off.
            TimedOutError: when its time is over.
        """
        match self.find_stop_reason():
            case "cancelled":
                raise CancelledError("the job was cancelled")
            case "timeout":
                raise TimedOutError(
                    "the time for this answer was over before it began",
                    hint="give it more time, or send it when fewer requests wait",
                )
            case None:
                return

    @property
    def cache_key(self) -> str | None:
        """The key of earlier texts that may begin its own; texts of one job always share one."""
        return self.own_key or self.job.request.cache_key

    @property
    def own_key(self) -> str | None:
        """A key that no other request has; None where the request brings its own."""
        return f"\0{self.job.id}" if self.job.request.cache_key is None else None

    def emit(self, event: JobEvent) -> None:
        """Give an event to the sink of the job."""
        self.sink(event)

    def release(self) -> None:
        """Let go of what is pinned for it."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.pins.close()


STEPS_BETWEEN_STEPS = 0.8
"""How many decode steps of time a prompt gets between two steps; the rest is for what varies."""
STEPS_A_CHUNK = 1.0
"""How many a whole chunk may take where it cannot be stopped."""
STEPS_A_LAYER = 0.4
"""How many decode steps one layer of a chunk may take: the shortest time that can be chosen."""
MIN_CHUNK = 4
"""A prompt goes on by so many tokens a pass however long they take, so that it comes to its end."""
MIN_CHUNK_FROM_DISK = 128
"""The same where not all routed experts are in memory: each chunk may read most of them."""
FIRST_CHUNK = 8
"""The first chunk of a prompt, while nothing is known of it."""
CHUNK_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, PREFILL_CHUNK)
MAX_GROWTH = 2.0
"""The factor by which the next chunk may be larger: one short measurement proves little."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A part of a prompt that was read in one pass: its tokens, and the seconds that took."""

    tokens: int
    seconds: float


def choose_chunk_size(
    last: PrefillChunk | None,
    step_seconds: Sequence[float],
    *,
    parts: int = 1,
    min_tokens: int = MIN_CHUNK,
) -> int:
    """Return how many tokens of a prompt to read next, beside texts that are decoded.

    ``last`` is the last chunk of the same prompt, without the steps of others; ``step_seconds`` is
    what recent steps took; ``parts`` is into how many parts a pass is cut. The result is one of
    `CHUNK_SIZES`, or ``least`` where that is larger.
    """
    if last is None or not last.tokens or not step_seconds:
        return max(FIRST_CHUNK, min_tokens)
    steps = max(STEPS_A_CHUNK, STEPS_A_LAYER * parts)
    allowed, most = steps * median(step_seconds), MAX_GROWTH * last.tokens
    fitting = most if last.seconds <= 0 else min(most, last.tokens * allowed / last.seconds)
    sizes = [size for size in CHUNK_SIZES if size <= fitting]
    return max(sizes[-1] if sizes else CHUNK_SIZES[0], min_tokens)


def is_step_due(*, waited: float, part: float, step_seconds: Sequence[float]) -> bool:
    """Tell whether other texts step before the next part of a pass.

    They have ``waited`` so many seconds; the last part took ``part``, and so will the next.
    """
    return not step_seconds or waited + part > STEPS_BETWEEN_STEPS * median(step_seconds)


PrefillFunction = Callable[[DecodeSession, Sequence[int]], PrefillResult]


def prefill_whole(session: DecodeSession, ids: Sequence[int]) -> PrefillResult:
    """Read a part of a prompt in one go."""
    return session.prefill(ids)


class RunningSequence:
    """First its prompt is read, a stretch at a time, then it is written, token by token."""

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
        """Begin with ``unread`` tokens of the prompt, at least one.

        ``scores`` is filled in by ``reading``, and told with the first piece.
        """
        self.ticket, self.number, self.writer = ticket, number, writer
        self.resume(session, cache, unread)
        self.served = 0
        """In which pass it was served last."""
        self.last_chunk: PrefillChunk | None = None
        """What of its prompt was read last."""
        self.error: ExpertError | None = None
        """Why it cannot go on."""
        self.scores = scores
        self._untold = scores
        self._tokenizer, self._is_again = tokenizer, False
        self._begun = time.perf_counter()
        self._prefilled, self._prefill_ms = 0, 0.0
        self._first_ms: float | None = None
        self._decode_ms, self._steps = 0.0, 0

    def resume(self, session: DecodeSession, cache: KVCacheBase, unread: Sequence[int]) -> None:
        """Take keys and values of all tokens but ``unread``, of which there is one at least."""
        assert unread, "at least one token is read, for its scores"
        self.session, self.room, self._unread = session, cache, list(unread)

    def pause(self) -> None:
        """Let go of its keys and values; what it reads again is counted as writing."""
        del self.session, self.room
        self._unread, self._is_again = [], bool(self.writer.tokens)

    def reserve_next_token(self) -> bool:
        """Take memory for the next token; tell whether there is enough."""
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
        """How many tokens of its prompt are left."""
        return len(self._unread)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is written."""
        return self.writer.finish_reason is not None or self.error is not None

    @property
    def next_input_token(self) -> int:
        """The token that is read next, while the text is written."""
        return self.writer.tokens[-1]

    def prefill_chunk(self, max_tokens: int, *, prefill: PrefillFunction = prefill_whole) -> None:
        """Read so many tokens of the prompt at most; after its last, draw the first of the answer.

        Raises:
            ExpertError: when its scores are not numbers.
        """
        result = prefill(self.session, self._unread[:max_tokens])  # it is being read meanwhile
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
        self._first_ms = self._first_ms or self._measure_elapsed_ms()

    def record_step(self, ms: float) -> None:
        """Count a step that it took part in."""
        self._decode_ms, self._steps = self._decode_ms + ms, self._steps + 1

    def take_logits(self, logits: Tensor) -> None:
        """Draw the next token from scores [vocab], and tell what is certain now.

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
        """End it where it is."""
        self._unread = []
        self._emit(self.writer.stop(why), ())

    def build_output(self) -> GenerationOutput:
        """Return what came of it, once it has ended."""
        reason, first_ms = self.writer.finish_reason, self._first_ms
        assert reason is not None, "a text that goes on is not generated"
        return GenerationOutput(
            text="".join(self.writer.pieces),
            tokens=tuple(self.writer.tokens),
            finish_reason=reason,
            prefill_tokens=self._prefilled,
            prefill_ms=self._prefill_ms,
            first_token_ms=self._measure_elapsed_ms() if first_ms is None else first_ms,
            decode_ms=self._decode_ms,
            decode_steps=self._steps,
            stopped_by=self.writer.stopped_by,
        )

    def _measure_elapsed_ms(self) -> float:
        """Milliseconds since it began."""
        return (time.perf_counter() - self._begun) * 1e3

    def _emit(self, text: str, sampled: tuple[SampledToken, ...]) -> None:
        prompt = self._untold if self.scores is not None and self.scores.is_complete else None
        if text or sampled or prompt is not None:
            self.ticket.emit(
                OutputDelta(self.number, text, sampled, len(self.writer.tokens), prompt)
            )
        if prompt is not None:
            self._untold = None


def _build_sampled_token(
    token: int, logits: Tensor, top_count: int, tokenizer: Tokenizer
) -> SampledToken:
    """Return a token with its probability, by the model alone: before temperature and penalties."""
    scores: np.ndarray[Any, Any] = logits.float().numpy().astype(np.float64)
    best = scores.max()
    scores -= best + np.log(np.exp(scores - best).sum())
    top = np.argpartition(scores, -top_count)[-top_count:].tolist() if top_count else []
    order = sorted(top, key=lambda other: (-scores[other], other))

    def likely(one: int) -> TokenLogprob:
        return TokenLogprob(one, tokenizer.decode([one]), float(scores[one]))

    return SampledToken(likely(token), tuple(likely(one) for one in order))
