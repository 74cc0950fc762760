"""How tokens are drawn by the published APIs: the limits of fields, and what silence means."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import Meta

from expertctl.routing.presets import LIMITS, SamplingWishes

_LEAST_TOP_P = 1e-9
"""The likeliest token is always in: of nothing at all, it alone is left."""
_AS_PUBLISHED: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What the published APIs do, and for our own fields what changes nothing."""


def within(name: str) -> Meta:
    """Return the limits of a field."""
    low, high = LIMITS[name]
    return Meta(ge=low, le=high)


def top_p_of(given: float | None) -> float | None:
    """Return the ``top_p`` that is meant by what a client gives."""
    return _LEAST_TOP_P if given == 0 else given


def as_published(given: SamplingWishes) -> SamplingWishes:
    """Add what the published APIs do where a client is silent.

    The length and the strings that end an answer are left to the experts: they know their own end.
    """
    silent = {name: one for name, one in _AS_PUBLISHED.items() if getattr(given, name) is None}
    return replace(given, **silent)
