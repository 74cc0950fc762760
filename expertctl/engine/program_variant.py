"""What a program of a decoder allows for: which rows attend together, which plans they have."""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_delta import PackedDeltas


@dataclass(frozen=True, slots=True)
class Variant:
    """What a program allows for.

    ``together``: consecutive tokens of one text, else one token each of several. ``numbers``: what
    pages hold. ``adapters``: the schemes of plans; ``scales``: whether some have factors. What they
    add is ``fused`` with the products of the base where that can be; the bits are the same.
    """

    together: bool
    numbers: Scheme
    adapters: frozenset[Scheme]
    scales: bool
    fused: bool = True
    routed: frozenset[Scheme] = frozenset()
    """The schemes of plans that change routed experts."""
    scales_routed: bool = False
    """Whether one of these plans has factors of the input of routed experts."""


def variant(
    *, together: bool, numbers: Scheme, plans: Sequence[PackedDeltas], fused: bool = True
) -> Variant:
    """Return what a batch with these plans needs."""
    adapters = frozenset(plan.scheme for plan in plans if plan.width)
    scales = any(plan.has_scales for plan in plans)
    routed = frozenset(plan.scheme for plan in plans if plan.routed is not None)
    scales_routed = any(plan.scales_routed for plan in plans)
    fused = fused or not adapters
    return Variant(together, numbers, adapters, scales, fused, routed, scales_routed)
