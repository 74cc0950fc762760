"""How the published APIs draw tokens: the limits of fields, and their defaults."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import Meta

from expertctl.routing.presets import LIMITS, SamplingWishes

_LEAST_TOP_P = 1e-9
"""Stands for a ``top_p`` of 0: the likeliest token is always kept, here it alone."""
_AS_PUBLISHED: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Defaults of the published APIs; neutral values for our own fields."""


def within(name: str) -> Meta:
    """Return the limits of a field."""
    low, high = LIMITS[name]
    return Meta(ge=low, le=high)


def top_p_of(given: float | None) -> float | None:
    """Return the effective ``top_p`` for the value that a client gives."""
    return _LEAST_TOP_P if given == 0 else given


def as_published(given: SamplingWishes) -> SamplingWishes:
    """Fill in the defaults of the published APIs where a client gives no value.

    The length and the stop strings are left to the experts, which know their own end.
    """
    silent = {name: one for name, one in _AS_PUBLISHED.items() if getattr(given, name) is None}
    return replace(given, **silent)
