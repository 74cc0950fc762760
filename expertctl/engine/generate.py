"""One generation: prefill, then one token after the other, as pieces of text that never change.

A token that ends the text is not part of it. Time that the consumer of the pieces takes is
not counted.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.decoder import DecodeResult, PrefillResult
from expertctl.engine.kv_room import KVRoom, all_or_none
from expertctl.engine.prompt_scores import ScoreRows
from expertctl.engine.sampling import REPETITION_WINDOW, Draws, Mask, sample
from expertctl.engine.stop import USUAL_RULES, StopRules, StopScanner
from expertctl.engine.tokenizer import TextStream, Tokenizer
from expertctl.routing.plan import SamplingParams

CacheIn = TypeVar("CacheIn", contravariant=True)
DeltasIn = TypeVar("DeltasIn", contravariant=True)
Cache = TypeVar("Cache", bound=KVRoom)
PlanDeltas = TypeVar("PlanDeltas")
FinishReason = Literal["stop", "length", "timeout", "cancelled"]
Cancelled = Callable[[], bool]
"""Asked between two steps whether the answer is still wanted."""


def never() -> bool:
    """Want the whole answer."""
    return False


class _CancelledError(Exception):
    """The prompt need not be read any further."""


class Reading(Protocol):
    """A model in the middle of one text; it holds its plan and what it has read so far."""

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        """Read a prompt."""

    def decode(self, token: int) -> DecodeResult:
        """Read one more token."""


class TextDecoder(Protocol[CacheIn, DeltasIn]):
    """What our decoders have in common; each has caches and compiled plans of its own."""

    def prefill(
        self,
        ids: Sequence[int],
        cache: CacheIn,
        deltas: DeltasIn,
        *,
        soft_prompt: Tensor | None = None,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
    ) -> PrefillResult:
        """Read a prompt behind what is in the cache."""

    def decode(self, token: int, cache: CacheIn, deltas: DeltasIn) -> DecodeResult:
        """Read one more token."""


@dataclass(frozen=True, slots=True)
class NativeReading(Generic[Cache, PlanDeltas]):
    """A decoder of ours in the middle of one text."""

    decoder: TextDecoder[Cache, PlanDeltas]
    cache: Cache
    deltas: PlanDeltas
    soft_prompt: Tensor | None = None
    progress: Progress = no_progress
    scores: ScoreRows | None = None
    """Gets the logits of every position of the prompt that is read."""

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        """Read a prompt behind what is in the cache; ``progress`` counts tokens and may raise."""
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


def step_each(texts: Sequence[tuple[Reading, int]]) -> Tensor:
    """Read one more token of each text, one after the other; return scores [texts, vocab].

    Where one fails, none has read a token.
    """
    rooms = [reading.cache for reading, _ in texts if isinstance(reading, NativeReading)]
    with all_or_none(rooms):
        return torch.stack([reading.decode(token).logits for reading, token in texts])


@dataclass(frozen=True, slots=True)
class Generated:
    """What came out, and what it took; ``tokens`` are those of the text, no end token."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prefill_tokens: int
    """Tokens of the prompt that were read, virtual ones too."""
    prefill_ms: float
    first_token_ms: float
    """From the start of prefill to the first token."""
    decode_ms: float
    decode_steps: int
    stopped_by: str | None = None
    """The stop string that ended it."""

    @property
    def tokens_per_s(self) -> float:
        """Steps of decoding in a second; 0 when there was none."""
        return self.decode_steps / self.decode_ms * 1e3 if self.decode_ms else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of the prompt that were read in a second; 0 when there was none."""
        return self.prefill_tokens / self.prefill_ms * 1e3 if self.prefill_ms else 0.0


def generate(
    reading: Reading, ids: Sequence[int], writer: "Writer", cancelled: Cancelled = never
) -> Generator[str, None, Generated]:
    """Yield pieces of text as they become certain; return the whole at the end.

    ``ids`` are still to be read; `stopping` may end the reading of a prompt before its end.
    """
    started = time.perf_counter()
    try:
        prefilled = reading.prefill(ids)
    except _CancelledError:
        return _unread(_since(started))
    piece, first_ms = writer.take(prefilled.logits), _since(started)
    decode_ms, steps = 0.0, 0
    while True:
        if piece:
            yield piece
        if writer.finish_reason is not None:
            break
        if cancelled():
            piece = writer.give_up()
            continue
        started = time.perf_counter()
        piece = writer.take(reading.decode(writer.tokens[-1]).logits)
        decode_ms, steps = decode_ms + _since(started), steps + 1
    return Generated(
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


def stopping(cancelled: Cancelled) -> Progress:
    """Return what ends the reading of a prompt that is not wanted any more."""

    def check(_: int) -> None:
        if cancelled():
            raise _CancelledError

    return check


def _unread(ms: float) -> Generated:
    """Return what came out of a prompt that was not read to its end."""
    return Generated(
        text="",
        tokens=(),
        finish_reason="cancelled",
        prefill_tokens=0,
        prefill_ms=ms,
        first_token_ms=ms,
        decode_ms=0.0,
        decode_steps=0,
    )


class Writer:
    """Turns scores into tokens and text, and knows when the text is at its end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        rules: StopRules = USUAL_RULES,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a text; ``end_ids`` end it beside those of the base."""
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None
        self._end_ids = rules.end_ids(tokenizer.end_ids | end_ids)
        self._min_tokens, self._params = rules.min_tokens, params
        self.max_tokens = max_tokens
        self._counts: Counter[int] = Counter()
        self._draws = Draws(seed)
        self._text = TextStream(tokenizer)
        self._stops = StopScanner(params.stop)

    def take(self, logits: Tensor) -> str:
        """Draw the next token; return the text that is certain now."""
        allowed = self._without_ends(logits) if self._is_too_short else None
        recent = self.tokens[-REPETITION_WINDOW:]
        token = sample(
            logits, self._counts, self._params, self._draws, recent=recent, allowed=allowed
        )
        if token in self._end_ids:
            self.finish_reason = "stop"
            return self._kept(self._rest())
        self.tokens.append(token)
        self._counts[token] += 1
        text = self._text.push(token)
        if len(self.tokens) > self._min_tokens:
            text = self._stops.push(text)
        if self._stops.found is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"
            text += self._rest()
        return self._kept(text)

    def end_unwritten(self) -> None:
        """End a text that may have no token."""
        self.finish_reason = "length"

    @property
    def _is_too_short(self) -> bool:
        return len(self.tokens) < self._min_tokens and bool(self._end_ids)

    def _without_ends(self, logits: Tensor) -> Mask:
        """Return which tokens may come where none may end the text."""
        allowed = np.ones(logits.shape[-1], dtype=np.bool_)
        allowed[[token for token in self._end_ids if token < len(allowed)]] = False
        return allowed

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def give_up(self, why: Literal["cancelled", "timeout"] = "cancelled") -> str:
        """End the text where it is; return what was held back."""
        text = self._rest()
        self.finish_reason = why
        return self._kept(text)

    def _rest(self) -> str:
        """Return what was held back; a stop string may be complete only now."""
        text = self._stops.push(self._text.finish())
        if self._stops.found is not None:
            self.finish_reason = "stop"
        return text + self._stops.finish()

    def _kept(self, text: str) -> str:
        self.pieces.append(text)
        return text


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
