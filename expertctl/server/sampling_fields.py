"""The limits of the fields that say how tokens are drawn.

There are no defaults here: what a client leaves open is decided by `expertctl.routing.presets`,
whichever API the request came by.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from expertctl.engine.stop import MAX_STOP_TOKENS, StopRules
from expertctl.routing.presets import LIMITS
from expertctl.server.field_error import FieldError

_LEAST_TOP_P = 1e-9
"""Stands for a ``top_p`` of 0: the likeliest token is always kept, here it alone."""
_MOST_TOKENS = int(LIMITS["max_tokens"][1])
TopK = Annotated[int, Meta(ge=-1, le=int(LIMITS["top_k"][1]))]
MinTokens = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
StopTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_STOP_TOKENS)
]


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
