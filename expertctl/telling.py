"""Telling: callbacks for what the user should know while waiting; the command line prints it."""

from collections.abc import Callable

Tell = Callable[[str], None]
"""Called with a sentence for the user."""
WARNING = "warning: "
"""Begins a sentence that is more than news."""


def tell_nobody(_: str) -> None:
    """Do nothing with the sentence."""
