"""Telling: who gets what a person should know while they wait. The command line prints it."""

from collections.abc import Callable

Tell = Callable[[str], None]
"""Gets a sentence for a person."""
WARNING = "warning: "
"""Begins one that is more than news."""


def tell_nobody(_: str) -> None:
    """Keep it to oneself."""
