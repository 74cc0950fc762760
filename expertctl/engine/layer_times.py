"""How long the layers of a base took: seconds by place and by kind of operation.

A place is a part of a base: ``embedding``, ``layers.3.attention``, ``layers.3.mlp``, ``head``; with
``.experts`` behind it, what a plan adds there. A kind is the name of a kernel; a decoder that knows
only places has none.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from expertctl.schema.strict_json import JsonObject, JsonValue


class LayerTimes:
    """Adds up the passes over one base."""

    def __init__(self) -> None:
        """Begin with no time."""
        self.places: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, float] = defaultdict(float)

    def add(self, place: str, seconds: float, *, kind: str | None = None) -> None:
        """Add the time of one operation, or of a whole place."""
        self.places[place] += seconds
        if kind is not None:
            self.kinds[kind] += seconds

    def add_all(
        self, places: Iterable[str], kinds: Iterable[str], seconds: Iterable[float]
    ) -> None:
        """Add the times of the operations of a program."""
        for place, kind, spent in zip(places, kinds, seconds, strict=True):
            self.add(place, float(spent), kind=kind)

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.places.values())

    def to_json(self, *, passes: int) -> JsonObject:
        """Return milliseconds of one pass of so many, by place and by kind, in their order."""
        return {"places": _ms(self.places, passes), "kinds": _ms(self.kinds, passes)}


def _ms(seconds: Mapping[str, float], passes: int) -> JsonValue:
    return {name: round(spent / passes * 1e3, 4) for name, spent in seconds.items()}
