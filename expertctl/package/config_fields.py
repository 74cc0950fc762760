"""Typed, bounded reading of a base's configuration; every problem is kept, not only the first.

``null`` counts as absent, except where a caller asks (`Fields.is_null`). After a problem a reader
returns a harmless value of the right type, so that the rest of the file is still looked at.
"""

from typing import TypeVar

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue

_T = TypeVar("_T")


class Fields:
    """One JSON object of a configuration and the problems found in it so far."""

    def __init__(
        self, values: JsonObject, *, prefix: str = "", problems: list[str] | None = None
    ) -> None:
        """Read ``values``; nested objects share the list of ``problems``."""
        self.values = values
        self.problems = [] if problems is None else problems
        self._prefix = prefix

    def get(self, name: str) -> JsonValue:
        """Return the raw value, None when absent."""
        return self.values.get(name)

    def is_null(self, name: str) -> bool:
        """Tell whether the value is there and null, for the few keys where that is not absence."""
        return name in self.values and self.values[name] is None

    def integer(self, name: str, *, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number between ``low`` and ``high``; without default it must be there."""
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        return self._refuse(name, value, f"a whole number from {low} to {high}", low)

    def number(self, name: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return a number between ``low`` and ``high``; without default it must be there."""
        value = self._value(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        return self._refuse(name, value, f"a number from {low:g} to {high:g}", low)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        return value if isinstance(value, bool) else self._refuse(name, value, "a boolean", default)

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return a string; without default it must be there."""
        value = self._value(name, default)
        return value if isinstance(value, str) else self._refuse(name, value, "a string", "")

    def nested(self, name: str) -> "Fields":
        """Return an object inside this one, empty when absent."""
        value = self._value(name, None)
        if value is None or isinstance(value, dict):
            return Fields(value or {}, prefix=f"{self._prefix}{name}.", problems=self.problems)
        return self._refuse(name, value, "an object", Fields({}, problems=self.problems))

    def refuse(self, name: str, why: str) -> None:
        """Note a problem with a field."""
        self.problems.append(f"{self._prefix}{name} {why}")

    def raise_problems(self, what: str) -> None:
        """Raise what was found.

        Raises:
            InvalidPackageError: when there is any problem.
        """
        if self.problems:
            raise InvalidPackageError(what, self.problems)

    def _value(self, name: str, default: JsonValue) -> JsonValue:
        value = self.values.get(name)
        return default if value is None else value

    def _refuse(self, name: str, value: JsonValue, wanted: str, instead: _T) -> _T:
        self.refuse(name, f"is {_shown(value)}, it must be {wanted}")
        return instead


def _shown(value: JsonValue) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value)[:40]
