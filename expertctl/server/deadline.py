"""By when an answer is wanted: what a request says, else what is usual on this server."""

import time
from typing import Annotated

from msgspec import Meta

MAX_MS = 86_400_000
"""A day."""
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_MS)]


def deadline_of(timeout_ms: int | None, *, usual: float | None) -> float | None:
    """Return a time of `time.monotonic`; ``usual`` seconds from now where nothing is said."""
    seconds = usual if timeout_ms is None else timeout_ms / 1e3
    return None if seconds is None else time.monotonic() + seconds
