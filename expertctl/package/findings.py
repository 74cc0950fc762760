"""All problems of one thing, gathered from steps that each report their own."""

from collections.abc import Callable
from typing import TypeVar

from expertctl.errors import ExpertError, InvalidPackageError

_Value = TypeVar("_Value")


class Findings:
    """The problems of one thing so far, each said once, and the first way out."""

    def __init__(self, what: str) -> None:
        """Begin without a problem."""
        self._what = what
        self.problems: list[str] = []
        self._hints: list[str] = []

    def of(self, step: Callable[[], _Value]) -> _Value | None:
        """Run a step and keep its problems; those of another thing begin with its name."""
        try:
            return step()
        except InvalidPackageError as error:
            prefix = "" if error.what == self._what else f"{error.what}: "
            self.problems += [f"{prefix}{problem}" for problem in error.problems]
            self._hints.append(error.hint)
        except ExpertError as error:
            self.problems.append(error.message.removeprefix(f"{self._what}: "))
            self._hints.append(error.hint)
        return None

    def raise_if_any(self) -> None:
        """Report everything at once.

        Raises:
            InvalidPackageError: when there is any problem.
        """
        if self.problems:
            hint = next((hint for hint in self._hints if hint), "")
            raise InvalidPackageError(self._what, dict.fromkeys(self.problems), hint=hint)
