"""One sequence: what it reports to its consumer, and its state in a row of a batch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from expertctl.engine.decoding import PrefillResult
from expertctl.engine.generation import (
    DecodeSession,
    GenerationOutput,
    OutputWriter,
    measure_elapsed_ms,
)
from expertctl.engine.sampling import Scores
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import BudgetError, ExpertError

StopReason = Literal["cancelled", "timeout"]


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
class PrefillChunk:
    """A part of a prompt that was read in one pass: its tokens and seconds."""

    tokens: int
    seconds: float


class GrowingCache(Protocol):
    """The memory of a sequence, as far as a batch needs it."""

    def ensure_capacity(self, tokens: int) -> None:
        """Allocate memory for so many more tokens.

        Raises:
            BudgetError: when there is not enough.
        """


class SequenceConsumer(Protocol):
    """Receives the text of a sequence, and decides whether it continues."""

    def find_stop_reason(self) -> StopReason | None:
        """Return why the sequence must stop; None if it may continue."""

    def emit(self, event: OutputDelta) -> None:
        """Take new text."""


Consumer = TypeVar("Consumer", bound=SequenceConsumer)
PrefillFunction = Callable[[DecodeSession, Sequence[int]], PrefillResult]
"""Reads a part of a prompt in a session."""


class RunningSequence(Generic[Consumer]):
    """One answer in its row of the batch: its prompt is read in chunks, then it is decoded."""

    def __init__(
        self,
        consumer: Consumer,
        session: DecodeSession,
        writer: OutputWriter,
        *,
        cache: GrowingCache | None,
        unread: Sequence[int],
        number: int = 0,
        logprobs: int | None = None,
        scores: PromptLogprobs | None = None,
    ) -> None:
        """Start with ``unread`` tokens of the prompt, at least one.

        A session that allocates its own memory has no ``cache``. ``number`` is that of the answer
        among those of its consumer. With ``logprobs`` each token is reported with so many of the
        likeliest. ``scores`` is filled in by ``session``, and reported with the first delta.
        """
        self.consumer, self.number, self.writer = consumer, number, writer
        self.resume(session, cache, unread)
        self.served = 0
        """The pass in which it was served last."""
        self.last_chunk: PrefillChunk | None = None
        """The last chunk of its prompt."""
        self.error: ExpertError | None = None
        """The error that ended it."""
        self.scores = scores
        self._unreported_scores, self._logprobs = scores, logprobs
        self._is_again = False
        self._started = time.perf_counter()
        self._prefilled, self._prefill_ms = 0, 0.0
        self._first_ms: float | None = None
        self._decode_ms, self._steps = 0.0, 0

    def resume(
        self, session: DecodeSession, cache: GrowingCache | None, unread: Sequence[int]
    ) -> None:
        """Use a cache with all tokens but ``unread``, of which there is at least one."""
        assert unread, "at least one token is read, for its scores"
        self.session, self.cache, self._unread = session, cache, list(unread)

    def pause(self) -> None:
        """Release its cache; tokens read again later count as decoding time."""
        self.release()
        self._unread, self._is_again = [], bool(self.writer.tokens)

    def release(self) -> None:
        """Drop the references to its cache, before its owner takes it back."""
        del self.session, self.cache

    def reserve_next_token(self) -> bool:
        """Allocate memory for the next token; return whether there is enough."""
        try:
            self.ensure_capacity()
        except BudgetError:
            return False
        return True

    def ensure_capacity(self) -> None:
        """Allocate memory for the next token.

        Raises:
            BudgetError: when there is not enough.
        """
        if self.cache is not None:
            self.cache.ensure_capacity(1)

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

    def prefill_chunk(self, max_tokens: int, prefill: PrefillFunction) -> None:
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
        self._first_ms = self._first_ms or measure_elapsed_ms(self._started)

    def record_step(self, ms: float) -> None:
        """Count a decode step of this sequence."""
        self._decode_ms, self._steps = self._decode_ms + ms, self._steps + 1

    def take_logits(self, logits: Scores) -> None:
        """Sample the next token from logits [vocab], and report the text that became final.

        Raises:
            IncompatibleError: when they are not numbers.
        """
        wanted, known = self._logprobs, len(self.writer.tokens)
        text = self.writer.take_logits(logits)
        drawn: tuple[SampledToken, ...] = ()
        if wanted is not None and len(self.writer.tokens) > known:
            drawn = (
                _build_sampled_token(self.writer.tokens[-1], logits, wanted, self.writer.tokenizer),
            )
        self._emit(text, drawn)

    def stop(self, why: StopReason) -> None:
        """End it here."""
        self._unread = []
        self._emit(self.writer.stop(why), ())

    def build_output(self) -> GenerationOutput:
        """Return the output, once it has ended."""
        reason, first_ms = self.writer.finish_reason, self._first_ms
        assert reason is not None, "it has not ended"
        return GenerationOutput(
            text="".join(self.writer.pieces),
            tokens=tuple(self.writer.tokens),
            finish_reason=reason,
            prefill_tokens=self._prefilled,
            prefill_ms=self._prefill_ms,
            first_token_ms=measure_elapsed_ms(self._started) if first_ms is None else first_ms,
            decode_ms=self._decode_ms,
            decode_steps=self._steps,
            stopped_by=self.writer.stopped_by,
        )

    def _emit(self, text: str, sampled: tuple[SampledToken, ...]) -> None:
        prompt = (
            self._unreported_scores if self.scores is not None and self.scores.is_complete else None
        )
        if text or sampled or prompt is not None:
            self.consumer.emit(
                OutputDelta(self.number, text, sampled, len(self.writer.tokens), prompt)
            )
        if prompt is not None:
            self._unreported_scores = None


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
