"""The limits of the fields that say how tokens are drawn.

There are no defaults here: what a client leaves open is decided by `expertctl.routing.presets`,
whichever API the request came by.
"""

from msgspec import Meta

from expertctl.routing.presets import LIMITS

_LEAST_TOP_P = 1e-9
"""Stands for a ``top_p`` of 0: the likeliest token is always kept, here it alone."""


def within(name: str) -> Meta:
    """Return the limits of a field."""
    low, high = LIMITS[name]
    return Meta(ge=low, le=high)


def top_p_of(given: float | None) -> float | None:
    """Return the effective ``top_p`` for the value that a client gives."""
    return _LEAST_TOP_P if given == 0 else given
