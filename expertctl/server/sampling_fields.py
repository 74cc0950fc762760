"""How the published APIs draw tokens: the limits of fields, and their defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from expertctl.engine.stop import MAX_STOP_TOKENS, StopRules
from expertctl.routing.presets import LIMITS, SamplingWishes
from expertctl.server.field_error import FieldError

_LEAST_TOP_P = 1e-9
_MOST_TOKENS = int(LIMITS["max_tokens"][1])
TopK = Annotated[int, Meta(ge=-1, le=int(LIMITS["top_k"][1]))]
MinTokens = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
StopTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_STOP_TOKENS)
]
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


def top_k_of(given: int | None) -> int | None:
    """Return the effective ``top_k``; -1 switches it off, as 0 does."""
    return 0 if given == -1 else given


def stop_rules_of(
    *,
    min_tokens: int | None,
    ignore_eos: bool | None,
    stop_token_ids: Sequence[int] | None,
    max_tokens: int | None,
) -> StopRules:
    """Return when an answer may end.

    Raises:
        FieldError: when it may not end before it has to.
    """
    least = min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise FieldError(
            f"min_tokens {least} is more than max_tokens {max_tokens}", field="min_tokens"
        )
    return StopRules(least, bool(ignore_eos), frozenset(stop_token_ids or ()))


def top_p_of(given: float | None) -> float | None:
    """Return the effective ``top_p`` for the value that a client gives."""
    return _LEAST_TOP_P if given == 0 else given


def as_published(given: SamplingWishes) -> SamplingWishes:
    """Fill in the defaults of the published APIs where a client gives no value.

    The length and the stop strings are left to the experts, which know their own end.
    """
    silent = {name: one for name, one in _AS_PUBLISHED.items() if getattr(given, name) is None}
    return replace(given, **silent)
