"""What a call is for: warming up, reading a prompt, or generating.

The phase is inferred once for a whole call, before it is cut into batches: the last token of a
prompt alone in its batch is still part of a prompt, and a few tokens that are verified together
while generating are no prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

MAX_VERIFIED_TOKENS = 4
"""Up to so many tokens at once may be a step of generating, whatever the caller."""


class Phase(StrEnum):
    """What a call is for."""

    WARMUP = "warmup"
    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCall:
    """What a decoder is asked to read at once."""

    tokens: int
    batch: int
    """The most tokens that it reads together."""
    scored: int
    """Tokens whose logits are wanted."""
    warmup: bool = False

    @property
    def phase(self) -> Phase:
        """The phase of all its batches."""
        if self.warmup:
            return Phase.WARMUP
        if self.tokens <= 1 or self.tokens <= min(MAX_VERIFIED_TOKENS, self.batch):
            return Phase.DECODE
        if self.scored < self.tokens or self.tokens > self.batch:
            return Phase.PROMPT
        return Phase.DECODE


@dataclass(frozen=True, slots=True)
class PhaseBatch:
    """Tokens that are read together, and the phase of the call that they are part of."""

    tokens: int
    phase: Phase


def split_call(call: ForwardCall) -> Iterator[PhaseBatch]:
    """Cut a call into batches; each inherits its phase."""
    for first in range(0, call.tokens, call.batch):
        yield PhaseBatch(min(call.batch, call.tokens - first), call.phase)


def resolve_phase(phase: Phase | None, tokens: int) -> Phase:
    """Return the phase by which the cache works on a batch; ``phase`` None: unknown.

    More tokens than are ever verified at once are worked on like a prompt, whatever they are.
    """
    match phase:
        case Phase.WARMUP | Phase.PROMPT:
            return phase
        case Phase.DECODE:
            return Phase.DECODE if tokens <= MAX_VERIFIED_TOKENS else Phase.PROMPT
        case None:
            return Phase.DECODE if tokens <= 1 else Phase.PROMPT


def is_cache_active(phase: Phase | None, *, tokens: int, lanes: int) -> bool:
    """Tell whether hot lanes take part in a batch; several do for prompts and single tokens."""
    works_as = resolve_phase(phase, tokens)
    if works_as is Phase.WARMUP or lanes == 0:
        return False
    return lanes == 1 or (tokens > 1 if works_as is Phase.PROMPT else tokens == 1)
