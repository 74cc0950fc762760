"""The deadline of an answer: from the request, else the default of this server."""

import time
from typing import Annotated

from msgspec import Meta

MAX_MS = 86_400_000
"""A day."""
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_MS)]


def deadline_of(timeout_ms: int | None, *, usual: float | None) -> float | None:
    """Return a time of `time.monotonic`; ``usual`` seconds from now if none is given."""
    seconds = usual if timeout_ms is None else timeout_ms / 1e3
    return None if seconds is None else time.monotonic() + seconds
