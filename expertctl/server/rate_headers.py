"""The headers that tell a caller how much of its limits is left, in the names of each API.

OpenAI's clients are told the time until a limit is whole again as a duration, Anthropic's the
moment. A caller without limits gets no such headers.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from expertctl.server.quotas import RateLimits, Standing

Header = tuple[str, str]
_FACTS = ("limit", "remaining", "reset")
_KINDS = ("requests", "tokens")
HEADER_NAMES = (
    *(f"x-ratelimit-{fact}-{kind}" for fact in _FACTS for kind in _KINDS),
    *(f"anthropic-ratelimit-{kind}-{fact}" for kind in _KINDS for fact in _FACTS),
)
"""All of these headers, which browsers show to pages only where they are named."""


def openai_headers(limits: RateLimits) -> Iterator[Header]:
    """Yield ``x-ratelimit-limit-requests`` and the others."""
    for what, standing in _each(limits):
        yield f"x-ratelimit-limit-{what}", str(standing.limit)
        yield f"x-ratelimit-remaining-{what}", str(standing.remaining)
        yield f"x-ratelimit-reset-{what}", duration(standing.reset_seconds)


def anthropic_headers(limits: RateLimits, *, now: datetime) -> Iterator[Header]:
    """Yield ``anthropic-ratelimit-requests-limit`` and the others; ``now`` is in UTC."""
    for what, standing in _each(limits):
        reset = now + timedelta(seconds=standing.reset_seconds)
        moment = reset.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        yield f"anthropic-ratelimit-{what}-limit", str(standing.limit)
        yield f"anthropic-ratelimit-{what}-remaining", str(standing.remaining)
        yield f"anthropic-ratelimit-{what}-reset", moment


def duration(seconds: float) -> str:
    """Return a duration as OpenAI's API writes it: ``250ms``, ``1s``, ``6m0s``."""
    milliseconds = round(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds / 1e3, 60)
    shown = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"


def _each(limits: RateLimits) -> Iterator[tuple[str, Standing]]:
    for what, standing in (("requests", limits.requests), ("tokens", limits.tokens)):
        if standing is not None:
            yield what, standing
