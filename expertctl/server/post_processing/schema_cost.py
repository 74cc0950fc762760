"""How often a JSON Schema may look at one value: the bound keeps a small schema from taking hours.

In a chain of n schemas that each apply the next one twice, a value is looked at 2ⁿ times. So a
schema is read as a graph first: edges lead from each part to the parts that it applies to the same
value, and to those that it applies one level further down. Only references within the schema are
followed; there are no others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue

MAX_PARTS = 5_000
MOST = 10**12
"""Counts saturate here, far beyond what is ever allowed."""

_HERE = ("not", "if", "then", "else")
_HERE_LISTS = ("allOf", "anyOf", "oneOf")
_HERE_NAMED = ("dependentSchemas", "dependencies")
_BELOW = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames")
_BELOW_LISTS = ("prefixItems", "items")
_REFUSED = (
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "$vocabulary",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords that would need another way to count, or to resolve references."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One subschema; ``here`` and ``below`` are numbers of others."""

    weight: int
    here: tuple[int, ...]
    below: tuple[tuple[int, ...], ...]
    """Groups; at most one part of each is applied to the same value."""


class SchemaCost:
    """The graph of a schema."""

    def __init__(self, parts: Sequence[_Part], order: Sequence[int]) -> None:
        """Keep the parts, of which the first is the root; in ``order`` applied parts come first."""
        self._parts = parts
        self._order = order

    def looks(self, levels: int) -> list[int]:
        """Return for each level the most looks at a value at that depth."""
        counts, found = [0] * len(self._parts), list[int]()
        for level in range(levels):
            counts = self._level(counts, at_top=level == 0)
            found.append(counts[0])
        return found

    def _level(self, above: Sequence[int], *, at_top: bool) -> list[int]:
        counts = [0] * len(self._parts)
        for number in self._order:
            part = self._parts[number]
            own = part.weight if at_top else 0
            here = sum(counts[other] for other in part.here)
            below = sum(max(above[other] for other in group) for group in part.below)
            counts[number] = min(MOST, own + here + below)
        return counts


def read_cost(schema: JsonObject, *, where: str) -> SchemaCost:
    """Read the graph of a schema.

    Raises:
        UsageError: when it refers to what it does not contain, or to itself without end.
    """
    reading = _Reading(schema, where)
    parts = reading.parts()
    return SchemaCost(parts, _ordered(parts, reading.places))


class _Reading:
    """Numbers the parts as they are found, beginning with the root."""

    def __init__(self, schema: JsonObject, where: str) -> None:
        self._schema = schema
        self._where = where
        self._numbers = dict[int, int]()
        self._found = list[JsonObject]()
        self.places = list[str]()

    def parts(self) -> list[_Part]:
        parts = list[_Part]()
        self._number(self._schema, self._where)
        while len(parts) < len(self._found):
            number = len(parts)
            parts.append(self._part(self._found[number], self.places[number]))
        return parts

    def _part(self, schema: JsonObject, place: str) -> _Part:
        self._refuse(schema, place)
        here = tuple(self._number(child, at) for at, child in self._here(schema, place))
        below = tuple(
            tuple(self._number(child, at) for at, child in group)
            for group in _below(schema, place)
            if group
        )
        return _Part(_weight(schema), here, below)

    def _number(self, schema: JsonObject, place: str) -> int:
        known = self._numbers.get(id(schema))
        if known is not None:
            return known
        if len(self._found) == MAX_PARTS:
            raise UsageError(
                f"{self._where} has over {MAX_PARTS} parts", hint="use a smaller schema"
            )
        self._numbers[id(schema)] = len(self._found)
        self._found.append(schema)
        self.places.append(place)
        return len(self._found) - 1

    def _refuse(self, schema: JsonObject, place: str) -> None:
        names = (*_REFUSED, *(("$id", "id", "$schema") if schema is not self._schema else ()))
        for name in names:
            if isinstance(schema.get(name), str | dict | bool):
                raise UsageError(
                    f"{place}/{name}: {name} is not read here", hint="write the schema without it"
                )

    def _here(self, schema: JsonObject, place: str) -> Iterator[tuple[str, JsonObject]]:
        """Yield the schemas that are applied to the same value."""
        yield from _children(schema, place, _HERE)
        for name in _HERE_LISTS:
            yield from _listed(schema, place, name)
        for name in _HERE_NAMED:
            yield from _named(schema, place, name)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self._target(reference, f"{place}/$ref")
            if isinstance(target, dict):
                yield f"{self._where}{reference[1:]}", target

    def _target(self, reference: str, place: str) -> JsonValue:
        """Find the schema that a reference names."""
        if reference != "#" and not reference.startswith("#/"):
            raise UsageError(
                f"{place}: {reference[:200]!r} is not in this schema, and nothing is fetched",
                hint="put it below $defs, and refer to it by #/$defs/NAME",
            )
        target: JsonValue = self._schema
        for word in unquote(reference[1:]).split("/")[1:]:
            target = _child(target, word.replace("~1", "/").replace("~0", "~"))
        if not isinstance(target, dict | bool):
            raise UsageError(
                f"{place}: there is no schema at {reference[:200]!r}", hint="correct the reference"
            )
        return target


def _below(schema: JsonObject, place: str) -> Iterator[list[tuple[str, JsonObject]]]:
    """Yield the schemas applied one level further down, in groups of which one applies."""
    yield list(_named(schema, place, "properties"))
    for child in _named(schema, place, "patternProperties"):
        yield [child]
    for child in _children(schema, place, _BELOW):
        yield [child]
    for name in _BELOW_LISTS:
        yield list(_listed(schema, place, name))


def _children(
    schema: JsonObject, place: str, names: Sequence[str]
) -> Iterator[tuple[str, JsonObject]]:
    for name in names:
        child = schema.get(name)
        if isinstance(child, dict):
            yield f"{place}/{name}", child


def _listed(schema: JsonObject, place: str, name: str) -> Iterator[tuple[str, JsonObject]]:
    children = schema.get(name)
    for number, child in enumerate(children if isinstance(children, list) else ()):
        if isinstance(child, dict):
            yield f"{place}/{name}/{number}", child


def _named(schema: JsonObject, place: str, name: str) -> Iterator[tuple[str, JsonObject]]:
    children = schema.get(name)
    for word, child in (children if isinstance(children, dict) else {}).items():
        if isinstance(child, dict):
            yield f"{place}/{name}/{word[:80]}", child


def _child(value: JsonValue, word: str) -> JsonValue:
    if isinstance(value, dict):
        return value.get(word)
    if isinstance(value, list) and word.isascii() and word.isdigit() and int(word) < len(value):
        return value[int(word)]
    return None


def _weight(schema: Mapping[str, JsonValue]) -> int:
    """Return the cost of one look; that of an ``enum`` is its length."""
    return 1 + sum(len(v) if isinstance(v, list | dict) else 1 for v in schema.values())


def _ordered(parts: Sequence[_Part], places: Sequence[str]) -> list[int]:
    """Order the parts so that each comes after those it applies to the same value."""
    waiting = [len(part.here) for part in parts]
    users: list[list[int]] = [[] for _ in parts]
    for number, part in enumerate(parts):
        for other in part.here:
            users[other].append(number)
    order = [number for number, count in enumerate(waiting) if count == 0]
    for number in order:  # grows during the loop
        for user in users[number]:
            waiting[user] -= 1
            if waiting[user] == 0:
                order.append(user)
    if len(order) < len(parts):
        place = places[next(n for n, count in enumerate(waiting) if count)]
        raise UsageError(
            f"{place} refers to itself without an end", hint="let it go through a property or item"
        )
    return order
