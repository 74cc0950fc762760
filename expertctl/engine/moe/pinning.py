"""Which experts come into slots because they are pinned, where pins change while a base runs.

Pinned experts that are resident stay where they are. Absent ones take free slots, then those of
the least valuable experts, so pins cost no more than they must. As with every exchange, nothing
is moved here.
"""

from collections.abc import Iterator, Sequence

from expertctl.engine.moe.layer_slots import EMPTY, LayerSlots
from expertctl.engine.moe.updates import Swap


def pin_swaps(slots: Sequence[LayerSlots]) -> list[Swap]:
    """Return the swaps that bring all pinned experts into slots, layer by layer.

    A layer is a position in ``slots``.
    """
    return [swap for number, layer in enumerate(slots) for swap in _swaps(number, layer)]


def _swaps(number: int, layer: LayerSlots) -> Iterator[Swap]:
    absent = [expert for expert in sorted(layer.pinned) if not layer.hit_mask[expert]]
    if not absent:
        return
    slots = [*layer.free, *layer.evictable()]  # enough: there are no more pins than slots
    for slot, expert in zip(slots, absent, strict=False):
        gone = int(layer.ids[slot])
        yield Swap(number, slot, None if gone == EMPTY else gone, expert)
