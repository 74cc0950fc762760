"""How much of a prompt is read at a time while other texts wait for their next token.

Chunked prefill (Agrawal et al. 2024, Sarathi-Serve) holds up the other texts of a batch by one
chunk between two tokens. What a chunk costs depends on the base, on the processor and, once a
prompt is long, on how much of it was read before: then even a few tokens cost several decode steps.
So the size of a chunk follows from measured times, and where a model can be stopped between layers,
other texts step there (`is_step_due`): chunks stay large enough to be efficient, and no gap is
longer than a few layers and a step. Sizes are few, because the number of threads is tuned for each
size apart (`engine.pace`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from expertctl.engine.decoder import PREFILL_CHUNK

STEPS_BETWEEN_STEPS = 0.8
"""How many decode steps of time a prompt gets between two steps; the rest is for what varies."""
STEPS_A_CHUNK = 1.0
"""How many a whole chunk may take where it cannot be stopped."""
STEPS_A_LAYER = 0.4
"""How many decode steps one layer of a chunk may take: the shortest time that can be chosen."""
LEAST_CHUNK = 4
"""A prompt goes on by so many tokens a pass however long they take, so that it comes to its end."""
LEAST_CHUNK_FROM_DISK = 128
"""The same where not all routed experts are in memory: each chunk may read most of them."""
FIRST_CHUNK = 8
"""The first chunk of a prompt, while nothing is known of it."""
CHUNK_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, PREFILL_CHUNK)
MAX_GROWTH = 2.0
"""The factor by which the next chunk may be larger: one short measurement proves little."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt that was read in one pass: its tokens, and the seconds that took."""

    tokens: int
    seconds: float


def choose_chunk_size(
    last: Chunk | None,
    step_seconds: Sequence[float],
    *,
    parts: int = 1,
    least: int = LEAST_CHUNK,
) -> int:
    """Return how many tokens of a prompt to read next, beside texts that are decoded.

    ``last`` is the last chunk of the same prompt, without the steps of others; ``step_seconds`` is
    what recent steps took; ``parts`` is into how many parts a pass is cut. The result is one of
    `CHUNK_SIZES`, or ``least`` where that is larger.
    """
    if last is None or not last.tokens or not step_seconds:
        return max(FIRST_CHUNK, least)
    steps = max(STEPS_A_CHUNK, STEPS_A_LAYER * parts)
    allowed, most = steps * median(step_seconds), MAX_GROWTH * last.tokens
    fitting = most if last.seconds <= 0 else min(most, last.tokens * allowed / last.seconds)
    sizes = [size for size in CHUNK_SIZES if size <= fitting]
    return max(sizes[-1] if sizes else CHUNK_SIZES[0], least)


def is_step_due(*, waited: float, part: float, step_seconds: Sequence[float]) -> bool:
    """Tell whether other texts step before the next part of a pass.

    They have ``waited`` so many seconds; the last part took ``part``, and so will the next.
    """
    return not step_seconds or waited + part > STEPS_BETWEEN_STEPS * median(step_seconds)
