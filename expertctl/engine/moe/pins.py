"""Which experts a profile pins: they come first and keep their slots, whatever is asked for."""

import re
from dataclasses import dataclass, replace

from expertctl.engine.moe.usage_profile import UsageProfile
from expertctl.errors import UsageError
from expertctl.package.experts_config import MAX_COUNT

_PINS = re.compile(r"([0-9]{1,4})(%?)")
_PERCENT = 100


@dataclass(frozen=True, slots=True)
class TopPins:
    """So many experts of each layer: those that were asked for most."""

    count: int

    def __str__(self) -> str:
        """Return it as a person writes it."""
        return str(self.count)


@dataclass(frozen=True, slots=True)
class SharePins:
    """Those that at least a share of all prompts, or tokens, of a profile ask for."""

    share: float
    """From 0 to 1."""

    def __str__(self) -> str:
        """Return it as a person writes it."""
        return f"{self.share:.0%}"


Pins = TopPins | SharePins


def parse_pins(text: str) -> Pins:
    """Read a number of experts, such as ``8``, or a share of prompts, such as ``50%``.

    Raises:
        UsageError: for anything else.
    """
    match = _PINS.fullmatch(text.strip())
    number = int(match[1]) if match else -1
    if match and match[2] and number <= _PERCENT:
        return SharePins(number / _PERCENT)
    if match and not match[2] and number <= MAX_COUNT:
        return TopPins(number)
    raise UsageError(
        f"{text[:40]!r} is neither a number of experts to pin nor a share up to 100%",
        hint="write 8, the first of each layer, or 50%, those that half of all tokens ask for",
    )


def pinned(pins: Pins, usage: UsageProfile, layer: int, *, capacity: int) -> frozenset[int]:
    """Return which experts are pinned in a layer with ``capacity`` slots.

    A share pins no more experts than there are slots.

    Raises:
        UsageError: when more experts are to be pinned than there are slots, or there are none.
    """
    match pins:
        case TopPins(count):
            if count > capacity:
                raise UsageError(
                    f"{count} of each layer's routed experts are to be pinned, but layer {layer} "
                    f"has {capacity} slots",
                    hint="pin fewer experts, or give more memory",
                )
            return frozenset(usage.top(layer, count))
        case SharePins(share):
            universal = set(replace(usage, threshold=share).universal(layer))
            ranked = [expert for expert in usage.ranked(layer) if expert in universal]
            if ranked and not capacity:
                raise UsageError(
                    f"{len(ranked)} of the routed experts of layer {layer} are to be pinned, but "
                    "it has no slots",
                    hint="pin none, or give more memory",
                )
            return frozenset(ranked[:capacity])
