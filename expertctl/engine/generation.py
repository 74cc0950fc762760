"""Generate one text: prefill, then one token at a time, as pieces of text that never change.

Stop strings: text is held back while it could still become one, and ends before the first. The
first is the one that is complete first; of those that end at the same character, the longest. So
the answer does not depend on how the text was split into pieces, and no extra token is generated to
decide. A token that ends the text is not part of it. Timings exclude the time taken by the consumer
of the pieces.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.decoding import DecodeResult, PrefillResult
from expertctl.engine.kv.kv_cache import KVCacheBase, rewind_on_error
from expertctl.engine.sampling import (
    REPETITION_WINDOW,
    Mask,
    Scores,
    UniformGenerator,
    sample_token,
)
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine.text.tokenizer import IncrementalDetokenizer, Tokenizer
from expertctl.errors import UsageError
from expertctl.reference import Progress, ignore_progress
from expertctl.routing.plan import SamplingParams

MAX_STOPS = 64
MAX_STOP_TOKENS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a text may end, besides its stop strings and its length.

    No token and no stop string ends it before ``min_tokens`` tokens. With ``ignore_end`` the end
    tokens of the base do not end it; ``stop_tokens`` always do.
    """

    min_tokens: int = 0
    ignore_end: bool = False
    stop_tokens: frozenset[int] = frozenset()

    def list_end_ids(self, of_base: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a text."""
        return self.stop_tokens if self.ignore_end else of_base | self.stop_tokens


DEFAULT_STOP_RULES = StopRules()


class StopScanner:
    """Passes the text of one generation on, up to a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of ``stops``.

        Raises:
            UsageError: for an empty or over-long stop string, or too many of them.
        """
        if len(stops) > MAX_STOPS:
            raise UsageError(f"{len(stops)} stop strings, at most {MAX_STOPS} are allowed")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise UsageError(
                    f"a stop string of {len(stop)} characters",
                    hint=f"it must have 1 to {MAX_STOP_LENGTH}",
                )
        self.found: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add a piece of text; return the text that certainly precedes any stop string."""
        if self.found is not None or not text:
            return ""
        text = self._held + text
        end = self._find_first_end(text)
        if end is None:
            keep = self._count_possible_start(text)
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep]
        self.found = max((s for s in self._stops if text.endswith(s, 0, end)), key=len)
        self._held = ""
        return text[: end - len(self.found)]

    def finish(self) -> str:
        """Return the text held back, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find_first_end(self, text: str) -> int | None:
        found = [(text.find(stop), len(stop)) for stop in self._stops]
        return min((at + length for at, length in found if at >= 0), default=None)

    def _count_possible_start(self, text: str) -> int:
        """Return how many characters at the end could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


CacheIn = TypeVar("CacheIn", contravariant=True)
DeltasIn = TypeVar("DeltasIn", contravariant=True)
Cache = TypeVar("Cache", bound=KVCacheBase)
PlanDeltas = TypeVar("PlanDeltas")
FinishReason = Literal["stop", "length", "timeout", "cancelled"]
CancelCheck = Callable[[], bool]
"""Called between two steps; returns True once the answer is no longer needed."""


def never_cancelled() -> bool:
    """Never cancel."""
    return False


class _CancelledError(Exception):
    """Reading of the prompt was cancelled."""


class DecodeSession(Protocol):
    """A model in the middle of one sequence, with its plan and its KV cache."""

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        """Read a prompt."""

    def decode(self, token: int) -> DecodeResult:
        """Read one more token."""


class TextDecoder(Protocol[CacheIn, DeltasIn]):
    """The interface of our decoders; each has its own types of caches and compiled plans."""

    def prefill(
        self,
        ids: Sequence[int],
        cache: CacheIn,
        deltas: DeltasIn,
        *,
        soft_prompt: AnyArray | None = None,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> PrefillResult:
        """Read a prompt after the tokens in the cache."""

    def decode(self, token: int, cache: CacheIn, deltas: DeltasIn) -> DecodeResult:
        """Read one more token."""


@dataclass(frozen=True, slots=True)
class DecoderSession(Generic[Cache, PlanDeltas]):
    """One of our decoders in the middle of one sequence."""

    decoder: TextDecoder[Cache, PlanDeltas]
    cache: Cache
    deltas: PlanDeltas
    soft_prompt: AnyArray | None = None
    progress: Progress = ignore_progress
    scores: RecordLogits | None = None
    """Gets the logits of every prompt position that is read."""

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        """Read a prompt after the tokens in the cache; ``progress`` counts tokens and may raise."""
        first = self.soft_prompt if self.cache.length == 0 else None
        return self.decoder.prefill(
            ids,
            self.cache,
            self.deltas,
            soft_prompt=first,
            progress=self.progress,
            scores=self.scores,
        )

    def decode(self, token: int) -> DecodeResult:
        """Read one more token."""
        return self.decoder.decode(token, self.cache, self.deltas)


def step_sequentially(sequences: Sequence[tuple[DecodeSession, int]]) -> AnyArray:
    """Read one more token of each sequence in turn; return logits [sequences, vocab].

    If one fails, no sequence has read a token.
    """
    caches = [reading.cache for reading, _ in sequences if isinstance(reading, DecoderSession)]
    with rewind_on_error(caches):
        return np.stack([reading.decode(token).logits for reading, token in sequences])


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The generated text and its cost; ``tokens`` excludes the end token."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prefill_tokens: int
    """Tokens of the prompt that were read, virtual ones included."""
    prefill_ms: float
    first_token_ms: float
    """From the start of prefill to the first token."""
    decode_ms: float
    decode_steps: int
    stopped_by: str | None = None
    """The stop string that ended the text."""

    @property
    def tokens_per_s(self) -> float:
        """Decode steps per second; 0 when there was none."""
        return self.decode_steps / self.decode_ms * 1e3 if self.decode_ms else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens read per second; 0 when there was none."""
        return self.prefill_tokens / self.prefill_ms * 1e3 if self.prefill_ms else 0.0


def generate_text(
    session: DecodeSession,
    ids: Sequence[int],
    writer: "OutputWriter",
    cancelled: CancelCheck = never_cancelled,
) -> Generator[str, None, GenerationOutput]:
    """Yield text as it becomes final; return the complete output at the end.

    ``ids`` are the tokens still to be read; `stop_when_cancelled` may end the prefill early.
    """
    started = time.perf_counter()
    try:
        prefilled = session.prefill(ids)
    except _CancelledError:
        return _build_cancelled_output(measure_elapsed_ms(started))
    piece, first_ms = writer.take_logits(prefilled.logits), measure_elapsed_ms(started)
    decode_ms, steps = 0.0, 0
    while True:
        if piece:
            yield piece
        if writer.finish_reason is not None:
            break
        if cancelled():
            piece = writer.stop()
            continue
        started = time.perf_counter()
        piece = writer.take_logits(session.decode(writer.tokens[-1]).logits)
        decode_ms, steps = decode_ms + measure_elapsed_ms(started), steps + 1
    return GenerationOutput(
        text="".join(writer.pieces),
        tokens=tuple(writer.tokens),
        finish_reason=writer.finish_reason,
        prefill_tokens=prefilled.tokens,
        prefill_ms=prefilled.ms,
        first_token_ms=first_ms,
        decode_ms=decode_ms,
        decode_steps=steps,
        stopped_by=writer.stopped_by,
    )


def stop_when_cancelled(cancelled: CancelCheck) -> Progress:
    """Return a progress callback that ends the prefill of a cancelled request."""

    def check(_: int) -> None:
        if cancelled():
            raise _CancelledError

    return check


def _build_cancelled_output(ms: float) -> GenerationOutput:
    """Return the output of a request cancelled during prefill."""
    return GenerationOutput(
        text="",
        tokens=(),
        finish_reason="cancelled",
        prefill_tokens=0,
        prefill_ms=ms,
        first_token_ms=ms,
        decode_ms=0.0,
        decode_steps=0,
    )


class OutputWriter:
    """Turns logits into tokens and text, and detects the end of the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        rules: StopRules = DEFAULT_STOP_RULES,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start a text; ``end_ids`` end it in addition to those of the base."""
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None
        self._end_ids = rules.list_end_ids(tokenizer.end_ids | end_ids)
        self._min_tokens, self._params = rules.min_tokens, params
        self.max_tokens = max_tokens
        self._counts: Counter[int] = Counter()
        self._draws = UniformGenerator(seed)
        self._text = IncrementalDetokenizer(tokenizer)
        self._stops = StopScanner(params.stop)

    def take_logits(self, logits: Scores) -> str:
        """Sample the next token; return the text that became final."""
        allowed = self._mask_end_tokens(logits) if self._is_too_short else None
        recent = self.tokens[-REPETITION_WINDOW:]
        token = sample_token(
            logits, self._counts, self._params, self._draws, recent=recent, allowed=allowed
        )
        if token in self._end_ids:
            self.finish_reason = "stop"
            return self._append(self._flush())
        self.tokens.append(token)
        self._counts[token] += 1
        text = self._text.push(token)
        if len(self.tokens) > self._min_tokens:
            text = self._stops.feed(text)
        if self._stops.found is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"
            text += self._flush()
        return self._append(text)

    def end_empty(self) -> None:
        """End a text that may have no token."""
        self.finish_reason = "length"

    @property
    def _is_too_short(self) -> bool:
        return len(self.tokens) < self._min_tokens and bool(self._end_ids)

    def _mask_end_tokens(self, logits: Scores) -> Mask:
        """Return a mask of the tokens that do not end the text."""
        allowed = np.ones(logits.shape[-1], dtype=np.bool_)
        allowed[[token for token in self._end_ids if token < len(allowed)]] = False
        return allowed

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def stop(self, why: Literal["cancelled", "timeout"] = "cancelled") -> str:
        """End the text here; return the text held back."""
        text = self._flush()
        self.finish_reason = why
        return self._append(text)

    def _flush(self) -> str:
        """Return the text held back; a stop string may be complete only now."""
        text = self._stops.feed(self._text.finish())
        if self._stops.found is not None:
            self.finish_reason = "stop"
        return text + self._stops.finish()

    def _append(self, text: str) -> str:
        self.pieces.append(text)
        return text


def measure_elapsed_ms(started: float) -> float:
    """Return the milliseconds since a value of `time.perf_counter`."""
    return (time.perf_counter() - started) * 1e3
